"""What the outcome of an attempt shows about a broker's health."""

from __future__ import annotations

from enum import Enum

from kafka_sink.errors import BrokerRefusedError, KafkaSinkError, ProtocolError
from kafka_sink.kafka_errors import error_of


class Health(Enum):
    """NEUTRAL: the error is about the batch, the metadata or the permissions, and not the broker."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    NEUTRAL = "neutral"


def has_response(exception: Exception | None) -> bool:
    return exception is None or isinstance(exception, BrokerRefusedError)


def health_of(exception: Exception | None) -> Health:
    """What an error shows about the broker's health.

    A missing response is a bad sign, unless the client itself gave up.
    """
    if exception is None:
        return Health.HEALTHY
    if isinstance(exception, BrokerRefusedError):
        return Health.UNHEALTHY if error_of(exception.error_code).blames_broker else Health.NEUTRAL
    if isinstance(exception, OSError | ProtocolError) or not isinstance(exception, KafkaSinkError):
        return Health.UNHEALTHY
    return Health.NEUTRAL
