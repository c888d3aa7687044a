"""Writes requests, and reads responses so that hostile bytes do no harm.

A broker's response must not decide how much memory and time it costs. So no objects are created for parts
that this client does not use. A list has at most as many elements as the request named, which is checked
before any of them is read. Lists that no request determines have their own bound.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator, Sized
from dataclasses import dataclass
from typing import TypeVar

from kafka_sink import varint
from kafka_sink.errors import ProtocolError
from kafka_sink.model import Node
from kafka_sink.network.apis import API_VERSIONS, APIS, DECODERS, Api, OnTrailing
from kafka_sink.printable import is_host, printable

Value = TypeVar("Value")
Buffer = bytes | memoryview
ANY_NUMBER = 2**31
# How many elements a response may have that were not asked for, such as API versions or login mechanisms.
UNASKED = 1_000
_LONGEST_TEXT = 32_767
# Kafka's varints have 32 bits.
VARINT_BYTES = 5
_BYTE, _SHORT, _INT, _LONG = map(struct.Struct, (">b", ">h", ">i", ">q"))
# Newer brokers may add a tagged field, of at least two bytes, to elements of at least seven bytes.
_TAGS, _BYTES_PER_TAG = 10_000, 8


def refuse(problem: str) -> None:
    """Raise the problem as a ProtocolError."""
    raise ProtocolError(problem)


def read_response(
    api_key: int,
    version: int,
    payload: bytes,
    convert: Callable[[Reader], Value],
    asked: int = ANY_NUMBER,
    on_trailing: OnTrailing = refuse,
) -> Value:
    """Return what ``convert`` reads from a response after its header. The arguments are those in
    ``apis.Decoders``. Raises ProtocolError for a malformed response, also in place of any error that
    ``convert`` raises because of it."""
    reader = Reader(APIS[api_key], version, payload, asked)
    try:
        reader.take(_INT.size)
        # The header of ApiVersions never has tagged fields, so that clients of any version can read it.
        if api_key != API_VERSIONS:
            reader.skip_tags()
        value = convert(reader)
    except ProtocolError:
        raise
    except (struct.error, IndexError, ValueError) as error:
        # Neither repr nor cause are used, because a UnicodeDecodeError contains the bytes.
        problem = "it is cut short" if isinstance(error, IndexError | struct.error) else printable(str(error))
    else:
        left = len(payload) - reader.at
        if left:
            on_trailing(f"a response to {reader.name} has {left} bytes too many")
        return value
    raise ProtocolError(f"a response to {reader.name} cannot be read: {problem}")


def decoder(
    api_key: int, *, reads_tags: bool = False
) -> Callable[[Callable[[Reader], Value]], Callable[..., Value]]:
    """Register a function that reads a response between header and tagged fields, or with ``reads_tags`` also
    these, as an API's decoder. The decoder has the signature in ``apis.Decoders``."""

    def made(convert: Callable[[Reader], Value]) -> Callable[..., Value]:
        def read(reader: Reader) -> Value:
            value = convert(reader)
            if not reads_tags:
                reader.skip_tags()
            return value

        def decode(
            version: int, payload: bytes, asked: int = ANY_NUMBER, on_trailing: OnTrailing = refuse
        ) -> Value:
            return read_response(api_key, version, payload, read, asked, on_trailing)

        DECODERS[api_key] = decode
        return decode

    return made


class Writer:
    """Writes the body of a request in one version of its API. ``flexible`` means that the version has compact
    lengths and tagged fields (KIP-482)."""

    __slots__ = ("body", "flexible", "version")

    def __init__(self, api_key: int, version: int) -> None:
        self.body = bytearray()
        self.version = version
        self.flexible = version >= APIS[api_key].first_flexible

    def fields(self, layout: str, *values: float) -> None:
        """Write numbers and flags of fixed size, described by struct's format characters."""
        self.body += struct.pack(">" + layout, *values)

    def text(self, value: str | None) -> None:
        """Write a string, or null."""
        data = None if value is None else value.encode()
        if self.flexible:
            self.length(data)
        else:
            self.body += _SHORT.pack(-1 if data is None else len(data))
        self.body += data or b""

    def data(self, value: bytes) -> None:
        self.length(value)
        self.body += value

    def length(self, elements: Sized | None) -> None:
        """Write the length of a list or of bytes, or null."""
        self.size(-1 if elements is None else len(elements))

    def size(self, size: int) -> None:
        """Write a length; -1 for null."""
        self.body += varint.unsigned(size + 1) if self.flexible else _INT.pack(size)

    def texts(self, values: Collection[str]) -> None:
        self.length(values)
        for value in values:
            self.text(value)

    def end(self) -> None:
        """Write the end of the request or of an element of a list, which has no tagged fields."""
        if self.flexible:
            self.body += b"\0"

    def finished(self) -> bytes:
        self.end()
        return bytes(self.body)


def _read_number(layout: struct.Struct) -> Callable[[Reader], int]:
    """A method of ``Reader`` that reads a number of this layout."""
    unpack, size = layout.unpack_from, layout.size

    def read(reader: Reader) -> int:
        at = reader.at
        reader.at = at + size
        number: int = unpack(reader.payload, at)[0]
        return number

    return read


