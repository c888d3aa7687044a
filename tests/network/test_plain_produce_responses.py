"""The short way to read a Produce response against the long one: equal, or not taken."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_sink.errors import ProtocolError
from kafka_sink.network import produce
from kafka_sink.network.apis import PRODUCE
from kafka_sink.network.wire import read_response
from tests.support.schema_responses import uvarint

VERSIONS = st.sampled_from([9, 10, 11, 12, 13])


ENOUGH = 1_000


@st.composite
def responses(draw: Any) -> tuple[int, bytes, int]:
    """A version, a response as a broker writes it, and its number of partitions."""
    version = draw(VERSIONS)
    topics = draw(st.lists(st.lists(st.integers(0, 1 << 20), max_size=200), max_size=4))
    body = struct.pack(">i", draw(st.integers(0, 1 << 30))) + b"\0" + uvarint(len(topics) + 1)
    for number, partitions in enumerate(topics):
        if version == 13:
            body += bytes([number + 1]) * 16
        else:
            name = f"topic-{number}".encode() * draw(st.sampled_from([1, 20]))
            body += uvarint(len(name) + 1) + name
        body += uvarint(len(partitions) + 1)
        for partition in partitions:
            error = draw(st.sampled_from([0, 0, 0, 6, 19]))
            body += struct.pack(">ihqqq", partition, error, draw(st.integers(-1, 1 << 40)), -1, 0)
            body += b"\x01\x00\x00"
        body += b"\0"
    return version, body + struct.pack(">i", draw(st.integers(0, 5000))) + b"\0", sum(map(len, topics))


def the_long_way(version: int, payload: bytes) -> produce.ProduceResponse:
    return read_response(PRODUCE, version, payload, produce._response)


@given(responses())
def test_plain_responses_are_read_the_short_way_and_alike(response: tuple[int, bytes, int]) -> None:
    version, payload, partitions = response
    found = produce._read_plain(version, payload, ENOUGH)
    assert found is not None
    assert len(found.partitions) == partitions
    assert found == the_long_way(version, payload)


@given(responses(), st.data())
def test_damaged_responses_are_left_to_the_long_way_or_read_alike(
    response: tuple[int, bytes, int], data: Any
) -> None:
    version, payload, _ = response
    damaged = bytearray(payload)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(4, max(4, len(damaged) - 1)))
        match data.draw(st.sampled_from(["change", "cut", "add"])):
            case "change" if at < len(damaged):
                damaged[at] = data.draw(st.integers(0, 255))
            case "cut":
                del damaged[at:]
            case _:
                damaged.insert(at, data.draw(st.integers(0, 255)))
    try:
        expected: produce.ProduceResponse | None = the_long_way(version, bytes(damaged))
    except ProtocolError:
        expected = None
    found = produce._read_plain(version, bytes(damaged), ENOUGH) if len(damaged) >= 4 else None
    assert found is None or found == expected


@pytest.mark.parametrize("version", [3, 8])
def test_old_versions_go_the_long_way(version: int) -> None:
    payload = struct.pack(">iihi", 7, 1, 1, 0x74000000)
    with pytest.raises(ProtocolError):
        produce.decode_produce(version, payload)
