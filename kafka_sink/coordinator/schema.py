"""Messages between tasks and the coordinator, each declared once, and the base classes of their receivers.

A message is a frozen msgspec structure. Its annotations contain types and bounds, and everything that a peer
sends is checked against them, so that a service or a channel sees only values of the declared types. On the
wire a message is its class's name and its fields as JSON, compressed if it is long.

Reports contain totals. Changes arrive in the order of one connection. After a connection is lost, both sides
begin again with their whole state.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

import msgspec
from msgspec import Meta

from kafka_sink.errors import ProtocolError
from kafka_sink.options.values import TOPIC_MAX_LENGTH
from kafka_sink.printable import printable

# The size of one message, before compression.
MAX_MESSAGE_BYTES = 2 * 1024 * 1024
# Shorter messages fit into one packet either way.
_COMPRESSED_FROM_BYTES = 2048
_LEVEL = 1
_COMPRESSED = b"\0"

MAX_TEXT = 300
# The length of the name of a message's class.
_MAX_NAME = 64
MAX_INT = (1 << 63) - 1
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-MAX_INT - 1, le=MAX_INT)]
Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
Ms = Annotated[float, Meta(ge=0, le=MAX_INT)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
# The name of a write, a job or a query.
Name = Annotated[str, Meta(max_length=200)]
# In JSON each of these characters takes a byte.
Topic = Annotated[str, Meta(max_length=TOPIC_MAX_LENGTH, pattern=r"^[a-zA-Z0-9._-]*\Z")]
NodeId = Int32


class Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base class of messages and of the structures in their fields. Every text and collection has a bound."""


# The messages of all modules that have been imported, by name.
MESSAGES: dict[str, type[Message]] = {}


class Message(Structure, frozen=True):
    """Base class of messages."""

    # Whether only the driver, which has a token of its own, may send it.
    is_of_driver: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__name__ in MESSAGES:
            raise TypeError(f"two messages are named {cls.__name__}")
        MESSAGES[cls.__name__] = cls


def cut(text: str, length: int = MAX_TEXT) -> str:
    """The text, cut to this many characters, without characters that UTF-8 cannot encode."""
    text = text.encode(errors="replace").decode()
    return text if len(text) <= length else text[: length - 3] + "..."


def encode(message: Message) -> bytes:
    """The bytes of a message. Raises ProtocolError for one that is too large."""
    name = type(message).__name__
    try:
        data = b"%b %b" % (name.encode(), msgspec.json.encode(message))
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"cannot send {name}: {error}") from None
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"{name} has {len(data):,} bytes, and a message may have {MAX_MESSAGE_BYTES:,}")
    return data if len(data) < _COMPRESSED_FROM_BYTES else _COMPRESSED + zlib.compress(data, _LEVEL)


def decode(data: bytes) -> Message:
    """The message in these bytes. Raises ProtocolError."""
    return parsed(decompressed(data))


def parsed(data: bytes) -> Message:
    """The message in these bytes, which ``decompressed`` returned. Raises ProtocolError."""
    name, _, _ = data[:_MAX_NAME].partition(b" ")
    kind = MESSAGES.get(name.decode(errors="replace"))
    if kind is None:
        raise ProtocolError(f"unknown kind of message {printable(repr(name), 60)}")
    try:
        return _decoder(kind).decode(memoryview(data)[len(name) :])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        # The error may contain the name of a field that the peer chose.
        raise ProtocolError(f"invalid {kind.__name__}: {printable(str(error), 200)}") from None


@cache
def _decoder(kind: type[Message]) -> msgspec.json.Decoder[Message]:
    return msgspec.json.Decoder(kind)


def decompressed(data: bytes) -> bytes:
    """A message's name and JSON, whose length shows what parsing will cost. Raises ProtocolError."""
    if data[:1] != _COMPRESSED:
        return data
    decompress = zlib.decompressobj()
    try:
        # Data beyond the bound is not decompressed. Parsing it would take ten times the memory.
        message = decompress.decompress(data[1:], MAX_MESSAGE_BYTES)
    except zlib.error:
        raise ProtocolError("message body does not match its declared compression") from None
    if not decompress.eof:
        raise ProtocolError(f"message body has more than {MAX_MESSAGE_BYTES:,} bytes, or is incomplete")
    return message


_Method = TypeVar("_Method", bound=Callable[..., None])


def receives(*kinds: type) -> Callable[[_Method], _Method]:
    """Mark the method of a service or channel that takes messages of these classes."""

    def mark(method: _Method) -> _Method:
        method.receives = kinds  # type: ignore[attr-defined]
        return method

    return mark


