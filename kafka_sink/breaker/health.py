"""What the outcome of an attempt says about the broker's health."""

from __future__ import annotations

from enum import Enum

from kafka_sink.errors import BrokerRefusedError, KafkaSinkError, ProtocolError
from kafka_sink.kafka_errors import error_of


class Health(Enum):
    """NEUTRAL: the error blames the batch, the metadata or the permissions."""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"
    NEUTRAL = "neutral"


def has_response(exception: Exception | None) -> bool:
    """Whether the broker responded at all."""
    return exception is None or isinstance(exception, BrokerRefusedError)


def health_of(exception: Exception | None) -> Health:
    """By error code. No response is a bad sign, unless the client itself gave up."""
    if exception is None:
        return Health.HEALTHY
    if isinstance(exception, BrokerRefusedError):
        return Health.UNHEALTHY if error_of(exception.error_code).blames_broker else Health.NEUTRAL
    if isinstance(exception, OSError | ProtocolError) or not isinstance(exception, KafkaSinkError):
        return Health.UNHEALTHY
    return Health.NEUTRAL
