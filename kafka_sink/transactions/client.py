"""Runs protocol steps against brokers, on the caller's thread, over the project's own connections.

The operations of one step are sent at the same time. Responses go back to the protocol, and so do errors that
are answers; others are raised.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from kafka_sink import kafka_errors
from kafka_sink.clock import RANDOM, TOPIC_PROPAGATION_MS, ExponentialBackoff, monotonic_ms
from kafka_sink.errors import BrokerVersionError, ConfigurationError, DeliveryError, is_final
from kafka_sink.model import Node, TopicPartition
from kafka_sink.network import admin_requests, apis, requests, transaction_requests
from kafka_sink.network.blocking import BlockingCalls, Call, awaited
from kafka_sink.network.broker_connection import BrokerConnection
from kafka_sink.network.broker_protocol import Request
from kafka_sink.network.client import NetworkClient
from kafka_sink.options import SinkOptions
from kafka_sink.transactions.operations import (
    ANY_ID_PATTERN,
    LAST_EPOCH,
    NO_TRANSACTION,
    OPEN,
    Describe,
    Described,
    EndTransaction,
    Failed,
    FetchBrokerSetting,
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
    task_id_pattern,
)

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
# For a request to a broker that others may stand in for.
_NODE_TIMEOUT_MS = 3000.0
# How long an offset may be pending before the protocol is told. Brokers write markers in less.
_PENDING_PATIENCE_MS = 500.0
# DescribeTransactions' names for states in which a transaction's markers are being written begin so.
_PREPARED = "Prepare"

# Brokers that others wrote may leave out what was asked for: that is no answer.
_INCOMPLETE = "the response lacks what was asked for"
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

GROUP_KEY, TRANSACTION_KEY = True, False
_COORDINATOR_MOVED = frozenset({kafka_errors.COORDINATOR_NOT_AVAILABLE, kafka_errors.NOT_COORDINATOR})
_MAY_PASS = frozenset(
    {
        kafka_errors.REQUEST_TIMED_OUT,
        kafka_errors.NETWORK_EXCEPTION,
        kafka_errors.COORDINATOR_LOAD_IN_PROGRESS,
        kafka_errors.NOT_ENOUGH_REPLICAS,
        kafka_errors.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        kafka_errors.CONCURRENT_TRANSACTIONS,
        kafka_errors.KAFKA_STORAGE_ERROR,
        kafka_errors.UNSTABLE_OFFSET_COMMIT,
        kafka_errors.THROTTLING_QUOTA_EXCEEDED,
    }
)


@dataclass(slots=True, eq=False)
class _StepAnswer:
    """The result of one operation of a step, which several calls may make up."""

    result: Any = None


class TransactionClient(BlockingCalls):
    """One thread at a time. ``close`` it, or keep it for the next batch: its connections are the costly
    part."""

    def __init__(
        self,
        options: SinkOptions,
        network: NetworkClient | None = None,
        clock_ms: Callable[[], float] = monotonic_ms,
    ) -> None:
        super().__init__(options, network, clock_ms)
        self._speak(PROTOCOL_2)
        self._network.on_disconnected = self._on_disconnected
        backoff_ms = min(options.retry_backoff_ms, 20)
        self._backoff = ExponentialBackoff(backoff_ms, options.retry_backoff_max_ms, RANDOM.random)
        # By kind of key and name, as far as brokers have said.
        self.coordinators: dict[tuple[bool, str], int] = {}
        self.nodes: dict[int, Node] = {}
        # Each with the time of the response.
        self._partitions: dict[str, tuple[int, float]] = {}
        self._topic = ""
        # When a broker said last that the topic is not there.
        self._unknown_ms = -math.inf
        self._asked_nodes = False
        # Which broker was asked for coordinators last.
        self._asked_node: int | None = None
        # Kinds of keys whose coordinators are being asked for.
        self._asked_coordinators: set[bool] = set()
        # Brokers that may name themselves coordinators by mistake: asked for coordinators only where no other
        # broker can be.
        self._distrusted: set[int] = set()
        self._not_before_ms = 0.0
        # Brokers whose lists the last run did not wait for.
        self.left_out: set[int] = set()
        self._failures = 0
        self._allowed = ""
        self._last_error = "no broker responded"

    # -- for the caller ---------------------------------------------------------------------------

    def run(
        self,
        steps: Steps[Result],
        timeout_ms: float,
        bound: str = "kafka.max.block.ms",
    ) -> Result:
        """Run protocol code to its end.

        Raises what it raises, DeliveryError after ``timeout_ms`` (the option ``bound``), ConfigurationError
        where rights or settings are in the way, BrokerVersionError where brokers are too old.
        """
        self._allow(timeout_ms, bound)
        self.left_out.clear()
        self._distrusted = set()
        try:
            wanted = next(steps)
            while True:
                try:
                    results = self.execute(wanted)
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
        self._allow(timeout_ms, bound)
        oldest_ms = self._clock_ms() - self._options.metadata_max_age_ms
        missing_ms = self._clock_ms() + min(TOPIC_PROPAGATION_MS, timeout_ms / 2)

        def known() -> int:
            count, at_ms = self._partitions.get(topic, (0, -math.inf))
            return count if at_ms >= oldest_ms else 0

        self._topic = topic
        self._ask_until(lambda: known() > 0 or self._unknown_ms >= missing_ms)
        return known()

    # -- a step -----------------------------------------------------------------------------------

    def _send_due(self, now_ms: float) -> float | None:
        if self.calls and now_ms <= self._deadline_ms:
            self._leave_brokers_out(now_ms)
            self._look_up(now_ms)
            for call in self.calls:
                call.node = call.node if call.key is None else self.coordinators.get(call.key)
        return super()._send_due(now_ms)

    def _awaited(self) -> str:
        call = next((one for one in self.calls if one.is_sent), next(iter(self.calls), None))
        if call is None:
            return f"any of the brokers {self._network.describe_brokers()}"
        node, api = call.node, call.api
        if node is None:
            node, api = self._asked_node, apis.FIND_COORDINATOR
        return awaited(None if node is None else self.nodes.get(node), api)

    def _give_up(self) -> None:
        reasons = sorted({call.last_error for call in self.calls if call.last_error}) or [self._last_error]
        api = self.calls[0].api if self.calls else apis.METADATA
        raise DeliveryError(
            f"{apis.APIS[api].name} did not succeed within {self._allowed}: {'; '.join(reasons)} "
            f"(brokers: {self._network.describe_brokers()})"
        )

    def _allow(self, timeout_ms: float, bound: str) -> None:
        """All that is asked until the next one has so long. ``bound``: the option that says so, or ""."""
        self._deadline_ms = self._clock_ms() + timeout_ms
        self._allowed = f"{timeout_ms / 1000:g} s" + (f", the time allowed by {bound}" if bound else "")

    def _on_response(self, call: Call, response: Any, now_ms: float) -> None:
        if call in self.calls and call.behind in self.calls:
            self._again(call, "what it is sent behind must be sent again")
        else:
            super()._on_response(call, response, now_ms)

    def execute(self, operations: tuple[Operation, ...]) -> tuple[Any, ...]:
        """One step's operations: their results, in order."""
        self._ask_until(lambda: bool(self.nodes))
        self._forget_coordinators(operations)
        answers = [_StepAnswer() for _ in operations]
        for answer, operation in zip(answers, operations, strict=True):
            self.calls += self._calls(answer, operation)
        self._loop(self._send_due, self._awaited, self._deadline_ms)
        return tuple(answer.result for answer in answers)

    def _require(self, connection: BrokerConnection) -> None:
        if connection.protocol.features.get(_FEATURE, 0) >= _PROTOCOL_2_LEVEL:
            self._speak(PROTOCOL_2)
            return
        newest = connection.newest_version(apis.TXN_OFFSET_COMMIT)
        if newest < _FIRST_TXN_OFFSET_COMMIT:
            lacks = f"TxnOffsetCommit ends with version {newest}, not {_FIRST_TXN_OFFSET_COMMIT}"
        elif connection.newest_version(apis.LIST_TRANSACTIONS) < 0:
            # Brokers that others wrote may have the one without the other.
            lacks = "ListTransactions is missing"
        else:
            self._speak(PROTOCOL_1)
            return
        raise BrokerVersionError(
            "delivery.guarantee=exactly-once needs brokers of Apache Kafka 3.8 or later, which reject a late "
            f"write of a transaction that has ended (KIP-890); here {lacks}. Use "
            "delivery.guarantee=at-least-once, or newer brokers"
        )

    def _speak(self, protocol: int) -> None:
        self.protocol, self._versions = protocol, _VERSIONS[protocol]

    def _forget_coordinators(self, operations: tuple[Operation, ...]) -> None:
        """Forget coordinators that may have been replaced and not know it, and ask other brokers."""
        names: list[str] = []
        for operation in operations:
            match operation:
                case Describe(afresh=True):
                    names += operation.transactional_ids
                case EndTransaction(afresh=True):
                    names.append(operation.transactional_id)
        former = {self.coordinators.pop((TRANSACTION_KEY, name), -1) for name in names} - {-1}
        if former:
            self._distrusted = former
            self._back_off()

    def _leave_brokers_out(self, now_ms: float) -> None:
        """What each broker is asked for does not wait for one that is gone or hangs: others soon list its
        transactions."""
        for call in [one for one in self.calls if one.key is None and not one.is_sent]:
            if call.node not in self.nodes or now_ms >= call.give_up_ms:
                self.calls.remove(call)
                self.left_out.add(-1 if call.node is None else call.node)

    def _on_disconnected(self, node_id: int, cause: Exception, *_: object) -> None:
        self._last_error = str(cause)
        self._forget(node_id)
        if is_final(cause):
            raise cause

    def _on_failure(self, call: Call, cause: Exception, *_: object) -> None:
        self._last_error = str(cause)
        self._again(call, str(cause))

    def _on_failed_look_up(self, cause: Exception, *_: object) -> None:
        self._last_error = str(cause)
        self._asked_nodes = False
        self._asked_coordinators.clear()
        self._back_off()

    def _on_nodes(self, response: requests.MetadataResponse, _: float) -> None:
        self._asked_nodes = False
        if not response.update.nodes:
            # The broker has just started, and knows none yet.
            self._back_off()
            return
        for topic in response.update.topics:
            if topic.partitions:
                self._partitions[topic.name] = len(topic.partitions), self._clock_ms()
        code = response.update.errors.get(self._topic, kafka_errors.NONE)
        if code:
            self._last_error = kafka_errors.error_of(code).name
            self._back_off()
        if code == kafka_errors.UNKNOWN_TOPIC_OR_PARTITION:
            self._unknown_ms = self._clock_ms()
        self.nodes = {node.id: node for node in response.update.nodes}
        known = self.coordinators.items()
        self.coordinators = {key: node for key, node in known if node in self.nodes}
        self._network.set_addresses(self.nodes.values())

    def _again(self, call: Call, reason: str, *, elsewhere: bool = False) -> bool:
        """To be sent once more; false, as its operation is not done."""
        call.attempts += 1
        call.is_sent = False
        call.last_error = reason
        call.not_before_ms = self._clock_ms() + self._backoff.delay_ms(call.attempts)
        if elsewhere and call.key is not None:
            self.coordinators.pop(call.key, None)
        behind = call.behind
        if behind is not None and behind not in self.calls and call in self.calls:
            # Another coordinator may answer by now, one that has not taken what was sent before.
            behind.is_sent, behind.not_before_ms = False, call.not_before_ms
            self.calls.insert(0, behind)
        return False

    def _done(self, call: Call, answer: _StepAnswer, code: int, result: object = None) -> bool:
        """As ``_judge``; what is final answers the operation."""
        if not self._judge(call, code):
            return False
        answer.result = Failed(kafka_errors.error_of(code).name) if code else result
        return True

    def _judge(self, call: Call, code: int) -> bool:
        """Whether a response is final; false if the request must be repeated. Raises for a hopeless one."""
        if code == kafka_errors.NONE or code in _REFUSALS:
            return True
        name = kafka_errors.error_of(code).name
        if code in _COORDINATOR_MOVED:
            return self._again(call, name, elsewhere=True)
        if code in _MAY_PASS:
            return self._again(call, name)
        advice = _ADVICE.get(code)
        what = f"{apis.APIS[call.api].name} failed: {kafka_errors.error_of(code).label}"
        if advice:
            raise ConfigurationError(f"{what}; {advice}")
        raise DeliveryError(what)

    # -- brokers and coordinators -----------------------------------------------------------------

    def _ask_until(self, is_told: Callable[[], bool]) -> None:
        """Ask for brokers, first those of the bootstrap addresses, and for ``_topic``."""
        self.calls = []

        def advance(now_ms: float) -> float | None:
            if is_told():
                return None
            if now_ms > self._deadline_ms:
                self._give_up()
            return self._ask_nodes(now_ms)

        self._loop(advance, self._awaited, self._deadline_ms)

    def _ask_nodes(self, now_ms: float) -> float:
        if self._asked_nodes or now_ms < self._not_before_ms:
            return math.inf if self._asked_nodes else self._not_before_ms - now_ms
        connection = self._any_connection(now_ms)
        if connection is None:
            return 10.0
        self._require(connection)
        version = connection.api_version(apis.METADATA)
        body = requests.encode_metadata(version, (self._topic,) if self._topic else (), False)
        timeout = _NODE_TIMEOUT_MS if self.nodes else self._options.request_timeout_ms
        self._asked_nodes = True
        request = Request(apis.METADATA, version, [body], timeout, self._on_nodes, self._on_failed_look_up)
        self._network.send(connection, request, now_ms)
        return math.inf

    def _any_connection(self, now_ms: float) -> BrokerConnection | None:
        if self._distrusted:
            for other in self.nodes.keys() - self._distrusted:
                if self._is_ready(other, now_ms):
                    return self._network.connections[other]
        connection = self._network.least_loaded(now_ms)
        return connection if connection and self._network.is_ready(connection, now_ms) else None

    def _look_up(self, now_ms: float) -> None:
        """Ask for coordinators that are not known: one request for each kind of key."""
        keys = dict.fromkeys(call.key for call in self.calls if call.key)
        missing = [key for key in keys if key not in self.coordinators]
        for of_groups in (TRANSACTION_KEY, GROUP_KEY):
            names = [name for kind, name in missing if kind is of_groups]
            if not names or of_groups in self._asked_coordinators or now_ms < self._not_before_ms:
                continue
            connection = self._any_connection(now_ms)
            if connection is None:
                return
            api = apis.FIND_COORDINATOR
            version = connection.api_version(api)
            body = transaction_requests.encode_find_coordinator(version, names, of_groups=of_groups)
            self._asked_coordinators.add(of_groups)
            self._asked_node = connection.node.id
            request = Request(
                api,
                version,
                [body],
                self._options.request_timeout_ms,
                partial(self._on_coordinators, of_groups, names),
                self._on_failed_look_up,
                asked=len(names),
            )
            self._network.send(connection, request, now_ms)

    def _on_coordinators(
        self,
        of_groups: bool,
        names: Iterable[str],
        response: transaction_requests.CoordinatorsResponse,
        _: float,
    ) -> None:
        self._asked_coordinators.discard(of_groups)
        is_new = False
        for name in names:
            found = response.found.get(name)
            if found is None:
                self._last_error = f"the coordinator of '{name}' is not known: {_INCOMPLETE}"
                self._back_off()
            elif found.node is not None:
                self.coordinators[of_groups, name] = found.node.id
                is_new |= found.node.id not in self.nodes
                self.nodes.setdefault(found.node.id, found.node)
            elif found.error_code in _COORDINATOR_MOVED or found.error_code in _MAY_PASS:
                error = kafka_errors.error_of(found.error_code).label
                self._last_error = f"the coordinator of '{name}' is not known: {error}"
                self._back_off()
            else:
                reason = kafka_errors.error_of(found.error_code).name
                advice = _ADVICE.get(found.error_code, found.error_message or "")
                raise ConfigurationError(f"'{name}' may not be used: {reason}; {advice}")
        if is_new:
            self._network.set_addresses(self.nodes.values())

    def _back_off(self) -> None:
        self._failures += 1
        self._not_before_ms = self._clock_ms() + self._backoff.delay_ms(min(self._failures, 6))

    def _forget(self, node_id: int) -> None:
        """A broker is gone, so its coordinators may have moved, and there may be new brokers."""
        self.coordinators = {key: node for key, node in self.coordinators.items() if node != node_id}
        self._asked_nodes = False
        self._back_off()
        if node_id in self.nodes and len(self.nodes) > 1:
            self._ask_nodes(max(self._clock_ms(), self._not_before_ms))

    # -- operations -------------------------------------------------------------------------------

    def _calls(self, answer: _StepAnswer, operation: Operation) -> list[Call]:
        match operation:
            case InitProducer(name, of):
                return [self._init(answer, name, of)]
            case EndTransaction():
                return [self._end(answer, operation)]
            case RecordOffsets():
                return self._record(answer, operation)
            case FetchOffsets() | FetchStableOffsets():
                return self._fetch(answer, operation)
            case Describe(names):
                answer.result = {}
                return [self._describe(answer, name) for name in names]
            case ListOpen() | ListIds():
                return self._list(answer, operation)
            case FetchBrokerSetting(name):
                return self._fetch_setting(answer, name)

    def _init(self, answer: _StepAnswer, name: str, of: ProducerEpoch | None) -> Call:
        timeout = self._options.transaction_timeout_ms

        def take(call: Call, response: requests.ProducerIdResponse) -> bool:
            code = response.error_code
            if of is None and code in _REFUSALS:
                # Somebody else is taking the id over at this moment.
                return self._again(call, kafka_errors.error_of(code).name)
            if code in _REFUSALS and answer.result is not None:
                return True  # see _end
            return self._done(
                call, answer, code, ProducerEpoch(response.producer_id, response.producer_epoch)
            )

        return Call(
            apis.INIT_PRODUCER_ID,
            lambda version: requests.encode_init_producer_id(version, *(of or (-1, -1)), name, timeout),
            take,
            (TRANSACTION_KEY, name),
        )

    def _end(self, answer: _StepAnswer, operation: EndTransaction) -> Call:
        name, producer, commit = operation.transactional_id, operation.producer, operation.commit

        def take(call: Call, response: transaction_requests.EndTxnResponse) -> bool:
            code, epoch = response.error_code, ProducerEpoch(response.producer_id, response.producer_epoch)
            if self.protocol == PROTOCOL_2:
                return self._done(call, answer, code, epoch)
            if not self._done(call, answer, code, producer):
                return False
            if not code and not (operation.of_task and commit):
                # What EndTxn itself does under protocol 2: no two transactions have the same id and epoch.
                # Where somebody else has raised it since, that is as good, and this result stays: the epoch
                # that is no longer the id's.
                self.calls.append(self._init(answer, name, producer))
            return True

        return Call(
            apis.END_TXN,
            lambda version: transaction_requests.encode_end_txn(version, name, *producer, commit=commit),
            take,
            (TRANSACTION_KEY, name),
        )

    def _record(self, answer: _StepAnswer, operation: RecordOffsets) -> list[Call]:
        """Under protocol 1 the group is added to the transaction before."""
        name, producer, group = operation.transactional_id, operation.producer, operation.group
        offsets = {partition: (0, text) for partition, text in operation.entries}

        def take(call: Call, response: transaction_requests.PartitionErrors) -> bool:
            if not offsets.keys() <= response.errors.keys():
                return self._again(call, _INCOMPLETE)
            return self._done(call, answer, next(filter(None, response.errors.values()), kafka_errors.NONE))

        record = Call(
            apis.TXN_OFFSET_COMMIT,
            lambda version: transaction_requests.encode_txn_offset_commit(
                version, name, *producer, group, offsets
            ),
            take,
            (GROUP_KEY, group),
            asked=2 * len(offsets),
        )
        if self.protocol == PROTOCOL_2:
            return [record]

        def take_added(call: Call, response: transaction_requests.AddOffsetsResponse) -> bool:
            is_final = self._done(call, answer, response.error_code)
            if is_final and response.error_code:
                self.calls.remove(record)
            return is_final

        record.after = Call(
            apis.ADD_OFFSETS_TO_TXN,
            lambda version: transaction_requests.encode_add_offsets(version, name, *producer, group),
            take_added,
            (TRANSACTION_KEY, name),
        )
        return [record.after, record]

    def _fetch(self, answer: _StepAnswer, operation: FetchOffsets | FetchStableOffsets) -> list[Call]:
        answer.result = {}
        if isinstance(operation, FetchStableOffsets):
            groups: dict[str, list[TopicPartition]] = {}
            for key in operation.keys:
                groups.setdefault(key.group, []).append(key.partition)
            return [self._fetch_group(answer, *one) for one in groups.items()]
        calls = [self._fetch_group(answer, group, None) for group in operation.groups]
        for call in calls:
            recorded = (one for one in self.calls if one.api == apis.TXN_OFFSET_COMMIT)
            call.behind = next((one for one in recorded if one.key == call.key), None)
        return calls

    def _fetch_group(self, answer: _StepAnswer, group: str, partitions: list[TopicPartition] | None) -> Call:
        def take(call: Call, response: transaction_requests.OffsetFetchResponse) -> bool:
            if group not in response.groups:
                return self._again(call, _INCOMPLETE)
            code, offsets = response.groups[group]
            if code == kafka_errors.GROUP_ID_NOT_FOUND:
                return True  # it has committed nothing
            errors = (one.error_code for one in offsets.values())
            code = code or next(filter(None, errors), kafka_errors.NONE)
            is_pending = code == kafka_errors.UNSTABLE_OFFSET_COMMIT
            if is_pending:
                call.give_up_ms = min(call.give_up_ms, self._clock_ms() + _PENDING_PATIENCE_MS)
            if not (is_pending and self._clock_ms() >= call.give_up_ms) and not self._judge(call, code):
                return False
            answer.result |= {
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

    def _describe(self, answer: _StepAnswer, name: str) -> Call:
        def take(call: Call, response: transaction_requests.DescribeTransactionsResponse) -> bool:
            one = response.transactions.get(name)
            if one is None:
                return self._again(call, _INCOMPLETE)
            if one.error_code == kafka_errors.TRANSACTIONAL_ID_NOT_FOUND:
                return True
            if not self._judge(call, one.error_code):
                return False
            if one.producer_epoch > LAST_EPOCH and one.state.startswith(_PREPARED):
                # Whoever ended it has the next producer id already, which is not shown before this is over.
                return self._again(call, f"'{name}' is about to get another producer id")
            producer = ProducerEpoch(one.producer_id, one.producer_epoch)
            answer.result[name] = Described(
                one.state, producer, one.started_ms, one.partitions, self.protocol == PROTOCOL_2
            )
            return True

        return Call(
            apis.DESCRIBE_TRANSACTIONS,
            lambda version: transaction_requests.encode_describe_transactions(version, (name,)),
            take,
            (TRANSACTION_KEY, name),
        )

    def _list(self, answer: _StepAnswer, operation: ListOpen | ListIds) -> list[Call]:
        states: tuple[str, ...] = ()
        pattern, age_ms = ANY_ID_PATTERN, -1
        if isinstance(operation, ListOpen):
            age_ms = operation.longer_than_ms
            states, pattern = (OPEN,), task_id_pattern(operation.prefix)
            # With protocol 1 ids that are not in use are in that state, too.
            if self.protocol == PROTOCOL_2 and age_ms < 0:
                states = (OPEN, NO_TRANSACTION)
        answer.result = []

        def take(call: Call, response: transaction_requests.ListTransactionsResponse) -> bool:
            if not self._judge(call, response.error_code):
                return False
            answer.result += [name for name in response.ids if re.match(pattern, name)]
            return True

        return self._of_each_broker(
            apis.LIST_TRANSACTIONS,
            lambda _, version: transaction_requests.encode_list_transactions(
                version, states, pattern, age_ms
            ),
            take,
        )

    def _fetch_setting(self, answer: _StepAnswer, name: str) -> list[Call]:
        answer.result = {}

        def take(call: Call, response: admin_requests.BrokerConfigs) -> bool:
            answer.result[call.node] = None if response.error_code else response.configs.get(name)
            return True

        return self._of_each_broker(
            apis.DESCRIBE_CONFIGS,
            lambda node, version: admin_requests.encode_describe_broker(version, node, (name,)),
            take,
        )

    def _of_each_broker(
        self, api: int, encode: Callable[[int, int], bytes], take: Callable[[Call, Any], bool]
    ) -> list[Call]:
        """``encode`` makes a request's body of a broker's id and of a version."""
        give_up_ms = self._clock_ms() + _LIST_PATIENCE_MS
        return [
            Call(api, partial(encode, node), take, None, node, 0, _NODE_TIMEOUT_MS, give_up_ms=give_up_ms)
            for node in self.nodes
        ]
