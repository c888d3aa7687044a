"""Our Produce body against kafka-python's encoder, and the short way to read responses.

That each version's response is read is in test_apis.py.
"""

from __future__ import annotations

import struct
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.protocol.producer import ProduceRequest

from kafka_sink.errors import ProtocolError
from kafka_sink.network import produce
from kafka_sink.network.apis import PRODUCE
from kafka_sink.network.wire import read_response
from tests.support.response_checks import every_version
from tests.support.schema_responses import uvarint

VERSIONS = every_version(PRODUCE)
_TopicData = ProduceRequest.TopicProduceData

names = st.text("abcdefghijklmnop.-_0123456789", min_size=1, max_size=249)
buffers = st.lists(st.binary(max_size=40), min_size=1, max_size=5)
partitions = st.lists(st.tuples(st.integers(0, 2**31 - 1), buffers), max_size=4)
topics = st.lists(st.tuples(names, st.binary(min_size=16, max_size=16), partitions), max_size=4)


def theirs(version: int, acks: int, timeout_ms: int, transactional_id: str | None, rows: Any) -> bytes:
    """The same request by kafka-python."""
    topic_data = [
        _TopicData(
            version=version,
            name=name,
            topic_id=uuid.UUID(bytes=topic_id),
            partition_data=[(index, b"".join(parts)) for index, parts in row],
        )
        for name, topic_id, row in rows
    ]
    head = {"transactional_id": transactional_id, "acks": acks, "timeout_ms": timeout_ms}
    return bytes(ProduceRequest(version=version, topic_data=topic_data, **head).encode(version=version))


@given(
    version=st.sampled_from(VERSIONS),
    acks=st.sampled_from([-1, 0, 1]),
    timeout_ms=st.integers(0, 2**31 - 1),
    transactional_id=st.none() | st.text(max_size=200),
    rows=topics,
)
def test_body_equals_the_librarys_byte_for_byte(
    version: int, acks: int, timeout_ms: int, transactional_id: str | None, rows: Any
) -> None:
    ours = produce.produce_body(
        version,
        acks,
        timeout_ms,
        transactional_id,
        [
            (name, topic_id, [(i, [memoryview(p) for p in parts], sum(map(len, parts))) for i, parts in row])
            for name, topic_id, row in rows
        ],
    )
    assert b"".join(ours) == theirs(version, acks, timeout_ms, transactional_id, rows)


@pytest.mark.parametrize("version", VERSIONS)
def test_lengths_at_the_edges_of_varints_and_batches_that_are_not_copied(version: int) -> None:
    topic_id = bytes(range(16))
    for size in (126, 127, 128, 16_382, 16_383, 16_384, 2_097_150, 2_097_151, 3_000_000):
        # One chunk in two partitions.
        chunk = memoryview(bytes(size))
        body = produce.produce_body(
            version, -1, 1, None, [("t", topic_id, [(0, [chunk], size), (1, [chunk], size)])]
        )
        assert b"".join(body) == theirs(version, -1, 1, None, [("t", topic_id, [(0, [chunk]), (1, [chunk])])])
        assert [buffer for buffer in body if isinstance(buffer, memoryview)] == [chunk] * 2
        assert sum(buffer is chunk for buffer in body) == 2


def test_topics_without_an_id_where_ids_are_needed_are_refused() -> None:
    with pytest.raises(ValueError, match="'orders' has no id"):
        produce.produce_body(13, -1, 1, None, [("orders", None, [])])
    assert produce.produce_body(12, -1, 1, None, [("orders", None, [])])


# -- the short way to read responses ------------------------------------------------------------------


SHORT_VERSIONS = st.sampled_from([9, 10, 11, 12, 13])


ENOUGH = 1_000


@st.composite
def responses(draw: Any) -> tuple[int, bytes, int]:
    """A version, a response as a broker writes it, and its number of partitions."""
    version = draw(SHORT_VERSIONS)
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
    return read_response(PRODUCE, version, payload, produce.read_any)


def the_short_way(version: int, payload: bytes) -> produce.ProduceResponse | None:
    return produce.read_plain(version, payload, ENOUGH)


@given(responses())
def test_plain_responses_are_read_the_short_way_and_alike(response: tuple[int, bytes, int]) -> None:
    version, payload, partitions = response
    found = the_short_way(version, payload)
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
    found = the_short_way(version, bytes(damaged)) if len(damaged) >= 4 else None
    assert found is None or found == expected


@pytest.mark.parametrize("version", [3, 8])
def test_old_versions_go_the_long_way(version: int) -> None:
    payload = struct.pack(">iihi", 7, 1, 1, 0x74000000)
    with pytest.raises(ProtocolError):
        produce.decode_produce(version, payload)
