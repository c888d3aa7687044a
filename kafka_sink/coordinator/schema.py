"""Messages between tasks and the coordinator, declared once, and the bases of those who receive them.

A message is a frozen dataclass whose annotations say types and bounds; encoding, decoding and the texts of
errors follow from them. Everything a peer sends is checked here, so that a service or a channel sees only
values of the declared types. On the wire a message is a JSON array, the class's name followed by its fields
in order, compressed where it is long.

Messages are one-way. They carry totals or whole states, so that a lost or repeated one does no harm.
"""

from __future__ import annotations

import json
import math
import types
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    NamedTuple,
    Protocol,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from kafka_sink.errors import ProtocolError
from kafka_sink.options.values import TOPIC_MAX_LENGTH
from kafka_sink.printable import printable

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: object) -> Callable[[Any], Any]:
        return lambda decorator: decorator


# Of one message, also after decompression.
MAX_MESSAGE_BYTES = 2 * 1024 * 1024
# Shorter ones fit into one packet either way.
_COMPRESSED_FROM_BYTES = 2048
_LEVEL = 1
_COMPRESSED = b"z"
_MAX_INT = (1 << 63) - 1


class AtMost(NamedTuple):
    """The bound of a text's characters, or of a collection's elements."""

    length: int


class Within(NamedTuple):
    """The bounds of a number, inclusive."""

    least: int
    most: int = _MAX_INT


MAX_TEXT = 300
Count = Annotated[int, Within(0)]
Int32 = Annotated[int, Within(-(2**31), 2**31 - 1)]
Ms = Annotated[float, Within(0)]
Text = Annotated[str, AtMost(MAX_TEXT)]
# Of a write, a job or a query.
Name = Annotated[str, AtMost(200)]
Topic = Annotated[str, AtMost(TOPIC_MAX_LENGTH)]
NodeId = Int32


class Message(Protocol):
    """What ``message`` has decorated."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


MessageClass = TypeVar("MessageClass", bound=type)
# All messages of the modules that have been imported, by name.
MESSAGES: dict[str, type] = {}


@dataclass_transform(frozen_default=True)
def message(declared: MessageClass) -> MessageClass:
    """Declare a message. Its annotations are read when it is first sent or received."""
    made: Any = dataclass(frozen=True, slots=True)(declared)
    if made.__name__ in MESSAGES:
        raise TypeError(f"two messages are named {made.__name__}")
    MESSAGES[made.__name__] = made
    return made  # type: ignore[no-any-return]


def cut(text: str, length: int = MAX_TEXT) -> str:
    """A text that a field of so many characters accepts."""
    text = text.encode(errors="replace").decode()
    return text if len(text) <= length else text[: length - 3] + "..."


# -- bytes ----------------------------------------------------------------------------------------------


def encode(message: Message) -> bytes:
    """The bytes of a message. Raises ProtocolError for one that is too large."""
    try:
        data = _ENCODER.encode([type(message).__name__, *_values(message)]).encode()
    except ValueError as error:
        raise ProtocolError(f"cannot send {type(message).__name__}: {error}") from None
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError(
            f"a message of {len(data)} bytes is larger than the bound of {MAX_MESSAGE_BYTES} bytes"
        )
    return data if len(data) < _COMPRESSED_FROM_BYTES else _COMPRESSED + zlib.compress(data, _LEVEL)


def _values(value: Any) -> list[Any]:
    return [getattr(value, name) for name in type(value).__dataclass_fields__]


_ENCODER = json.JSONEncoder(separators=(",", ":"), default=_values, allow_nan=False)


def decode(data: bytes) -> Message:
    """The message in these bytes. Raises ProtocolError."""
    return parsed(decompressed(data))


def parsed(data: bytes) -> Message:
    """The message in these bytes, which ``decompressed`` returned. Raises ProtocolError."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        raise ProtocolError("a message is not JSON") from None
    if not isinstance(values, list) or not values or not isinstance(values[0], str):
        raise ProtocolError("a message is not a JSON array that begins with its kind")
    kind = MESSAGES.get(values[0])
    if kind is None:
        raise ProtocolError(f"unknown kind of message {printable(repr(values[0]), 60)}")
    try:
        found: Message = _decoder(kind)(values[1:])
    except ValueError as error:
        raise ProtocolError(f"invalid {values[0]}: {error}") from None
    return found


def decompressed(data: bytes) -> bytes:
    """A message's JSON, whose length tells what parsing costs. Raises ProtocolError."""
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


# -- fields ---------------------------------------------------------------------------------------------

# Takes a value of JSON and returns it in the declared type, or raises ValueError.
_Decoder = Callable[[Any], Any]


@cache
def _decoder(kind: type) -> _Decoder:
    """Of a dataclass or a named tuple, whose fields are an array's elements."""
    hints = get_type_hints(kind, include_extras=True)
    if is_dataclass(kind):
        names = [one.name for one in fields(kind)]
        required = sum(one.default is MISSING and one.default_factory is MISSING for one in fields(kind))
    else:
        names = list(kind._fields)  # type: ignore[attr-defined]
        required = len(names)
    decoders = [_of_type(hints[name]) for name in names]

    def decode_fields(values: Any) -> Any:
        if type(values) is not list or not required <= len(values) <= len(names):
            raise ValueError(f"not an array of {required} to {len(names)} fields")
        found: list[Any] = []
        try:
            for decoder, value in zip(decoders, values, strict=False):
                found.append(decoder(value))
        except ValueError as error:
            raise ValueError(f"{names[len(found)]}: {error}") from None
        return kind(*found)

    return decode_fields


