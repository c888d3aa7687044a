"""Messages between tasks and the coordinator, declared once, and the bases of those who receive them.

A message is a frozen msgspec structure whose annotations say types and bounds. Everything a peer sends is
checked against them, so that a service or a channel sees only values of the declared types. On the wire a
message is its class's name and its fields as JSON, compressed where that is long.

Reports carry totals. Changes come in the order of one connection; after its loss both sides begin with whole
states.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import cache
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

import msgspec
from msgspec import Meta

from kafka_sink.errors import ProtocolError
from kafka_sink.options.values import TOPIC_MAX_LENGTH
from kafka_sink.printable import printable

# Of one message, also after decompression.
MAX_MESSAGE_BYTES = 2 * 1024 * 1024
# Shorter ones fit into one packet either way.
_COMPRESSED_FROM_BYTES = 2048
_LEVEL = 1
_COMPRESSED = b"\0"

MAX_TEXT = 300
# Of a message's class.
_MAX_NAME = 64
MAX_INT = (1 << 63) - 1
Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Meta(ge=-MAX_INT - 1, le=MAX_INT)]
Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
Ms = Annotated[float, Meta(ge=0, le=MAX_INT)]
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
# Of a write, a job or a query.
Name = Annotated[str, Meta(max_length=200)]
# In JSON each character takes a byte.
Topic = Annotated[str, Meta(max_length=TOPIC_MAX_LENGTH, pattern=r"^[a-zA-Z0-9._-]*\Z")]
NodeId = Int32


class Structure(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of a message, and of what its fields are made of. Every text and collection has a bound."""


# All messages of the modules that have been imported, by name.
MESSAGES: dict[str, type[Message]] = {}


class Message(Structure, frozen=True):
    """Base of a message."""

    # Whether it is taken from the driver alone, which has a token of its own.
    is_of_driver: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.__name__ in MESSAGES:
            raise TypeError(f"two messages are named {cls.__name__}")
        MESSAGES[cls.__name__] = cls


def cut(text: str, length: int = MAX_TEXT) -> str:
    """A text that a field of so many characters accepts."""
    text = text.encode(errors="replace").decode()
    return text if len(text) <= length else text[: length - 3] + "..."


# -- bytes ----------------------------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    """The bytes of a message. Raises ProtocolError for one that is too large."""
    name = type(message).__name__
    try:
        data = b"%b %b" % (name.encode(), msgspec.json.encode(message))
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"cannot send {name}: {error}") from None
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"a message of {len(data)} bytes is larger than the bound of {MAX_MESSAGE_BYTES} bytes"
        )
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
        # It may name a field of the peer's.
        raise ProtocolError(f"invalid {kind.__name__}: {printable(str(error), 200)}") from None


@cache
def _decoder(kind: type[Message]) -> msgspec.json.Decoder[Message]:
    return msgspec.json.Decoder(kind)


def decompressed(data: bytes) -> bytes:
    """A message's name and JSON, whose length tells what parsing costs. Raises ProtocolError."""
    if data[:1] != _COMPRESSED:
        return data
    decompress = zlib.decompressobj()
    try:
        # What is cut off is not parsed, which would take ten times the memory.
        found = decompress.decompress(data[1:], MAX_MESSAGE_BYTES)
    except zlib.error:
        raise ProtocolError("a message is not compressed as it says") from None
    if not decompress.eof:
        raise ProtocolError(f"a message has more than {MAX_MESSAGE_BYTES} bytes, or is incomplete")
    return found


# -- receivers ------------------------------------------------------------------------------------------

_Method = TypeVar("_Method", bound=Callable[..., None])


def receives(*kinds: type) -> Callable[[_Method], _Method]:
    """Mark the method of a service or channel that takes messages of these classes."""

    def mark(method: _Method) -> _Method:
        method.receives = kinds  # type: ignore[attr-defined]
        return method

    return mark


class ServiceScope(Enum):
    """Whose tasks share one instance of a service.

    ``GROUP``: tasks with the same brokers, principal, client id and settings; ``CLUSTER``: of these,
    those that also know the same cluster id.
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
        cls.takes = {kind: one for one in methods for kind in getattr(one, "receives", ())}


class Outbox(Protocol):
    """Where a service puts its messages. ``peer`` is a task's connection; one that is gone gets nothing."""

    def send(self, peer: int, message: Message) -> None: ...

    def broadcast(self, peers: Iterable[int], message: Message) -> None:
        """To many: encoded once, and written in slices."""


class Service(_Receiver):
    """Base of a feature's part in the coordinator. It overrides what it needs.

    A service is pure: messages and the time come in, messages go to ``out``. Its methods are called on the
    server's loop and must not block. Times are monotonic milliseconds. What it keeps is bounded in all,
    whatever its tasks say. A ProtocolError ends the connection of the task and leaves the service unchanged.
    """

    def __init__(self, out: Outbox) -> None:
        self.out = out

    def on_joined(self, peer: int, now_ms: float) -> None:
        """A task has said Hello to this scope; with APPLICATION, its first message has come."""

    def on_gone(self, peer: int, now_ms: float) -> None:
        """A task that had joined has disconnected, or has said Hello to another group."""

    def on_time(self, now_ms: float) -> None:
        """``next_change_ms`` has passed. What takes long is done in parts, so that others are served."""

    def next_change_ms(self, now_ms: float) -> float:
        """Until ``on_time`` has work. Asked after each message, so it takes constant time."""
        return math.inf

    def close(self) -> None:
        """The process ends, or nobody has used this instance for long."""


class Channel(_Receiver):
    """Base of a feature's part in a task. It overrides what it needs.

    The client calls a channel on its own thread. Methods must not block. Times are monotonic milliseconds. A
    ProtocolError closes the connection.
    """

    # Whether this task relies on the coordinator at the moment, which must then be alive.
    is_waiting = False

    def __init__(self) -> None:
        # The client sets it before its thread starts. From any thread, it has ``next_message`` called.
        self.wake: Callable[[], None] = lambda: None

    def next_message(self, now_ms: float) -> Message | None:
        """The next message to send, or None. Called again until it returns None."""
        return None

    def next_message_delay_ms(self, now_ms: float) -> float:
        """Until ``next_message`` may have a message; infinite if only ``wake`` can bring one."""
        return math.inf

    def on_connected(self, now_ms: float) -> None:
        """Connected to a service that knows nothing of this task."""

    def on_lost(self, now_ms: float) -> None:
        """The connection is lost: work alone until ``on_connected``."""


def deliver(receiver: _Receiver, *arguments: Any) -> None:
    """Hand a message to a service (``peer, message, now_ms``) or to a channel (``message, now_ms``).

    Raises ProtocolError for a message that it does not take.
    """
    method = receiver.takes.get(type(arguments[-2]))
    if method is None:
        raise ProtocolError(f"{type(arguments[-2]).__name__} is not for {type(receiver).__name__}")
    method(receiver, *arguments)


# -- what every connection says -------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """A task's first message, and again when it learns its cluster's id. ``group``: a hash of addresses,
    principal and client id; ``settings``: the options that the coordinator reads
    (``SinkOptions.group_settings``)."""

    group: Annotated[str, Meta(max_length=64)]
    cluster_id: Name
    settings: Annotated[dict[Annotated[str, Meta(max_length=100)], Text], Meta(max_length=50)]


class Alive(Message, frozen=True):
    """A sign of life, which the coordinator answers by the same."""


class Full(Message, frozen=True):
    """The coordinator serves no more tasks: this one works alone, and asks again later."""