class ServiceScope(Enum):
    """Which tasks share one instance of a service.

    ``GROUP``: tasks with equal brokers, principal, client id and settings. ``CLUSTER``: and cluster ids.
    """

    APPLICATION = "application"
    GROUP = "group"
    CLUSTER = "cluster"


class _Receiver:
    scope: ClassVar[ServiceScope] = ServiceScope.GROUP
    # The method for each class of messages.
    takes: ClassVar[Mapping[type, Callable[..., None]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        methods: list[Any] = [getattr(cls, name, None) for name in dir(cls)]
        cls.takes = {kind: method for method in methods for kind in getattr(method, "receives", ())}


class Outbox(Protocol):
    """Where a service puts its messages. ``peer``: a task's connection, which may have been closed."""

    def send(self, peer: int, message: Message) -> None: ...

    def broadcast(self, peers: Iterable[int], message: Message) -> None:
        """Send to many peers. The message is encoded once, and written in slices."""


@dataclass(slots=True)
class MemoryBudget:
    """How much memory a service may use for all groups of tasks together. Tasks manage without the rest."""

    limit: int = 160 * 1024 * 1024
    used: int = 0

    @property
    def is_full(self) -> bool:
        return self.used >= self.limit


class Service(_Receiver):
    """Base class of a feature's side in the coordinator. A subclass overrides the methods that it needs.

    A service is pure: messages and the time come in, and messages go to ``out``. Its methods are called on
    the server's loop and must not block. Times are monotonic milliseconds. Its memory is bounded, even if its
    tasks misbehave. A method that raises ProtocolError changes nothing; the task's connection is closed.
    """

    def __init__(self, out: Outbox) -> None:
        self.out = out

    def on_joined(self, peer: int, now_ms: float) -> None:
        """A task has sent Hello to this scope. With APPLICATION: its first message has arrived."""

    def on_gone(self, peer: int, now_ms: float) -> None:
        """A task that had joined has disconnected, or has sent Hello to another group."""

    def on_time(self, now_ms: float) -> None:
        """``next_change_ms`` has passed. Long work is done in parts, so that other services also get time."""

    def next_change_ms(self, now_ms: float) -> float:
        """The time until ``on_time`` has work. Takes constant time, as it is called after each message."""
        return math.inf

    def close(self) -> None:
        """The process ends, or no task has used this instance for a long time."""


class Channel(_Receiver):
    """Base class of a feature's side in a task. A subclass overrides the methods that it needs.

    The client calls a channel on its own thread. Methods must not block. Times are monotonic milliseconds. If
    a method raises ProtocolError, the client closes the connection.
    """

    # Whether this task relies on the coordinator at the moment, and must notice soon if it is gone.
    is_waiting = False

    def __init__(self) -> None:
        # Any thread may call it, to make the client call ``next_message``. Set before the client starts.
        self.wake: Callable[[], None] = lambda: None

    def next_message(self, now_ms: float) -> Message | None:
        """The next message to send, or None. The client calls it again until it returns None."""
        return None

    def next_message_delay_ms(self, now_ms: float) -> float:
        """The time until ``next_message`` may have a message without a call of ``wake``."""
        return math.inf

    def on_connected(self, now_ms: float) -> None:
        """The client has connected to a service that has no state of this task."""

    def on_lost(self, now_ms: float) -> None:
        """The connection is lost. Work alone until ``on_connected``."""


def deliver(receiver: _Receiver, *arguments: Any) -> None:
    """Pass a message to a service (``peer, message, now_ms``) or to a channel (``message, now_ms``).

    Raises ProtocolError for a message that it does not accept.
    """
    method = receiver.takes.get(type(arguments[-2]))
    if method is None:
        raise ProtocolError(f"{type(receiver).__name__} does not accept {type(arguments[-2]).__name__}")
    method(receiver, *arguments)


class Hello(Message, frozen=True):
    """A task's first message, sent again when the task learns its cluster's id.

    ``group``: a hash of addresses, principal and client id. ``settings``: ``SinkOptions.group_settings``.
    """

    group: Annotated[str, Meta(max_length=64)]
    cluster_id: Name
    settings: Annotated[dict[Annotated[str, Meta(max_length=100)], Text], Meta(max_length=50)]


class Alive(Message, frozen=True):
    """A sign of life. The coordinator answers it with another one."""


class Full(Message, frozen=True):
    """The coordinator is at its task limit. This task works alone, and asks again later."""
