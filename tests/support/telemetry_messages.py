"""The messages of client metrics (KIP-714) as a broker reads and writes them; kafka-python has none."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

GET_SUBSCRIPTIONS, PUSH = 71, 72
_NO_TAGS = b"\0"


@dataclass
class Wanted:
    """The metrics that the broker wants."""

    instance_id: bytes = bytes(range(16))
    subscription_id: int = 7
    codecs: tuple[int, ...] = ()
    interval_ms: int = 10_000
    max_bytes: int = 1_000_000
    delta: bool = True
    requested: tuple[str, ...] = ("*",)


class TelemetryRequest:
    """A request; ``subscription_id`` and ``terminating`` are of a push."""

    def __init__(self, payload: bytes) -> None:
        (length,) = struct.unpack_from(">h", payload, 8)
        self.header = SimpleNamespace(client_id=payload[10 : 10 + length].decode())
        body = payload[10 + length + 1 :]
        self.instance_id = body[:16]
        if struct.unpack_from(">h", payload)[0] == PUSH:
            self.subscription_id, self.terminating = struct.unpack_from(">i?", body, 16)

    @classmethod
    def decode(cls, payload: bytes, **_: Any) -> TelemetryRequest:
        return cls(payload)


class TelemetryResponse:
    """An object that is used as kafka-python's objects are."""

    def __init__(self, body: bytes) -> None:
        self._body, self._correlation = body, 0

    @classmethod
    def subscription(cls, throttle_ms: int, error: int, wanted: Wanted) -> TelemetryResponse:
        codecs = struct.pack(f">B{len(wanted.codecs)}b", len(wanted.codecs) + 1, *wanted.codecs)
        names = [bytes([len(name) + 1]) + name.encode() for name in wanted.requested]
        return cls(
            struct.pack(">ih16si", throttle_ms, error, wanted.instance_id, wanted.subscription_id)
            + codecs
            + struct.pack(">ii?", wanted.interval_ms, wanted.max_bytes, wanted.delta)
            + bytes([len(names) + 1])
            + b"".join(names)
            + _NO_TAGS
        )

    @classmethod
    def pushed(cls, throttle_ms: int, error: int) -> TelemetryResponse:
        return cls(struct.pack(">ih", throttle_ms, error) + _NO_TAGS)

    def with_header(self, *, correlation_id: int) -> None:
        self._correlation = correlation_id

    def encode(self, **_: Any) -> bytes:
        whole = struct.pack(">i", self._correlation) + _NO_TAGS + self._body
        return struct.pack(">i", len(whole)) + whole
