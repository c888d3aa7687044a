"""What options say together: contradictions are errors, what Kafka's producer adjusts is adjusted alike.

Source of the rules: ``ProducerConfig`` and ``CommonClientConfigs`` of kafka-clients 4.3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kafka_sink.errors import ConfigurationError
from kafka_sink.options.table import SPECS
from kafka_sink.options.values import INT_MAX

# A broker remembers the last five batches of a producer per partition; with more in flight it could not tell
# a repeated one from a new one.
IDEMPOTENT_IN_FLIGHT = 5
LARGEST_CHUNK = 16_384

Values = dict[str, Any]
_DEFAULTS: Mapping[str, Any] = {spec.attribute: spec.default for spec in SPECS}


def settle(given: Mapping[str, Any]) -> tuple[Values, list[str]]:
    """Apply all rules to the values that were given, by attribute name.

    Returns the values to use, adjusted ones included, and warnings. Raises ConfigurationError where they
    contradict each other.
    """
    values: Values = dict(given)
    warnings: list[str] = []
    for rule in _RULES:
        warnings.extend(rule(values, given))
    return values, warnings


def _get(values: Mapping[str, Any], attribute: str) -> Any:
    return values.get(attribute, _DEFAULTS[attribute])


def _idempotence(values: Values, given: Mapping[str, Any]) -> list[str]:
    in_flight = _get(values, "max_in_flight_requests_per_connection")
    conflicts = []
    if _get(values, "acks") != -1:
        conflicts.append((f"kafka.acks={values['acks']}", "acks=all"))
    if _get(values, "retries") == 0:
        conflicts.append(("kafka.retries=0", "retries above 0"))
    if in_flight > IDEMPOTENT_IN_FLIGHT:
        name = "kafka.max.in.flight.requests.per.connection"
        conflicts.append((f"{name}={in_flight}", f"at most {IDEMPOTENT_IN_FLIGHT} requests in flight"))
    if not conflicts or not _get(values, "enable_idempotence"):
        return []
    against = " and ".join(conflict for conflict, _ in conflicts)
    needs = " and ".join(need for _, need in conflicts)
    if "enable_idempotence" in given:
        raise ConfigurationError(f"kafka.enable.idempotence=true needs {needs}, but {against} is set")
    values["enable_idempotence"] = False
    because = f"kafka.enable.idempotence is off because of {against} (it needs {needs})"
    return [f"{because}: a retry may double rows or change their order"]


def _unconfirmed(values: Values, _: Mapping[str, Any]) -> list[str]:
    if _get(values, "acks") != 0:
        return []
    return [
        "kafka.acks=0: brokers confirm nothing, so rows can be lost without an error (counted as unconfirmed)"
    ]


def _delivery_timeout(values: Values, given: Mapping[str, Any]) -> list[str]:
    linger, request = _get(values, "linger_ms"), _get(values, "request_timeout_ms")
    delivery, least = _get(values, "delivery_timeout_ms"), min(linger + request, INT_MAX)
    if delivery >= least:
        return []
    sum_text = f"kafka.linger.ms ({linger}) + kafka.request.timeout.ms ({request})"
    if "delivery_timeout_ms" in given:
        raise ConfigurationError(f"kafka.delivery.timeout.ms ({delivery}) must be at least {sum_text}")
    values["delivery_timeout_ms"] = least
    return [f"kafka.delivery.timeout.ms is raised from its default {delivery} to {least}: {sum_text}"]


def _memory(values: Values, _: Mapping[str, Any]) -> list[str]:
    batch, buffer = _get(values, "batch_size"), _get(values, "buffer_memory")
    strategy = _get(values, "buffer_memory_allocation_strategy")
    sizes = f"kafka.batch.size ({batch}) is larger than kafka.buffer.memory ({buffer})"
    if batch > buffer and strategy == "full":
        raise ConfigurationError(f"{sizes}: with the allocation strategy 'full' no batch could be opened")
    chunk = min(LARGEST_CHUNK, batch)
    if chunk > buffer:
        raise ConfigurationError(f"kafka.buffer.memory ({buffer}) does not hold one chunk of {chunk} bytes")
    if batch > buffer:
        return [f"{sizes}: batches are closed when the memory is used up, before they are full"]
    return []


def _request_size(values: Values, _: Mapping[str, Any]) -> list[str]:
    batch, request = _get(values, "batch_size"), _get(values, "max_request_size")
    if batch <= request:
        return []
    sizes = f"kafka.batch.size ({batch}) is larger than kafka.max.request.size ({request})"
    return [
        f"{sizes}: full batches travel one per request, and the topic's max.message.bytes must admit them"
    ]


def _reconnect_backoff(values: Values, given: Mapping[str, Any]) -> list[str]:
    if "reconnect_backoff_ms" in given and "reconnect_backoff_max_ms" not in given:
        values["reconnect_backoff_max_ms"] = values["reconnect_backoff_ms"]
        return []
    return _capped("reconnect_backoff_ms", "reconnect_backoff_max_ms")(values, given)


def _capped(attribute: str, limit: str) -> Callable[[Values, Mapping[str, Any]], list[str]]:
    """The rule that one time is no longer than another that bounds it."""

    def rule(values: Values, _: Mapping[str, Any]) -> list[str]:
        value, most = _get(values, attribute), _get(values, limit)
        if value <= most:
            return []
        values[attribute] = most
        name, limit_name = (f"kafka.{part.replace('_', '.')}" for part in (attribute, limit))
        return [f"{name} ({value}) is larger than {limit_name} ({most}): it is {most} throughout"]

    return rule


def _topic_creation(values: Values, given: Mapping[str, Any]) -> list[str]:
    if not _get(values, "topic_create"):
        for attribute in ("topic_partitions", "topic_replication_factor"):
            if attribute in given:
                name = attribute.replace("_", ".")
                raise ConfigurationError(f"Option '{name}' has no effect without topic.create=true")
        return []
    if _get(values, "topic") is None:
        raise ConfigurationError(
            "topic.create=true needs the option 'topic': what a column 'topic' names is not known in advance"
        )
    # Deleted under way, the topic would else come back with what the broker has as defaults.
    values.setdefault("allow_auto_create_topics", False)
    return []


_RULES: tuple[Callable[[Values, Mapping[str, Any]], list[str]], ...] = (
    _idempotence,
    _unconfirmed,
    _delivery_timeout,
    _memory,
    _request_size,
    _capped("retry_backoff_ms", "retry_backoff_max_ms"),
    _reconnect_backoff,
    _capped("socket_connection_setup_timeout_ms", "socket_connection_setup_timeout_max_ms"),
    _topic_creation,
)
