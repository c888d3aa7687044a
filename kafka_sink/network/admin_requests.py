"""Requests that carry no rows: CreateTopics, DescribeConfigs of a broker, and client metrics (KIP-714)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from kafka_sink import varint
from kafka_sink.network import apis
from kafka_sink.network.wire import Reader, Writer, decoder, error_response, text_of
from kafka_sink.printable import printable

# The first version with which brokers can choose the numbers of partitions and replicas (KIP-464).
CREATE_TOPICS_BY_DEFAULTS = 4
# The value of ConfigResource.Type.BROKER.
_BROKER = 4
# The first version of DescribeConfigs with synonyms. In its responses a setting has three bytes that tell
# whether it is read-only, where it comes from, and whether it is secret.
_FIRST_WITH_SYNONYMS = 1
_KIND_BYTES = 3
# The client instance id in a first request for client metrics.
NO_INSTANCE = bytes(16)
_NO_TAGS = b"\0"
_PUSH = struct.Struct(">16si?b")
_NOT_COMPRESSED = 0


@dataclass(frozen=True, slots=True)
class CreateTopicResponse:
    """The response for the one topic of the request. ``error_message`` is the broker's own text."""

    error_code: int
    error_message: str = ""
    throttle_time_ms: int = 0


def encode_create_topic(
    version: int,
    name: str,
    partitions: int,
    replication_factor: int,
    timeout_ms: int,
    config: Sequence[tuple[str, str]] = (),
    *,
    validate_only: bool = False,
) -> bytes:
    """Create one topic with these settings. The broker chooses a number that is given as -1. With
    ``validate_only``, the broker only checks whether it would create the topic."""
    request = Writer(apis.CREATE_TOPICS, version)
    request.length((name,))
    request.text(name)
    request.fields("ih", partitions, replication_factor)
    # The list of assignments is empty, so brokers assign the replicas.
    request.length(())
    request.length(config)
    for key, value in config:
        request.text(key)
        request.text(value)
    request.fields("i?", timeout_ms, validate_only)
    return request.finished()


@decoder(apis.CREATE_TOPICS)
def decode_create_topic(reader: Reader) -> CreateTopicResponse:
    throttle = reader.integer()
    reader.only_element("topics")
    reader.skip_text()
    error, message = reader.short(), text_of(reader.text()) or ""
    return CreateTopicResponse(error, message, throttle)


@dataclass(frozen=True, slots=True)
class BrokerConfigs:
    """The requested settings as texts, by name. ``configs`` is empty if ``error_code`` is set."""

    error_code: int
    configs: dict[str, str] = field(default_factory=dict)
    throttle_time_ms: int = 0


def encode_describe_broker(version: int, node_id: int, names: Sequence[str]) -> bytes:
    """Request a broker's own settings with these names. The request must be sent to that broker."""
    request = Writer(apis.DESCRIBE_CONFIGS, version)
    request.length((node_id,))
    request.fields("b", _BROKER)
    request.text(str(node_id))
    request.texts(names)
    if version >= _FIRST_WITH_SYNONYMS:
        request.fields("?", False)
    return request.finished()


@decoder(apis.DESCRIBE_CONFIGS)
def decode_describe_broker(reader: Reader) -> BrokerConfigs:
    throttle = reader.integer()
    reader.only_element("brokers")
    error = reader.short()
    reader.skip_text()
    reader.skip(1)  # the kind of resource
    reader.skip_text()
    configs: dict[str, str] = {}
    for _ in reader.elements("settings"):
        name, value = reader.name_text(), reader.text()
        reader.skip(_KIND_BYTES)
        if reader.version >= _FIRST_WITH_SYNONYMS:
            for _ in reader.elements("synonyms"):
                reader.skip_text()
                reader.skip_text()
                reader.skip(1)
        if value is not None:
            configs[printable(name)] = printable(value)
    return BrokerConfigs(error, configs, throttle)


@dataclass(frozen=True, slots=True)
class Subscription:
    """The metrics that a broker asks for. ``instance_id`` is NO_INSTANCE if the request contained one.
    ``requested`` are prefixes of metric names."""

    error_code: int
    instance_id: bytes
    subscription_id: int
    push_interval_ms: int
    max_bytes: int
    delta: bool
    requested: tuple[str, ...]
    throttle_time_ms: int = 0


def encode_get_subscription(instance_id: bytes) -> bytes:
    """``instance_id`` has 16 bytes. It is NO_INSTANCE in the first request."""
    return instance_id + _NO_TAGS


def encode_push(
    instance_id: bytes, subscription_id: int, metrics: bytes, *, terminating: bool = False
) -> bytes:
    """``metrics`` is OpenTelemetry's MetricsData."""
    head = _PUSH.pack(instance_id, subscription_id, terminating, _NOT_COMPRESSED)
    return head + varint.unsigned(len(metrics) + 1) + metrics + _NO_TAGS


@decoder(apis.GET_TELEMETRY_SUBSCRIPTIONS)
def decode_subscription(reader: Reader) -> Subscription:
    throttle, error = reader.integer(), reader.short()
    instance_id, subscription_id = reader.take(len(NO_INSTANCE)), reader.integer()
    reader.skip_list(1)  # the codecs that the broker knows
    interval, most, delta = reader.integer(), reader.integer(), bool(reader.byte())
    requested = tuple(reader.name_text() for _ in reader.elements("metrics"))
    return Subscription(error, instance_id, subscription_id, interval, most, delta, requested, throttle)


decoder(apis.PUSH_TELEMETRY)(error_response)
