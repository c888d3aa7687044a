"""The largest responses that brokers may send by Kafka's protocol, to the largest requests of this client."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Any

import pytest

from kafka_sink.errors import ProtocolError
from kafka_sink.model import TopicPartition
from kafka_sink.network import apis, requests
from kafka_sink.network import transaction_requests as transactions
from kafka_sink.network.produce import produce_body
from kafka_sink.records.encoder import MAX_RECORDS_PER_BATCH
from tests.support.network_harness import request, response_to
from tests.support.schema_responses import uvarint

# As long as topics' names, host names, a committed offset's metadata and Kafka's texts may be.
TOPIC = "t" * 249
HOST = "h" * 253
METADATA_BYTES = 4_096
RECORD_TEXT = f"Compacted topic cannot accept message without key in topic partition {TOPIC}-1234567890"
PARTITION_TEXT = (
    "One or more records have been rejected due to 131072 record errors in total, and only showing the first "
    f"three errors at most: [{', '.join([f'RecordError(batchIndex=131071, message={RECORD_TEXT})'] * 3)}]"
)
MANY = 10_000


def text(content: str, *, compact: bool = True) -> bytes:
    data = content.encode()
    return (uvarint(len(data) + 1) if compact else struct.pack(">h", len(data))) + data


def rows(elements: Iterable[bytes], *, compact: bool = True) -> bytes:
    whole = list(elements)
    return (uvarint(len(whole) + 1) if compact else struct.pack(">i", len(whole))) + b"".join(whole)


def response(api: int, version: int, body: list[Any], answer: bytes, asked: int = 0, records: int = 0) -> Any:
    """What comes of a response that follows its header, by a connection that has sent the request."""
    tags = b"\0" if version >= apis.APIS[api].first_flexible else b""
    return response_to(request(api, version, body, asked=asked, records=records), tags + answer)


def refused_partition(version: int, number: int, errors: list[bytes], message: str) -> bytes:
    compact = version >= apis.APIS[apis.PRODUCE].first_flexible
    tags = b"\0" if compact else b""
    if version >= 10:
        leader = struct.pack(">ii", 7, 3) + b"\0"
        tags = b"\1\0" + uvarint(len(leader)) + leader
    found = struct.pack(">ihqqq", number, 87, -1, -1, -1)
    return found + rows(errors, compact=compact) + text(message, compact=compact) + tags


def produce_request(version: int, partitions: int) -> list[Any]:
    data = [(number, [memoryview(b"x")], 1) for number in range(partitions)]
    return produce_body(version, -1, 1000, None, [(TOPIC, bytes(range(16)), data)])


def produce_response(version: int, partitions: list[bytes]) -> bytes:
    compact = version >= apis.APIS[apis.PRODUCE].first_flexible
    tags = b"\0" if compact else b""
    name = bytes(range(16)) if version >= 13 else text(TOPIC, compact=compact)
    topic = name + rows(partitions, compact=compact) + tags
    return rows([topic], compact=compact) + bytes(4) + tags


@pytest.mark.parametrize("version", [8, 13])
def test_each_record_of_a_request_may_be_refused_with_a_text_of_its_own(version: int) -> None:
    """Catches: 6,319 refused records with their texts were "not a Kafka broker"."""
    compact, count = version >= 9, MAX_RECORDS_PER_BATCH
    # With a tagged field of a newer broker.
    behind = text(RECORD_TEXT, compact=compact) + (b"\1\x46\0" if compact else b"")
    errors = [struct.pack(">i", place) + behind for place in range(count)]
    answer = produce_response(version, [refused_partition(version, 0, errors, PARTITION_TEXT)])
    found = response(apis.PRODUCE, version, produce_request(version, 1), answer, 2, count)
    (partition,) = found.partitions
    assert list(partition.record_errors.places) == list(range(count))
    assert partition.record_errors.reason.startswith("Compacted topic")


@pytest.mark.parametrize("version", [8, 13])
def test_no_more_records_are_refused_than_were_sent(version: int) -> None:
    """Catches: reading 11 million refusals of 131,072 rows took 5 s, in which nothing was sent."""
    end = b"\0\0" if version >= 9 else b"\xff\xff"
    for partitions in (1, 2):
        errors = [struct.pack(">i", place) + end for place in range((MANY + 4_000) // partitions)]
        answer = produce_response(
            version, [refused_partition(version, number, errors, "") for number in range(partitions)]
        )
        with pytest.raises(ProtocolError, match="record errors; at most"):
            response(apis.PRODUCE, version, produce_request(version, partitions), answer, 3, MANY)


def test_ten_thousand_partitions_may_each_be_refused_with_a_text_and_a_leader() -> None:
    found = [refused_partition(13, number, [], PARTITION_TEXT) for number in range(MANY)]
    answer = produce_response(13, found)
    partitions = response(apis.PRODUCE, 13, produce_request(13, MANY), answer, MANY + 1, MANY).partitions
    assert [one.partition for one in partitions] == list(range(MANY))


def test_metadata_of_a_million_partitions() -> None:
    """Of ten thousand topics with the longest names, and three replicas each."""
    each = 100
    replicas = rows([struct.pack(">i", one) for one in range(3)])
    partitions = rows(
        struct.pack(">hiii", 0, number, number % 3, 5) + replicas * 2 + b"\1\0" for number in range(each)
    )
    names = [f"{number:08d}{TOPIC[8:]}" for number in range(MANY)]
    topics = rows(
        struct.pack(">h", 0) + text(name) + struct.pack(">QQ", 1, number) + b"\0" + partitions + bytes(5)
        for number, name in enumerate(names)
    )
    address = text(HOST) + struct.pack(">i", 9092) + b"\0\0"
    brokers = rows(struct.pack(">i", one) + address for one in range(3))
    answer = bytes(4) + brokers + text("cluster") + struct.pack(">i", 0) + topics + b"\0"
    body = [requests.encode_metadata(12, tuple(names), False)]
    found = response(apis.METADATA, 12, body, answer, len(names))
    assert sum(len(topic.partitions) for topic in found.update.topics) == MANY * each


def test_coordinators_of_ten_thousand_keys_on_hosts_with_long_names() -> None:
    keys = [f"key-{number}" for number in range(MANY)]
    head, behind = struct.pack(">i", 1) + text(HOST), struct.pack(">ih", 9092, 0) + text("e" * 300) + b"\0"
    answer = bytes(4) + rows(text(key) + head + behind for key in keys) + b"\0"
    body = [transactions.encode_find_coordinator(5, keys, of_groups=True)]
    assert len(response(apis.FIND_COORDINATOR, 5, body, answer, MANY).found) == MANY


@pytest.mark.parametrize("api", [apis.ADD_PARTITIONS_TO_TXN, apis.TXN_OFFSET_COMMIT])
def test_a_transaction_of_many_topics_with_long_names(api: int) -> None:
    partitions = [TopicPartition(f"{number:08d}{TOPIC[8:]}", 0) for number in range(MANY)]
    if api == apis.ADD_PARTITIONS_TO_TXN:
        body = transactions.encode_add_partitions(3, "id", 1, 0, partitions)
    else:
        offsets = dict.fromkeys(partitions, (0, ""))
        body = transactions.encode_txn_offset_commit(3, "id", 1, 0, "group", offsets)
    # Each partition with a tagged field of a newer broker.
    errors = rows([bytes(6) + b"\1\x46\0"]) + b"\0"
    answer = bytes(4) + rows(text(one.topic) + errors for one in partitions) + b"\0"
    assert response(api, 3, [body], answer, 2 * MANY).errors == dict.fromkeys(partitions, 0)


def test_ten_thousand_offsets_with_all_the_metadata_that_each_may_have() -> None:
    partitions = [TopicPartition(TOPIC, number) for number in range(MANY)]
    behind = struct.pack(">qi", 0, -1) + text("m" * METADATA_BYTES) + bytes(3)
    offsets = rows(struct.pack(">i", one.partition) + behind for one in partitions)
    group = text("group") + rows([text(TOPIC) + offsets + b"\0"]) + bytes(3)
    body = [transactions.encode_offset_fetch(8, "group", partitions, stable=True)]
    found = response(apis.OFFSET_FETCH, 8, body, bytes(4) + rows([group]) + b"\0", 2 * MANY)
    assert len(found.groups["group"][1]) == MANY


def test_a_transaction_in_many_topics_with_short_names_is_described() -> None:
    topics = rows(text("t") + rows([bytes(4)]) + b"\0" for _ in range(10 * MANY))
    state = text("Ongoing") + struct.pack(">iqqh", 1, 2, 3, 4)
    one = struct.pack(">h", 0) + text("id") + state + topics + b"\0"
    body = [transactions.encode_describe_transactions(0, ["id"])]
    found = response(apis.DESCRIBE_TRANSACTIONS, 0, body, bytes(4) + rows([one]) + b"\0", 1)
    assert found.transactions["id"].partitions == 10 * MANY


@pytest.mark.parametrize(("count", "length"), [(400_000, 100), (100_000, 1)])
def test_a_broker_may_have_many_transactional_ids(count: int, length: int) -> None:
    """Versions 0 and 1 list all, whatever prefix they have."""
    one = text("i" * length) + bytes(8) + text("Empty") + b"\0"
    body = [transactions.encode_list_transactions(1, [], "")]
    answer = bytes(6) + rows([]) + rows([one] * count) + b"\0"
    assert len(response(apis.LIST_TRANSACTIONS, 1, body, answer).ids) == count
