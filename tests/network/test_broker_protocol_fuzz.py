"""Garbage as responses: a ProtocolError or a plausible value, in bounded time and memory."""

from __future__ import annotations

import time
import tracemalloc
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from kafka.protocol.admin.topics import CreateTopicsResponse
from kafka.protocol.metadata import ApiVersionsResponse, MetadataResponse
from kafka.protocol.producer import InitProducerIdResponse, ProduceResponse
from kafka.protocol.sasl import SaslAuthenticateResponse, SaslHandshakeResponse

from kafka_sink.errors import ProtocolError
from kafka_sink.network import admin_requests, authentication, produce, requests
from tests.support.effort import tries
from tests.support.fake_state import framed

DECODERS: dict[str, tuple[Callable[[int, bytes], Any], range, type]] = {
    "produce": (produce.decode_produce, range(3, 14), produce.ProduceResponse),
    "metadata": (requests.decode_metadata, range(4, 14), requests.MetadataResponse),
    "api_versions": (requests.decode_api_versions, range(5), requests.ApiVersionsResponse),
    "init_producer_id": (requests.decode_init_producer_id, range(7), requests.ProducerIdResponse),
    "create_topics": (admin_requests.decode_create_topic, range(2, 8), admin_requests.CreateTopicResponse),
    "sasl_handshake": (authentication.decode_handshake, range(1, 2), authentication.HandshakeResponse),
    "sasl_authenticate": (authentication.decode_authenticate, range(3), authentication.AuthenticateResponse),
}
CASES = [(name, version) for name, (_, versions, _) in DECODERS.items() for version in versions]


def attempt(name: str, version: int, payload: bytes) -> None:
    """Decodes; only ProtocolError may escape."""
    decode, _, kind = DECODERS[name]
    try:
        response = decode(version, payload)
    except ProtocolError:
        return
    assert isinstance(response, kind)


def valid(name: str, version: int) -> bytes:
    """A whole payload with something in every field."""
    tags: dict[str, Any] = {}
    if name == "produce":
        partition = ProduceResponse.TopicProduceResponse.PartitionProduceResponse
        if version >= 10:
            tags = {"current_leader": partition.LeaderIdAndEpoch(leader_id=1, leader_epoch=2)}
        row = partition(
            index=1, error_code=6, base_offset=9, log_append_time_ms=-1, log_start_offset=0,
            record_errors=[partition.BatchIndexAndErrorMessage(batch_index=1, batch_index_error_message="x")],
            error_message="why", **tags,
        )  # fmt: skip
        topic = ProduceResponse.TopicProduceResponse(
            name="topic", topic_id=uuid.UUID(int=7), partition_responses=[row, row]
        )
        response: Any = ProduceResponse(version=version, responses=[topic, topic], throttle_time_ms=3)
    elif name == "metadata":
        kind = MetadataResponse.MetadataResponseTopic
        row = kind.MetadataResponsePartition(
            error_code=0, partition_index=0, leader_id=1, leader_epoch=5,
            replica_nodes=[1, 2], isr_nodes=[1], offline_replicas=[],
        )  # fmt: skip
        topics = [kind(error_code=0, name="topic", topic_id=uuid.UUID(int=7), partitions=[row])] * 2
        broker = MetadataResponse.MetadataResponseBroker(node_id=1, host="host", port=9092, rack="r")
        response = MetadataResponse(version=version, brokers=[broker], topics=topics, cluster_id="c")
    elif name == "api_versions":
        rows = [ApiVersionsResponse.ApiVersion(api_key=key, min_version=0, max_version=9) for key in range(3)]
        response = ApiVersionsResponse(version=version, error_code=0, api_keys=rows)
    elif name == "create_topics":
        made = CreateTopicsResponse.CreatableTopicResult(
            name="topic", topic_id=uuid.UUID(int=7), error_code=38, error_message="why", configs=[]
        )
        response = CreateTopicsResponse(version=version, topics=[made], throttle_time_ms=3)
    elif name == "sasl_handshake":
        response = SaslHandshakeResponse(version=version, error_code=33, mechanisms=["PLAIN", "GSSAPI"])
    elif name == "sasl_authenticate":
        response = SaslAuthenticateResponse(
            version=version, error_code=58, error_message="why", auth_bytes=b"bytes", session_lifetime_ms=9
        )
    else:
        response = InitProducerIdResponse(version=version, error_code=0, producer_id=5, producer_epoch=1)
    return framed(response, 1)[4:]


@pytest.mark.parametrize(("name", "version"), CASES)
def test_the_valid_one_is_read_and_every_truncation_is_refused(name: str, version: int) -> None:
    payload = valid(name, version)
    decode, _, kind = DECODERS[name]
    assert isinstance(decode(version, payload), kind)
    for end in range(len(payload)):
        with pytest.raises(ProtocolError):
            decode(version, payload[:end])
    with pytest.raises(ProtocolError, match="too many"):
        decode(version, payload + b"\0")


@settings(max_examples=tries(400), deadline=None)
@given(case=st.sampled_from(CASES), payload=st.binary(max_size=300))
@example(case=("metadata", 12), payload=b"\xff" * 300)
def test_random_bytes(case: tuple[str, int], payload: bytes) -> None:
    attempt(*case, payload)


@settings(max_examples=tries(800), deadline=None)
@given(
    case=st.sampled_from(CASES),
    changes=st.lists(
        st.tuples(st.integers(0, 400), st.sampled_from([0, 1, 0x7F, 0x80, 0xFE, 0xFF])), max_size=4
    ),
)
def test_valid_responses_with_bytes_changed(case: tuple[str, int], changes: list[tuple[int, int]]) -> None:
    payload = bytearray(valid(*case))
    for place, value in changes:
        payload[place % len(payload)] = value
    attempt(*case, bytes(payload))


BOMBS = {
    "an endless varint": b"\xff" * 500_000,
    "as many elements as an int has": b"\x7f\xff\xff\xff" * 125_000,
    "tagged fields everywhere": b"\x02\x01\x00" * 175_000,
    "zeros": bytes(500_000),
    "ones": b"\x01" * 500_000,
}


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize(
    ("name", "version"), [(name, versions[-1]) for name, (_, versions, _) in DECODERS.items()]
)
@pytest.mark.parametrize("kept", [4, 5, 9, 13])
def test_bombs_neither_hang_nor_swell(name: str, version: int, kept: int, bomb: str) -> None:
    payload = valid(name, version)[:kept] + BOMBS[bomb]
    # This thread's processor time: other work on the machine does not count.
    started = time.thread_time()
    attempt(name, version, payload)
    assert time.thread_time() - started < 5


@pytest.mark.parametrize("version", [8, 13])
def test_a_claimed_length_allocates_nothing(version: int) -> None:
    """Two thousand million partitions in forty bytes."""
    head = bytes(4) + (b"\0\xff\xff\xff\xff\x0f" if version >= 9 else b"\x7f\xff\xff\xff")
    payload = head + b"\0\x01t\0\0\0\x05" * 4
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolError):
            produce.decode_produce(version, payload)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()
