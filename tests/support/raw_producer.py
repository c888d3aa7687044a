"""A transactional producer by hand: it sends each request when the test says so, as late as it likes."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from kafka.record.default_records import DefaultRecordBatchBuilder

from kafka_sink import kafka_errors
from kafka_sink.model import TopicPartition
from kafka_sink.network import apis, produce, requests, transaction_requests
from kafka_sink.transactions.operations import ProducerEpoch
from tests.support.waiting import until

_FIND_VERSION, _INIT_VERSION, _END_VERSION, _ADD_VERSION, _PRODUCE_VERSION, _OFFSETS_VERSION = (
    4,
    4,
    3,
    3,
    10,
    3,
)
_PATIENCE_S = 60.0


class RawProducer:
    """Speaks transaction protocol 1 to a cluster of one broker. Each call returns the error's name."""

    def __init__(self, bootstrap_servers: str, transactional_id: str) -> None:
        host, port = bootstrap_servers.split(":")
        self._socket = socket.create_connection((host, int(port)), _PATIENCE_S)
        self.transactional_id = transactional_id

    def close(self) -> None:
        self._socket.close()

    def init(self, of: ProducerEpoch | None = None) -> ProducerEpoch:
        """A new epoch; with ``of`` only from that one."""
        producer_id, epoch = of or (-1, -1)
        body = requests.encode_init_producer_id(
            _INIT_VERSION, producer_id, epoch, self.transactional_id, 60_000
        )
        self._find(self.transactional_id, of_groups=False)
        answers: list[Any] = []

        def code_of(answer: Any) -> int:
            answers.append(answer)
            return int(answer.error_code)

        error = self._answer(apis.INIT_PRODUCER_ID, _INIT_VERSION, body, code_of)
        assert error == "NONE", error
        return ProducerEpoch(answers[-1].producer_id, answers[-1].producer_epoch)

    def add(self, producer: ProducerEpoch, partition: TopicPartition) -> str:
        body = transaction_requests.encode_add_partitions(
            _ADD_VERSION, self.transactional_id, *producer, [partition]
        )
        return self._answer(apis.ADD_PARTITIONS_TO_TXN, _ADD_VERSION, body, lambda it: it.errors[partition])

    def produce(self, producer: ProducerEpoch, sequence: int, partition: TopicPartition, value: bytes) -> str:
        builder = DefaultRecordBatchBuilder(2, 0, True, *producer, sequence, 16_384)
        builder.append(0, int(time.time() * 1000), None, value, [])
        batch = memoryview(bytes(builder.build()))
        topics = [(partition.topic, None, [(partition.partition, [batch], len(batch))])]
        body = b"".join(produce.produce_body(_PRODUCE_VERSION, -1, 30_000, self.transactional_id, topics))
        return self._answer(apis.PRODUCE, _PRODUCE_VERSION, body, lambda it: it.partitions[0].error_code)

    def commit_offset(self, producer: ProducerEpoch, group: str, partition: TopicPartition, text: str) -> str:
        """TxnOffsetCommit alone, without adding the group."""
        self._find(group, of_groups=True)
        body = transaction_requests.encode_txn_offset_commit(
            _OFFSETS_VERSION, self.transactional_id, *producer, group, {partition: (0, text)}
        )
        api = apis.TXN_OFFSET_COMMIT
        return self._answer(api, _OFFSETS_VERSION, body, lambda it: it.errors[partition])

    def end(self, producer: ProducerEpoch, *, commit: bool) -> str:
        body = transaction_requests.encode_end_txn(
            _END_VERSION, self.transactional_id, *producer, commit=commit
        )
        return self._answer(apis.END_TXN, _END_VERSION, body, lambda it: it.error_code)

    def _find(self, key: str, *, of_groups: bool) -> None:
        """Make the broker create the topic that its coordinators need, if it does not exist yet."""
        body = transaction_requests.encode_find_coordinator(_FIND_VERSION, [key], of_groups=of_groups)
        api = apis.FIND_COORDINATOR
        found = self._answer(api, _FIND_VERSION, body, lambda it: it.found[key].error_code)
        assert found == "NONE", found

    def _answer(self, api: int, version: int, body: bytes, code_of: Callable[[Any], int]) -> str:
        """Return the lasting error, after temporary errors such as those while markers are being written."""

        def lasting() -> str:
            error = kafka_errors.error_of(code_of(self._ask(api, version, body)))
            return "" if error.retriable else error.name

        return until(lasting, "an error that stays", _PATIENCE_S, 0.02)

    def _ask(self, api: int, version: int, body: bytes) -> Any:
        request = requests.encode_header(api, version, 1, "raw") + body
        self._socket.sendall(struct.pack(">i", len(request)) + request)
        (size,) = struct.unpack(">i", self._read(4))
        return apis.DECODERS[api](version, self._read(size), 0)

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self._socket.recv(size - len(data))
            if not more:
                raise ConnectionError("the broker has closed the connection")
            data += more
        return data