def _of_type(hint: Any) -> _Decoder:
    bound: Any = None
    if get_origin(hint) is Annotated:
        hint, bound, *_ = get_args(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        decoders = [_of_type(one) for one in arguments if one is not type(None)]
        return _union(decoders, is_optional=len(decoders) < len(arguments))
    if origin in (tuple, dict) or hint is str:
        if not isinstance(bound, AtMost):
            raise TypeError(f"{hint} needs AtMost")
        if origin is tuple:
            return _collection(arguments[0], bound.length)
        return _text(bound.length) if hint is str else _mapping(arguments[0], arguments[1], bound.length)
    if hint in (int, float):
        return _number(hint, bound or Within(-_MAX_INT - 1))
    return _boolean if hint is bool else _decoder(hint)


def _union(decoders: list[_Decoder], *, is_optional: bool) -> _Decoder:
    def decode_union(value: Any) -> Any:
        if value is None and is_optional:
            return None
        for decoder in decoders[:-1]:
            # Not kept: an exception that its own frame refers to is garbage that only a collection frees.
            with suppress(ValueError):
                return decoder(value)
        return decoders[-1](value)

    return decode_union


def _collection(element: Any, most: int) -> _Decoder:
    decoder = _of_type(element)
    # Messages have thousands of counts, which are not checked one by one.
    is_counts = element == Count

    def decode_collection(value: Any) -> Any:
        if type(value) is not list or len(value) > most:
            raise ValueError(f"not an array, or longer than {most}")
        if is_counts and set(map(type, value)) == {int} and min(value) >= 0 and max(value) <= _MAX_INT:
            return tuple(value)
        return tuple([decoder(one) for one in value])

    return decode_collection


def _mapping(key: Any, element: Any, most: int) -> _Decoder:
    key_decoder, decoder = _of_type(key), _of_type(element)
    # JSON's keys are texts.
    is_number = get_args(key)[:1] == (int,)

    def decode_mapping(value: Any) -> Any:
        if type(value) is not dict or len(value) > most:
            raise ValueError(f"not an object, or longer than {most}")
        return {key_decoder(int(name) if is_number else name): decoder(one) for name, one in value.items()}

    return decode_mapping


def _text(most: int) -> _Decoder:
    def decode_text(value: Any) -> str:
        if type(value) is not str or len(value) > most:
            raise ValueError(f"not a text, or longer than {most}")
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError("a text that UTF-8 cannot encode") from None
        return value

    return decode_text


def _number(kind: type, bounds: Within) -> _Decoder:
    (least, most), kinds = bounds, {int, kind}
    what = "an integer" if kind is int else "a number"

    def decode_number(value: Any) -> Any:
        # The comparison is false for NaN.
        if type(value) not in kinds or not least <= value <= most:
            raise ValueError(f"not {what} from {least} to {most}")
        return kind(value)

    return decode_number


def _boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError("neither true nor false")
    return value


# -- receivers ------------------------------------------------------------------------------------------

_Method = TypeVar("_Method", bound=Callable[..., None])


def receives(kind: type) -> Callable[[_Method], _Method]:
    """Mark the method of a service or channel that takes messages of this class."""

    def mark(method: _Method) -> _Method:
        method.receives = kind  # type: ignore[attr-defined]
        return method

    return mark


class ServiceScope(Enum):
    """Whose tasks share one instance of a service.

    ``GROUP``: tasks with the same brokers, principal and settings; ``CLUSTER``: of these, those that also
    know the same cluster id.
    """

    APPLICATION = "application"
    GROUP = "group"
    CLUSTER = "cluster"


class _Receiver:
    scope: ClassVar[ServiceScope] = ServiceScope.GROUP
    # The name of the method for each class of messages.
    takes: ClassVar[Mapping[type, str]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        kinds = {name: getattr(getattr(cls, name, None), "receives", None) for name in dir(cls)}
        cls.takes = {kind: name for name, kind in kinds.items() if kind is not None}


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
    name = receiver.takes.get(type(arguments[-2]))
    if name is None:
        raise ProtocolError(f"{type(arguments[-2]).__name__} is not for {type(receiver).__name__}")
    getattr(receiver, name)(*arguments)


# -- what every connection says -------------------------------------------------------------------------


@message
class Hello:
    """A task's first message, and again when it learns its cluster's id. ``group``: a hash of addresses and
    principal; ``settings``: the options that the coordinator reads (``SinkOptions.group_settings``)."""

    group: Annotated[str, AtMost(64)]
    cluster_id: Name
    settings: Annotated[dict[Annotated[str, AtMost(100)], Text], AtMost(50)]


@message
class Alive:
    """A sign of life, which the coordinator answers by the same."""


@message
class Full:
    """The coordinator serves no more tasks: this one works alone, and asks again later."""
