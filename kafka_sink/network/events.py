"""The requests that the network client is given, and the events that it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Buffer = bytes | memoryview


@dataclass(slots=True)
class OutboundRequest:
    """A request's body as buffers of bytes (a memoryview of another format would be miscounted).

    ``timeout_ms`` counts from ``NetworkClient.send``. ``tag`` is the caller's own and comes back in events.
    ``asked``: how many topics, partitions and keys the body names, where these may be many: a response that
    has far more is a ProtocolError. ``records``: how many a Produce request has; brokers may respond with a
    text for each.
    """

    api_key: int
    api_version: int
    body: Sequence[Buffer]
    expects_response: bool
    timeout_ms: float
    tag: object
    asked: int = 0
    records: int = 0


@dataclass(frozen=True, slots=True)
class ResponseReceived:
    """A response, decoded to the API's own class (``ProduceResponse``, ``MetadataResponse`` ...).

    ``response`` is None where the request expects no response (acks=0) and has been written. ``latency_ms``
    counts from ``NetworkClient.send``.
    """

    node_id: int
    tag: object
    response: Any
    latency_ms: float


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """No response will come. ``possibly_sent``: bytes were sent, so the broker may have acted on them."""

    node_id: int
    tag: object
    cause: Exception
    possibly_sent: bool


@dataclass(frozen=True, slots=True)
class NodeConnected:
    """A broker's API versions are known, and requests may be sent. ``setup_ms``: since connecting began."""

    node_id: int
    setup_ms: float


@dataclass(frozen=True, slots=True)
class NodeDisconnected:
    """A connection, or an attempt to connect, ended. Closing an idle connection is not reported."""

    node_id: int
    cause: Exception


NetworkEvent = ResponseReceived | RequestFailed | NodeConnected | NodeDisconnected
