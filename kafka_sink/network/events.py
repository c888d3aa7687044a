"""What the network layer is given and what it reports: plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Buffer = bytes | memoryview


@dataclass(slots=True)
class OutboundRequest:
    """A request's body as buffers of bytes (a memoryview of another format would be miscounted).

    ``timeout_ms`` counts from when it is handed over; ``tag`` is the caller's and comes back in events.
    """

    api_key: int
    api_version: int
    body: Sequence[Buffer]
    expects_response: bool
    timeout_ms: float
    tag: object


@dataclass(frozen=True, slots=True)
class ResponseReceived:
    """An answer as ProduceAnswer, MetadataAnswer or ProducerIdAnswer.

    ``response`` is None for a request that expects none (acks=0) and is written. ``latency_ms`` counts
    from when the request was handed over.
    """

    node_id: int
    tag: object
    response: Any
    latency_ms: float


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """No answer will come. ``possibly_sent``: bytes have left, so the broker may have acted on it."""

    node_id: int
    tag: object
    cause: Exception
    possibly_sent: bool


@dataclass(frozen=True, slots=True)
class NodeConnected:
    """A broker's versions are known; requests may be sent. ``setup_ms``: since connecting began."""

    node_id: int
    setup_ms: float


@dataclass(frozen=True, slots=True)
class NodeDisconnected:
    """A connection, or a try to make one, came to an end; closing an idle one is not reported."""

    node_id: int
    cause: Exception


NetworkEvent = ResponseReceived | RequestFailed | NodeConnected | NodeDisconnected
