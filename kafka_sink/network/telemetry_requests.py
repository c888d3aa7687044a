"""The requests of client metrics (KIP-714)."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from kafka_sink.network.apis import GET_TELEMETRY_SUBSCRIPTIONS, PUSH_TELEMETRY
from kafka_sink.network.wire import Reader, decoder, uvarint

VERSION = 0
NO_INSTANCE = bytes(16)
# Prefixes of metrics' names, and codecs, that a broker may name.
_MOST = 1_000
_NO_TAGS = b"\0"
_PUSH = struct.Struct(">16si?b")


@dataclass(frozen=True, slots=True)
class Subscription:
    """What a broker wants to know. ``instance_id`` is NO_INSTANCE where the request had one.

    ``requested``: prefixes of metrics' names. ``compression_types``: codec ids, the preferred one first.
    """

    error_code: int
    instance_id: bytes
    subscription_id: int
    compression_types: tuple[int, ...]
    push_interval_ms: int
    max_bytes: int
    delta: bool
    requested: tuple[str, ...]
    throttle_time_ms: int = 0


@dataclass(frozen=True, slots=True)
class PushResponse:
    error_code: int
    throttle_time_ms: int = 0


def encode_get_subscription(instance_id: bytes) -> bytes:
    """``instance_id``: 16 bytes, NO_INSTANCE at first."""
    return instance_id + _NO_TAGS


def encode_push(
    instance_id: bytes, subscription_id: int, codec: int, metrics: bytes, *, terminating: bool = False
) -> bytes:
    """``metrics``: OpenTelemetry's MetricsData, compressed with the codec of this id."""
    head = _PUSH.pack(instance_id, subscription_id, terminating, codec)
    return head + uvarint(len(metrics) + 1) + metrics + _NO_TAGS


@decoder(GET_TELEMETRY_SUBSCRIPTIONS, asked=0)
def decode_subscription(reader: Reader) -> Subscription:
    throttle, error = reader.integer(), reader.short()
    instance_id, subscription_id = reader.take(len(NO_INSTANCE)), reader.integer()
    codecs = tuple(reader.byte() for _ in reader.elements_up_to(_MOST, "compression types"))
    interval, most, delta = reader.integer(), reader.integer(), bool(reader.byte())
    requested = tuple(reader.name_text() for _ in reader.elements_up_to(_MOST, "metrics"))
    reader.skip_tags()
    return Subscription(
        error, instance_id, subscription_id, codecs, interval, most, delta, requested, throttle
    )


@decoder(PUSH_TELEMETRY, asked=0)
def decode_push(reader: Reader) -> PushResponse:
    throttle, error = reader.integer(), reader.short()
    reader.skip_tags()
    return PushResponse(error, throttle)
