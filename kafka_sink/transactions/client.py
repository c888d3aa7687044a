"""Runs protocol steps against brokers, on the caller's thread, over the project's own connections.

The operations of one step are sent at the same time. Responses go back to the protocol, and so do errors that
are answers; others are raised.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from kafka_sink import kafka_errors
from kafka_sink.errors import BrokerVersionError, DeliveryError
from kafka_sink.model import TopicPartition
from kafka_sink.network import apis, requests, topic_requests, transaction_requests
from kafka_sink.network.blocking import GROUP_KEY, TRANSACTION_KEY, BlockingCalls, Call, Step
from kafka_sink.network.broker_connection import BrokerConnection
from kafka_sink.timing_bounds import TOPIC_PROPAGATION_MS
from kafka_sink.transactions.operations import (
    LAST_EPOCH,
    NO_TRANSACTION,
    OPEN,
    Describe,
    Described,
    EndTransaction,
    Failed,
    FetchOffsets,
    FetchStableOffsets,
    InitProducer,
    ListIds,
    ListOpen,
    OffsetKey,
    Operation,
    ProducerEpoch,
    RecordOffsets,
    Steps,
)
from kafka_sink.transactions.scope import ANY_ID_PATTERN, task_id_pattern

Result = TypeVar("Result")
# KIP-890. Where the feature is at level 2, brokers speak transaction protocol 2, else 1.
_FEATURE, _PROTOCOL_2_LEVEL = "transaction.version", 2
PROTOCOL_1, PROTOCOL_2 = 1, 2
# InitProducerId from 6 on is two-phase commit's (KIP-939), which brokers have not finished.
_VERSIONS: Mapping[int, Mapping[int, tuple[int, int]]] = {
    PROTOCOL_1: {apis.INIT_PRODUCER_ID: (3, 5), apis.END_TXN: (3, 4), apis.TXN_OFFSET_COMMIT: (3, 4)},
    PROTOCOL_2: {apis.INIT_PRODUCER_ID: (3, 5), apis.END_TXN: (5, 5), apis.TXN_OFFSET_COMMIT: (5, 5)},
}
# TxnOffsetCommit has it from Apache Kafka 3.8 on. These brokers verify that what they write belongs to an
# open transaction (KIP-890's first part).
_FIRST_TXN_OFFSET_COMMIT = 4
_LIST_PATIENCE_MS = 6000.0
# How long an offset may be pending before the protocol is told. Brokers write markers in less.
_PENDING_PATIENCE_MS = 500.0
# DescribeTransactions' names for states in which a transaction's markers are being written begin so.
_PREPARED = "Prepare"

_REFUSALS = frozenset(
    {
        kafka_errors.INVALID_PRODUCER_EPOCH,
        kafka_errors.INVALID_TXN_STATE,
        kafka_errors.INVALID_PRODUCER_ID_MAPPING,
        kafka_errors.PRODUCER_FENCED,
        kafka_errors.TRANSACTION_ABORTABLE,
    }
)
_ADVICE = {
    kafka_errors.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: (
        "grant Write and Describe on the transactional ids that begin with transactional.id.prefix"
    ),
    kafka_errors.GROUP_AUTHORIZATION_FAILED: (
        "grant Read on the groups that begin with transactional.id.prefix"
    ),
    kafka_errors.TOPIC_AUTHORIZATION_FAILED: (
        "grant Read on the topic that progress is recorded for (transaction.progress.topic)"
    ),
    kafka_errors.INVALID_TRANSACTION_TIMEOUT: (
        "kafka.transaction.timeout.ms is above the brokers' transaction.max.timeout.ms: lower it, or raise "
        "theirs"
    ),
    kafka_errors.UNKNOWN_TOPIC_OR_PARTITION: (
        "the topic that progress is recorded for (transaction.progress.topic) is not there"
    ),
    kafka_errors.OFFSET_METADATA_TOO_LARGE: (
        "the brokers' offset.metadata.max.bytes is below Kafka's default of 4096"
    ),
}


_EMPTY: dict[type, Callable[[], Any]] = {
    Describe: dict,
    FetchOffsets: dict,
    FetchStableOffsets: dict,
    ListOpen: list,
    ListIds: list,
}


def _nothing() -> None:
    return None


def _failed(code: int) -> Failed:
    return Failed(kafka_errors.error_of(code).name)


class TransactionClient(BlockingCalls):
    """One thread at a time. ``close`` it, or keep it for the next batch: its connections are the costly
    part."""

    final, advice = _REFUSALS, _ADVICE
    # What brokers speak, known once they were asked.
    protocol = PROTOCOL_2

    # -- for the caller ---------------------------------------------------------------------------

    def run(
        self,
        steps: Steps[Result],
        timeout_ms: float,
        bound: str = "kafka.max.block.ms",
        *,
        groups: Iterable[str] = (),
        transactional_ids: Iterable[str] = (),
    ) -> Result:
        """Run protocol code to its end.

        ``groups`` and ``transactional_ids`` name what later steps will use: their coordinators are looked up,
        and all brokers connected to, while the first step is under way.

        Raises what it raises, DeliveryError after ``timeout_ms`` (the option ``bound``), ConfigurationError
        where rights or settings are in the way, BrokerVersionError where brokers are too old.
        """
        self._allow(timeout_ms, bound)
        self.left_out.clear()
        self._distrusted = set()
        self._ahead = [(GROUP_KEY, name) for name in groups]
        self._ahead += [(TRANSACTION_KEY, name) for name in transactional_ids]
        try:
            wanted = next(steps)
            while True:
                try:
                    results = self._execute(wanted)
                except DeliveryError as error:
                    # Steps know what it means for the batch.
                    wanted = steps.throw(error)
                else:
                    wanted = steps.send(results)
        except StopIteration as stop:
            result: Result = stop.value
            return result

    def partitions(self, topic: str, timeout_ms: float, bound: str = "kafka.max.block.ms") -> int:
        """How many partitions a topic has, 0 where it is not there; at most metadata.max.age.ms old.

        A topic has no fewer than before, unless it is deleted and created again. One that brokers do not
        know may be new, and is asked for again for a while. Raises DeliveryError after the time.
        """
        oldest_ms = self._clock_ms() - self._options.metadata_max_age_ms
        known, at_ms = self._partitions.pop(topic, (0, -math.inf))
        if at_ms >= oldest_ms:
            self._partitions[topic] = known, at_ms
            return known
        self._allow(timeout_ms, bound)
        missing_ms = self._clock_ms() + min(TOPIC_PROPAGATION_MS, timeout_ms / 2)
        found: list[int] = []

        def take(call: Call, response: requests.MetadataResponse) -> bool:
            code = response.update.errors.get(topic, kafka_errors.NONE)
            is_missing = code == kafka_errors.UNKNOWN_TOPIC_OR_PARTITION and self._clock_ms() >= missing_ms
            if code and not is_missing:
                return self._again(call, kafka_errors.error_of(code).name)
            found.append(next((len(one.partitions) for one in response.update.topics), 0))
            return True

        # A client's first request asks for the topic together with the brokers.
        self._topic = topic
        self._connect()
        if topic in self._partitions:
            return self._partitions[topic][0]
        node = next(iter(self._nodes))
        call = Call(
            apis.METADATA, lambda version: requests.encode_metadata(version, (topic,), False), take, node=node
        )
        self._finish(Step([None], [call]))
        if found[0]:
            self._partitions[topic] = found[0], self._clock_ms()
        return found[0]

    def broker_settings(self, name: str, timeout_ms: float) -> dict[int, str | None]:
        """A setting of each broker that responds; None where it does not tell.

        Raises DeliveryError after the time.
        """
        self._allow(timeout_ms, "kafka.max.block.ms")
        self._connect()
        found: dict[int, str | None] = {}

        def call(node: int) -> Call:
            def take(_: Call, response: topic_requests.BrokerConfigs) -> bool:
                found[node] = None if response.error_code else response.configs.get(name)
                return True

            return Call(
                apis.DESCRIBE_CONFIGS,
                lambda version: topic_requests.encode_describe_broker(version, node, (name,)),
                take,
                node=node,
                give_up_ms=self._clock_ms() + _LIST_PATIENCE_MS,
            )

        calls = [call(node) for node in self._nodes]
        self._finish(Step([None], calls))
        return found

    # -- a step -----------------------------------------------------------------------------------

    def _execute(self, operations: tuple[Operation, ...]) -> tuple[Any, ...]:
        self._connect()
        self._forget_coordinators(operations)
        step = Step([_EMPTY.get(type(operation), _nothing)() for operation in operations])
        for index, operation in enumerate(operations):
            step.calls += self._calls(step, index, operation)
        self._finish(step)
        return tuple(step.results)

    def _versions(self, api: int) -> tuple[int, int] | None:
        return _VERSIONS[self.protocol].get(api)

    def _require(self, connection: BrokerConnection) -> None:
        if connection.features.get(_FEATURE, 0) >= _PROTOCOL_2_LEVEL:
            self.protocol = PROTOCOL_2
            return
        newest = connection.newest_version(apis.TXN_OFFSET_COMMIT)
        lacks = f"TxnOffsetCommit ends with version {newest}, not {_FIRST_TXN_OFFSET_COMMIT}"
        if newest >= _FIRST_TXN_OFFSET_COMMIT:
            # Brokers that others wrote may have the one without the other.
            lacks = (
                ""
                if connection.newest_version(apis.LIST_TRANSACTIONS) >= 0
                else "ListTransactions is missing"
            )
        if lacks:
            raise BrokerVersionError(
                "delivery.guarantee=exactly-once needs brokers of Apache Kafka 3.8 or later, which reject a "
                f"late write of a transaction that has ended (KIP-890); here {lacks}. Use "
                "delivery.guarantee=at-least-once, or newer brokers"
            )
        self.protocol = PROTOCOL_1

    def _forget_coordinators(self, operations: tuple[Operation, ...]) -> None:
        """Forget coordinators that may have been replaced and not know it, and ask other brokers."""
        names: list[str] = []
        for operation in operations:
            match operation:
                case Describe(afresh=True):
                    names += operation.transactional_ids
                case EndTransaction(afresh=True):
                    names.append(operation.transactional_id)
        former = {self._coordinators.pop((TRANSACTION_KEY, name), -1) for name in names} - {-1}
        if former:
            self._distrusted = former
            self._back_off()

    # -- operations -------------------------------------------------------------------------------

    def _calls(self, step: Step, index: int, operation: Operation) -> list[Call]:
        match operation:
            case InitProducer():
                return [self._init(step, index, operation)]
            case EndTransaction():
                return [self._end(step, index, operation)]
            case RecordOffsets():
                return self._record_calls(step, index, operation)
            case FetchOffsets():
                calls = [self._fetch(step, index, group, None) for group in operation.groups]
                for call in calls:
                    recorded = (one for one in step.calls if one.api == apis.TXN_OFFSET_COMMIT)
                    call.behind = next((one for one in recorded if one.key == call.key), None)
                return calls
            case FetchStableOffsets():
                groups: dict[str, list[TopicPartition]] = {}
                for key in operation.keys:
                    groups.setdefault(key.group, []).append(key.partition)
                return [self._fetch(step, index, *one) for one in groups.items()]
            case Describe():
                return [self._describe(step, index, one) for one in operation.transactional_ids]
            case ListOpen() | ListIds():
                return [self._list(step, index, operation, node) for node in list(self._nodes)]

    def _init(self, step: Step, index: int, operation: InitProducer) -> Call:
        name, of, timeout = operation.transactional_id, operation.of, self._options.transaction_timeout_ms

        def take(call: Call, response: requests.ProducerIdResponse) -> bool:
            if of is None and response.error_code in _REFUSALS:
                # Somebody else is taking the id over at this moment.
                return self._again(call, kafka_errors.error_of(response.error_code).name)
            if not self._judge(call, response.error_code):
                return False
            if not response.error_code:
                step.results[index] = ProducerEpoch(response.producer_id, response.producer_epoch)
            elif step.results[index] is None:
                step.results[index] = _failed(response.error_code)
            return True

        return Call(
            apis.INIT_PRODUCER_ID,
            lambda version: requests.encode_init_producer_id(version, *(of or (-1, -1)), name, timeout),
            take,
            (TRANSACTION_KEY, name),
        )

    def _end(self, step: Step, index: int, operation: EndTransaction) -> Call:
        name, producer = operation.transactional_id, operation.producer

        def take(call: Call, response: transaction_requests.EndTxnResponse) -> bool:
            if not self._judge(call, response.error_code):
                return False
            if response.error_code:
                step.results[index] = _failed(response.error_code)
            elif self.protocol == PROTOCOL_1:
                # What EndTxn itself does under protocol 2: no two transactions have the same id and epoch.
                # Where somebody else has raised it since, that is as good, and this result stays: the epoch
                # that is no longer the id's.
                step.results[index] = producer
                if not (operation.of_task and operation.commit):
                    step.calls.append(self._init(step, index, InitProducer(name, producer)))
            else:
                step.results[index] = ProducerEpoch(response.producer_id, response.producer_epoch)
            return True

        commit = operation.commit
        return Call(
            apis.END_TXN,
            lambda version: transaction_requests.encode_end_txn(version, name, *producer, commit=commit),
            take,
            (TRANSACTION_KEY, name),
        )

    def _record_calls(self, step: Step, index: int, operation: RecordOffsets) -> list[Call]:
        """Under protocol 1 the group is added to the transaction before."""
        record = self._record(step, index, operation)
        if self.protocol == PROTOCOL_2:
            return [record]
        name, producer, group = operation.transactional_id, operation.producer, operation.group

        def take(call: Call, response: transaction_requests.AddOffsetsResponse) -> bool:
            if not self._judge(call, response.error_code):
                return False
            if response.error_code:
                step.results[index] = _failed(response.error_code)
                step.calls.remove(record)
            return True

        record.after = Call(
            apis.ADD_OFFSETS_TO_TXN,
            lambda version: transaction_requests.encode_add_offsets(version, name, *producer, group),
            take,
            (TRANSACTION_KEY, name),
        )
        return [record.after, record]

    def _record(self, step: Step, index: int, operation: RecordOffsets) -> Call:
        name, producer, group = operation.transactional_id, operation.producer, operation.group
        offsets = {partition: (0, text) for partition, text in operation.entries}

        def take(call: Call, response: transaction_requests.PartitionErrors) -> bool:
            code = next((one for one in response.errors.values() if one), kafka_errors.NONE)
            if not self._judge(call, code):
                return False
            step.results[index] = _failed(code) if code else None
            return True

        return Call(
            apis.TXN_OFFSET_COMMIT,
            lambda version: transaction_requests.encode_txn_offset_commit(
                version, name, *producer, group, offsets
            ),
            take,
            (GROUP_KEY, group),
            asked=2 * len(offsets),
        )

    def _fetch(self, step: Step, index: int, group: str, partitions: list[TopicPartition] | None) -> Call:
        def take(call: Call, response: transaction_requests.OffsetFetchResponse) -> bool:
            code, offsets = response.groups.get(group, (kafka_errors.NONE, {}))
            if code == kafka_errors.GROUP_ID_NOT_FOUND:
                return True  # it has committed nothing
            code = code or next(
                (one.error_code for one in offsets.values() if one.error_code), kafka_errors.NONE
            )
            if code == kafka_errors.UNSTABLE_OFFSET_COMMIT:
                call.give_up_ms = min(call.give_up_ms, self._clock_ms() + _PENDING_PATIENCE_MS)
            if (
                code != kafka_errors.UNSTABLE_OFFSET_COMMIT or self._clock_ms() < call.give_up_ms
            ) and not self._judge(call, code):
                return False
            step.results[index] |= {
                OffsetKey(group, partition): None if one.error_code else one.metadata
                for partition, one in offsets.items()
                if one.offset >= 0 or one.error_code
            }
            return True

        # Such a group has offsets of one topic's partitions; of the one before, too, where jobs changed it.
        known = max((count for count, _ in self._partitions.values()), default=0)
        stable = partitions is not None
        return Call(
            apis.OFFSET_FETCH,
            lambda version: transaction_requests.encode_offset_fetch(
                version, group, partitions, stable=stable
            ),
            take,
            (GROUP_KEY, group),
            asked=2 * (2 * known if partitions is None else len(partitions)),
        )

    def _describe(self, step: Step, index: int, name: str) -> Call:
        def take(call: Call, response: transaction_requests.DescribeTransactionsResponse) -> bool:
            one = response.transactions[name]
            if one.error_code == kafka_errors.TRANSACTIONAL_ID_NOT_FOUND:
                return True
            if not self._judge(call, one.error_code):
                return False
            if one.producer_epoch > LAST_EPOCH and one.state.startswith(_PREPARED):
                # Whoever ended it has the next producer id already, which is not shown before this is over.
                return self._again(call, f"'{name}' is about to get another producer id")
            producer = ProducerEpoch(one.producer_id, one.producer_epoch)
            step.results[index][name] = Described(
                one.state, producer, one.started_ms, one.partitions, self.protocol == PROTOCOL_2
            )
            return True

        return Call(
            apis.DESCRIBE_TRANSACTIONS,
            lambda version: transaction_requests.encode_describe_transactions(version, (name,)),
            take,
            (TRANSACTION_KEY, name),
        )

    def _list(self, step: Step, index: int, operation: ListOpen | ListIds, node: int) -> Call:
        states: tuple[str, ...] = ()
        pattern, age_ms = ANY_ID_PATTERN, -1
        if isinstance(operation, ListOpen):
            age_ms = operation.longer_than_ms
            states, pattern = (OPEN,), task_id_pattern(operation.prefix)
            # With protocol 1 ids that are not in use are in that state, too.
            if self.protocol == PROTOCOL_2 and age_ms < 0:
                states = (OPEN, NO_TRANSACTION)

        def take(call: Call, response: transaction_requests.ListTransactionsResponse) -> bool:
            if not self._judge(call, response.error_code):
                return False
            step.results[index] += [name for name in response.ids if re.match(pattern, name)]
            return True

        return Call(
            apis.LIST_TRANSACTIONS,
            lambda version: transaction_requests.encode_list_transactions(version, states, pattern, age_ms),
            take,
            node=node,
            give_up_ms=self._clock_ms() + _LIST_PATIENCE_MS,
        )
