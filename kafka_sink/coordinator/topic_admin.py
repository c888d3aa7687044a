"""Creates a missing topic, on the driver, once."""

from __future__ import annotations

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from kafka_sink.errors import ConfigurationError
from kafka_sink.options import SinkOptions


def create_topic(options: SinkOptions, timeout_ms: float) -> bool:
    """Creates ``options.topic`` with the options' partitions and replicas; False where it exists by now.

    Raises ConfigurationError with the broker's reason, or after ``timeout_ms``.
    """
    topic = options.topic or ""
    admin = AdminClient(_settings(options))
    wanted = NewTopic(topic, options.topic_partitions, options.topic_replication_factor)
    seconds = timeout_ms / 1000
    future = admin.create_topics([wanted], operation_timeout=seconds, request_timeout=seconds)[topic]
    try:
        future.result(seconds + 1)
    except KafkaException as failure:
        error = failure.args[0]
        if error.code() == KafkaError.TOPIC_ALREADY_EXISTS:
            return False
        raise ConfigurationError(
            f"topic.create=true, but topic {topic!r} could not be created: {error.str()}. topic.partitions "
            "and topic.replication.factor say how it is created; or create it beforehand"
        ) from None
    return True


def _settings(options: SinkOptions) -> dict[str, str | int | float | bool]:
    """librdkafka's names of what it is to take from the options."""
    addresses = (
        f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in options.bootstrap_servers
    )
    return {
        "bootstrap.servers": ",".join(addresses),
        "client.id": options.client_id or "kafka-chunked",
        # What it logs by itself goes to stderr in a form of its own; what matters is in the error.
        "log_level": 0,
    }
