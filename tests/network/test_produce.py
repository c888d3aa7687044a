"""Our Produce body against kafka-python's encoder, and Produce responses of every version."""

from __future__ import annotations

import struct
import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kafka.protocol.producer import ProduceRequest, ProduceResponse

from kafka_sink.errors import ProtocolError
from kafka_sink.model import NO_RECORD_ERRORS, Node
from kafka_sink.network import produce
from kafka_sink.network.apis import PRODUCE
from kafka_sink.network.wire import read_response
from tests.support.fake_replies import Reply
from tests.support.fake_state import FakeState
from tests.support.response_checks import every_version
from tests.support.schema_responses import uvarint

VERSIONS = every_version(PRODUCE)
_TopicData = ProduceRequest.TopicProduceData
_PartitionData = _TopicData.PartitionProduceData
_Topic = ProduceResponse.TopicProduceResponse
_Partition = _Topic.PartitionProduceResponse

names = st.text("abcdefghijklmnop.-_0123456789", min_size=1, max_size=249)
buffers = st.lists(st.binary(max_size=40), min_size=1, max_size=5)
partitions = st.lists(st.tuples(st.integers(0, 2**31 - 1), buffers), max_size=4)
topics = st.lists(st.tuples(names, st.binary(min_size=16, max_size=16), partitions), max_size=4)


def theirs(version: int, acks: int, timeout_ms: int, transactional_id: str | None, rows: Any) -> bytes:
    """The same request by kafka-python."""
    request = ProduceRequest(
        version=version,
        transactional_id=transactional_id,
        acks=acks,
        timeout_ms=timeout_ms,
        topic_data=[
            _TopicData(
                version=version,
                name=name,
                topic_id=uuid.UUID(bytes=topic_id),
                partition_data=[
                    _PartitionData(version=version, index=index, records=b"".join(parts))
                    for index, parts in row
                ],
            )
            for name, topic_id, row in rows
        ],
    )
    return bytes(request.encode(version=version))


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
@pytest.mark.parametrize("size", [126, 127, 128, 16_382, 16_383, 16_384, 2_097_150, 2_097_151, 3_000_000])
def test_lengths_at_the_edges_of_varints(version: int, size: int) -> None:
    data = bytes(size)
    ours = produce.produce_body(
        version, -1, 1, None, [("t", bytes(range(16)), [(0, [memoryview(data)], size)])]
    )
    assert b"".join(ours) == theirs(version, -1, 1, None, [("t", bytes(range(16)), [(0, [data])])])


@pytest.mark.parametrize("version", VERSIONS)
def test_batches_are_handed_on_and_not_copied(version: int) -> None:
    chunks = [memoryview(bytearray(10)) for _ in range(3)]
    body = produce.produce_body(
        version, -1, 1, None, [("t", bytes(range(16)), [(0, chunks, 30), (1, chunks, 30)])]
    )
    assert [buffer for buffer in body if isinstance(buffer, memoryview)] == chunks * 2
    assert all(mine is theirs for mine, theirs in zip(body[1:4], chunks, strict=True))


@pytest.mark.parametrize("topic_id", [None, b"", b"short"])
def test_a_topic_without_an_id_is_refused_where_ids_are_needed(topic_id: bytes | None) -> None:
    with pytest.raises(ValueError, match="'orders' has no id"):
        produce.produce_body(13, -1, 1, None, [("orders", topic_id, [])])
    assert produce.produce_body(12, -1, 1, None, [("orders", topic_id, [])])


@pytest.mark.parametrize("version", [2, 14])
def test_other_versions_are_refused(version: int) -> None:
    with pytest.raises(ValueError, match="Produce v"):
        produce.produce_body(version, -1, 1, None, [])


def full_response(version: int) -> Any:
    """One partition that was appended, one with everything an error can carry."""
    tagged: dict[str, Any] = {}
    endpoints: dict[str, Any] = {}
    if version >= 10:
        tagged["current_leader"] = _Partition.LeaderIdAndEpoch(leader_id=2, leader_epoch=7)
        endpoints["node_endpoints"] = [
            ProduceResponse.NodeEndpoint(version=version, node_id=2, host="b2", port=9094, rack="r")
        ]
    record_errors = [
        _Partition.BatchIndexAndErrorMessage(batch_index=4, batch_index_error_message="é"),
        _Partition.BatchIndexAndErrorMessage(batch_index=5, batch_index_error_message=None),
    ]
    good = {"log_append_time_ms": 17, "log_start_offset": 3, "record_errors": [], "error_message": None}
    bad = {"log_append_time_ms": -1, "log_start_offset": -1, "record_errors": record_errors}
    rows = [
        _Partition(index=0, error_code=0, base_offset=2**40, **good),
        _Partition(index=9, error_code=87, base_offset=-1, error_message="no good", **bad, **tagged),
    ]
    topic = _Topic(version=version, name="t", topic_id=uuid.UUID(int=5), partition_responses=rows)
    return ProduceResponse(version=version, responses=[topic], throttle_time_ms=250, **endpoints)


def header(version: int) -> bytes:
    """A response header: correlation id 0, from version 9 on with no tagged fields."""
    return bytes(5 if version >= 9 else 4)


@pytest.mark.parametrize("version", VERSIONS)
def test_responses_of_every_version(version: int) -> None:
    body = bytes(full_response(version).encode(version=version))
    response = produce.decode_produce(version, header(version) + body)
    good, bad = response.partitions
    assert (good.topic, good.topic_id) == (("t", None) if version < 13 else (None, uuid.UUID(int=5).bytes))
    assert (good.partition, good.error_code, good.base_offset, good.log_append_time_ms) == (0, 0, 2**40, 17)
    assert good.log_start_offset == (3 if version >= 5 else -1)
    assert (good.error_message, good.record_errors, good.current_leader) == (None, NO_RECORD_ERRORS, None)
    assert (bad.partition, bad.error_code, bad.base_offset) == (9, 87, -1)
    has_reasons = version >= 8
    assert bad.error_message == ("no good" if has_reasons else None)
    assert list(bad.record_errors.places) == ([4, 5] if has_reasons else [])
    assert bad.record_errors.reason == ("é" if has_reasons else None)
    assert bad.current_leader == ((2, 7) if version >= 10 else None)
    assert response.node_endpoints == ((Node(2, "b2", 9094, "r"),) if version >= 10 else ())
    assert response.throttle_time_ms == 250


@pytest.mark.parametrize("version", VERSIONS)
def test_a_truncated_or_longer_response_is_a_protocol_error(version: int) -> None:
    body = bytes(full_response(version).encode(version=version))
    for end in range(len(body)):
        with pytest.raises(ProtocolError, match=f"Produce v{version}"):
            produce.decode_produce(version, header(version) + body[:end])
    with pytest.raises(ProtocolError, match="1 bytes too many"):
        produce.decode_produce(version, header(version) + body + b"\0")


def test_an_unknown_leader_is_none() -> None:
    state = FakeState([1], {}, 10**6)
    state.create_topic("t", 1)
    request = ProduceRequest.decode(theirs(12, -1, 1, None, [("t", bytes(16), [(0, [b""])])]), version=12)
    response = state.answer(0, 0, 12, request, Reply(error=6, leader=(-1, -1)))
    response.node_endpoints = []
    response = produce.decode_produce(12, header(12) + bytes(response.encode(version=12)))
    assert response.partitions[0].current_leader is None


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