class Reader:
    """A position in a response. Raises struct.error, IndexError, ValueError or ProtocolError."""

    __slots__ = ("_elements", "_tags", "at", "flexible", "name", "payload", "version")

    def __init__(self, api: Api, version: int, payload: bytes, asked: int) -> None:
        self.name = f"{api.name} v{version}"
        self.version = version
        self.flexible = version >= api.first_flexible
        self.payload = payload
        self.at = 0
        self._elements = UNASKED + asked
        self._tags = _TAGS + len(payload) // _BYTES_PER_TAG

    def take(self, size: int) -> bytes:
        end = self.at + size
        if size < 0 or end > len(self.payload):
            raise IndexError
        data = self.payload[self.at : end]
        self.at = end
        return data

    def skip(self, size: int) -> None:
        if size < 0 or self.at + size > len(self.payload):
            raise IndexError
        self.at += size

    byte, short, integer, long = map(_read_number, (_BYTE, _SHORT, _INT, _LONG))

    def text(self) -> str | None:
        """Read a string; None if it is null."""
        length = self._text_length()
        return None if length < 0 else self.take(length).decode()

    def name_text(self) -> str:
        """Read a string that must not be null."""
        length = self._text_length()
        if length < 0:
            raise ValueError("a name is null")
        return self.take(length).decode()

    def skip_text(self) -> None:
        self.skip(max(0, self._text_length()))

    def _text_length(self) -> int:
        length = self._uvarint() - 1 if self.flexible else self.short()
        if length > _LONGEST_TEXT:
            raise ValueError(f"a string has {length} bytes")
        return length

    def data(self) -> bytes:
        """Read bytes; empty if they are null."""
        return self.take(max(0, self._list_length()))

    def elements(self, what: str) -> range:
        """Read the elements of a list of things that the request has named. Null counts as empty. Raises
        ProtocolError, before an element is read, if lists are longer than the request allows."""
        elements = self.elements_up_to(self._elements, what)
        self._elements -= len(elements)
        return elements

    def structs(self, what: str, size: int = ANY_NUMBER) -> Iterator[int]:
        """Read the elements of a list of structs, and skip the tagged fields at the end of each. ``size`` is
        set if the request need not name the elements: see ``elements_of``."""
        for place in self.elements(what) if size == ANY_NUMBER else self.elements_of(size, what):
            yield place
            self.skip_tags()

    def elements_of(self, size: int, what: str) -> range:
        """Read a list that the request does not determine, of elements of at least this average size."""
        return self.elements_up_to(self._elements + len(self.payload) // size, what)

    def elements_up_to(self, most: int, what: str) -> range:
        """Read a list of at most this many elements."""
        length = self._list_length()
        if length > most:
            raise self._too_many(length, what, most)
        return range(length)

    def only_element(self, what: str) -> None:
        """Enter a list with one element. Raises ProtocolError for any other number of elements."""
        length = self._list_length()
        if length != 1:
            raise ProtocolError(f"a response to {self.name} has {length} {what}, not 1")

    def skip_list(self, size: int) -> int:
        """Skip a list of elements of this size. Returns the number of elements."""
        length = max(0, self._list_length())
        self.skip(length * size)
        return length

    def _list_length(self) -> int:
        return self._uvarint() - 1 if self.flexible else self.integer()

    def _too_many(self, length: int, what: str, most: int) -> ProtocolError:
        return ProtocolError(f"a response to {self.name} has {length} {what}; at most {most} are expected")

    def tags(self) -> Iterator[int]:
        """The tags of the fields that follow. The caller may read each of them or skip it."""
        if not self.flexible:
            return
        if self.payload[self.at] == 0:
            self.at += 1
            return
        count = self._uvarint()
        self._tags -= count
        if self._tags < 0:
            raise self._too_many(count, "tagged fields", self._tags + count)
        for _ in range(count):
            tag = self._uvarint()
            size = self._uvarint()
            end = self.at + size
            if end > len(self.payload):
                raise IndexError
            yield tag
            if self.at > end:
                raise ValueError(f"the tagged field {tag} is longer than it says")
            self.at = end

    def skip_tags(self) -> None:
        if not self.flexible:
            return
        if self.payload[self.at] == 0:
            self.at += 1
        else:
            for _ in self.tags():
                pass

    def _uvarint(self) -> int:
        byte = self.payload[self.at]
        if byte < 0x80:
            # This is nearly always so.
            self.at += 1
            return byte
        value, self.at = varint.read_unsigned(self.payload, self.at, VARINT_BYTES)
        return value


def broker_in(reader: Reader) -> Node:
    """Read a broker's id, host, port and rack. Raises the errors of ``address_of``."""
    node_id, host, port, rack = reader.integer(), reader.text(), reader.integer(), reader.text()
    reader.skip_tags()
    return address_of(node_id, host, port, rack)


def address_of(node_id: int, host: str | None, port: int, rack: str | None = None) -> Node:
    """A broker's address from a response. Raises ProtocolError for an invalid id or address."""
    if not is_host(str(host)) or not 0 < port <= 65_535:
        shown = printable(f"{host}:{port}", 100)
        raise ProtocolError(f"broker {node_id} has the address '{shown}', which is not one")
    if node_id < 0:
        # Negative ids belong to this client's bootstrap addresses.
        raise ProtocolError(f"a broker has the id {node_id}, which is below 0")
    return Node(node_id, str(host), port, None if rack is None else printable(rack))


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """A response that says whether the request succeeded, and nothing more."""

    error_code: int
    throttle_time_ms: int = 0


def error_response(reader: Reader) -> ErrorResponse:
    throttle, error = reader.integer(), reader.short()
    return ErrorResponse(error, throttle)


def text_of(text: str | None) -> str | None:
    """A broker's message, shortened and printable; None if there is none."""
    return None if text is None else printable(text)
