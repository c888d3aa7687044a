"""What an attempt's end says of the broker's health."""

from __future__ import annotations

from enum import Enum

from kafka_sink.errors import BrokerRefusedError, KafkaSinkError, ProtocolError


class Health(Enum):
    """NEUTRAL: the batch, the metadata or the rights are to blame."""

    HEALTHY = "healthy"
    UNHEALTHY = "sick"
    NEUTRAL = "neutral"


# REQUEST_TIMED_OUT, NOT_ENOUGH_REPLICAS and ..._AFTER_APPEND, UNKNOWN_SERVER_ERROR, KAFKA_STORAGE_ERROR,
# NETWORK_EXCEPTION, THROTTLING_QUOTA_EXCEEDED.
_UNHEALTHY_CODES = frozenset({7, 19, 20, -1, 56, 13, 89})


def has_response(exception: Exception | None) -> bool:
    """Whether the broker said anything at all."""
    return exception is None or isinstance(exception, BrokerRefusedError)


def health_of(exception: Exception | None) -> Health:
    """By error code; no answer at all is a bad sign, unless the client itself was in the way."""
    if exception is None:
        return Health.HEALTHY
    if isinstance(exception, BrokerRefusedError):
        return Health.UNHEALTHY if exception.error_code in _UNHEALTHY_CODES else Health.NEUTRAL
    if isinstance(exception, OSError | ProtocolError) or not isinstance(exception, KafkaSinkError):
        return Health.UNHEALTHY
    return Health.NEUTRAL
