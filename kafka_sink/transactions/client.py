"""Runs protocol steps against brokers, on the caller's thread, over the project's own connections.

It finds coordinators and sends the operations of one step at the same time. It repeats requests whose
response was lost or has an error that may pass. Other responses go back to the protocol, and other errors are
raised.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from kafka_sink import kafka_errors
from kafka_sink.clock import RANDOM, ExponentialBackoff, monotonic_ms
from kafka_sink.errors import BrokerVersionError, ConfigurationError, DeliveryError, is_final
from kafka_sink.model import Node, TopicPartition
from kafka_sink.network import apis, requests, topic_requests, transaction_requests
from kafka_sink.network.broker_connection import BrokerConnection
from kafka_sink.network.broker_protocol import OnResponse, Request
from kafka_sink.network.client import NetworkClient
from kafka_sink.options import SinkOptions
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
_MAX_POLL_MS = 100.0
_LIST_TIMEOUT_MS, _LIST_PATIENCE_MS = 3000.0, 6000.0
# How long an offset may be pending before the protocol is told. Brokers write markers in less.
_PENDING_PATIENCE_MS = 500.0
_GROUP_KEY, _TRANSACTION_KEY = True, False
# DescribeTransactions' names for states in which a transaction's markers are being written begin so.
_PREPARED = "Prepare"

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


@dataclass(slots=True, eq=False)
class _Call:
    """One request of an operation. ``key`` names its coordinator; without one it goes to ``node``.

    ``encode`` makes its body of a version. ``take`` gets the call itself and its response, and says whether
    that is final.
    """

    api: int
    encode: Callable[[int], bytes]
    take: Callable[[_Call, Any], bool]
    key: tuple[bool, str] | None = None
    node: int | None = None
    # As in Request.
    asked: int = 0
    attempts: int = 0
    not_before_ms: float = 0.0
    is_sent: bool = False
    last_error: str = ""
    # When the call ends without a response, or with one that says that an offset is pending.
    give_up_ms: float = math.inf
    # A call of the same step and coordinator: the response counts only if this was sent behind that one.
    behind: _Call | None = None
    # A call of the same step that has to be done before this one is sent.
    after: _Call | None = None


@dataclass(slots=True)
class _Step:
    """The operations of one step: calls that are not done, and the results so far."""

    results: list[Any]
    calls: list[_Call] = field(default_factory=list)


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


class TransactionClient:
    """One thread at a time. ``close`` it, or keep it for the next batch: its connections are the costly
    part."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        # What brokers speak, known once they were asked.
        self.protocol = PROTOCOL_2
        self._network = NetworkClient(options, monotonic_ms)
        self._network.on_disconnected = self._on_disconnected
        backoff_ms = min(options.retry_backoff_ms, 20)
        self._backoff = ExponentialBackoff(backoff_ms, options.retry_backoff_max_ms, RANDOM.random)
        self._coordinators: dict[tuple[bool, str], int] = {}
        self._nodes: dict[int, Node] = {}
        # Each with the time of the response.
        self._partitions: dict[str, tuple[int, float]] = {}
        self._asked_nodes = False
        # Kinds of keys whose coordinators are being asked for.
        self._asked_coordinators: set[bool] = set()
        self._ahead: list[tuple[bool, str]] = []
        # Brokers that may name themselves coordinators by mistake: asked for coordinators only where no other
        # broker can be.
        self._distrusted: set[int] = set()
        self._topic: str | None = None
        self._not_before_ms = 0.0
        # Brokers whose lists the last run did not wait for.
        self.left_out: set[int] = set()
        self._failures = 0
        self._deadline_ms = 0.0
        self._step = _Step([])
        self._last_error = "no broker responded"

    # -- for the caller ---------------------------------------------------------------------------

    def run(
        self,
        steps: Steps[Result],
        timeout_ms: float,
        *,
        groups: Iterable[str] = (),
        transactional_ids: Iterable[str] = (),
    ) -> Result:
        """Run protocol code to its end.

        ``groups`` and ``transactional_ids`` name what later steps will use: their coordinators are looked up,
        and all brokers connected to, while the first step is under way.

        Raises what it raises, DeliveryError after ``timeout_ms``, ConfigurationError where rights or settings
        are in the way, BrokerVersionError where brokers are too old.
        """
        self._deadline_ms = monotonic_ms() + timeout_ms
        self.left_out.clear()
        self._distrusted = set()
        self._ahead = [(_GROUP_KEY, name) for name in groups]
        self._ahead += [(_TRANSACTION_KEY, name) for name in transactional_ids]
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

    def partitions(self, topic: str, timeout_ms: float) -> int:
        """How many partitions a topic has, 0 where it is not there; at most metadata.max.age.ms old.

        A topic has no fewer than before, unless it is deleted and created again. One that brokers do not
        know may be new, and is asked for again for a while. Raises DeliveryError after the time.
        """
        oldest_ms = monotonic_ms() - self._options.metadata_max_age_ms
        known, at_ms = self._partitions.pop(topic, (0, -math.inf))
        if at_ms >= oldest_ms:
            self._partitions[topic] = known, at_ms
            return known
        self._deadline_ms = monotonic_ms() + timeout_ms
        missing_ms = monotonic_ms() + min(TOPIC_PROPAGATION_MS, timeout_ms / 2)
        found: list[int] = []

        def take(call: _Call, response: requests.MetadataResponse) -> bool:
            code = response.update.errors.get(topic, kafka_errors.NONE)
            is_missing = code == kafka_errors.UNKNOWN_TOPIC_OR_PARTITION and monotonic_ms() >= missing_ms
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
        call = _Call(
            apis.METADATA, lambda version: requests.encode_metadata(version, (topic,), False), take, node=node
        )
        self._finish(_Step([None], [call]))
        if found[0]:
            self._partitions[topic] = found[0], monotonic_ms()
        return found[0]

    def broker_settings(self, name: str, timeout_ms: float) -> dict[int, str | None]:
        """A setting of each broker that responds; None where it does not tell.

        Raises DeliveryError after the time.
        """
        self._deadline_ms = monotonic_ms() + timeout_ms
        self._connect()
        found: dict[int, str | None] = {}

        def call(node: int) -> _Call:
            def take(_: _Call, response: topic_requests.BrokerConfigs) -> bool:
                found[node] = None if response.error_code else response.configs.get(name)
                return True

            return _Call(
                apis.DESCRIBE_CONFIGS,
                lambda version: topic_requests.encode_describe_broker(version, node, (name,)),
                take,
                node=node,
                give_up_ms=monotonic_ms() + _LIST_PATIENCE_MS,
            )

        calls = [call(node) for node in self._nodes]
        self._finish(_Step([None], calls))
        return found

    def close(self) -> None:
        self._network.close()

    # -- a step -----------------------------------------------------------------------------------

    def _execute(self, operations: tuple[Operation, ...]) -> tuple[Any, ...]:
        self._connect()
        self._forget_coordinators(operations)
        step = _Step([_EMPTY.get(type(operation), _nothing)() for operation in operations])
        for index, operation in enumerate(operations):
            step.calls += self._calls(step, index, operation)
        self._finish(step)
        return tuple(step.results)

    def _finish(self, step: _Step) -> None:
        if self._ahead:
            now_ms = monotonic_ms()
            for node in self._nodes:
                self._is_ready(node, now_ms)
        self._step = step
        while step.calls:
            now_ms = monotonic_ms()
            if now_ms > self._deadline_ms:
                self._give_up(step)
            self._leave_brokers_out(step, now_ms)
            self._look_up(step, now_ms)
            wait = self._send_due(step, now_ms)
            self._network.poll(wait, monotonic_ms())

    def _give_up(self, step: _Step) -> None:
        reasons = sorted({call.last_error for call in step.calls if call.last_error}) or [self._last_error]
        what = f"{apis.APIS[step.calls[0].api].name} did not succeed"
        raise self._out_of_time(what, f"{'; '.join(reasons)} (brokers: {self._network.describe_brokers()})")

    @staticmethod
    def _out_of_time(what: str, why: str) -> DeliveryError:
        return DeliveryError(
            f"{what} within the time allowed by kafka.delivery.timeout.ms (for a commit) or "
            f"kafka.max.block.ms (for all else): {why}"
        )

    def _send_due(self, step: _Step, now_ms: float) -> float:
        """Send the requests that may go; return the milliseconds until there is more to do."""
        wait = _MAX_POLL_MS
        for call in step.calls:
            node = call.node if call.key is None else self._coordinators.get(call.key)
            if call.is_sent or node is None or (call.behind in step.calls and not call.behind.is_sent):
                continue
            if call.after in step.calls:
                continue
            if now_ms < call.not_before_ms:
                wait = min(wait, call.not_before_ms - now_ms)
            elif self._is_ready(node, now_ms):
                connection = self._network.connections[node]
                version = self._version(connection, call.api)
                timeout = min(self._options.request_timeout_ms, max(self._deadline_ms - now_ms, 1.0))
                if call.key is None:
                    timeout = min(timeout, _LIST_TIMEOUT_MS)
                call.is_sent = True
                request = Request(
                    call.api,
                    version,
                    [call.encode(version)],
                    timeout,
                    partial(self._on_response, call),
                    partial(self._on_failure, call),
                    asked=call.asked,
                )
                self._network.send(connection, request, now_ms)
            elif node in self._network.connections:
                wait = min(wait, self._network.connections[node].ready_delay_ms(now_ms))
        return wait

    def _is_ready(self, node: int, now_ms: float) -> bool:
        connection = self._network.connections.get(node)
        return connection is not None and self._network.is_ready(connection, now_ms)

    def _version(self, connection: BrokerConnection, api: int) -> int:
        return connection.api_version(api, _VERSIONS[self.protocol].get(api))

    def _on_disconnected(self, node_id: int, cause: Exception, *_: object) -> None:
        self._last_error = str(cause)
        self._forget(node_id)
        if is_final(cause):
            raise cause

    def _leave_brokers_out(self, step: _Step, now_ms: float) -> None:
        """Lists do not wait for a broker that is gone or hangs: others soon list its transactions."""
        for call in [one for one in step.calls if one.key is None and not one.is_sent]:
            if call.node in self._nodes and now_ms < call.give_up_ms:
                continue
            if call.give_up_ms < math.inf:
                step.calls.remove(call)
                self.left_out.add(-1 if call.node is None else call.node)
            else:
                call.node = next(iter(self._nodes))

    def _on_failure(self, call: _Call, cause: Exception, *_: object) -> None:
        self._last_error = str(cause)
        self._again(call, str(cause))

    def _on_failed_look_up(self, cause: Exception, *_: object) -> None:
        self._last_error = str(cause)
        self._asked_nodes = False
        self._asked_coordinators.clear()
        self._back_off()

    def _on_response(self, call: _Call, response: Any, _: float) -> None:
        step = self._step
        if call not in step.calls:
            return  # it belongs to an earlier step that timed out
        if call.behind in step.calls:
            self._again(call, "what it is sent behind must be sent again")
        elif call.take(call, response):
            step.calls.remove(call)

    def _on_nodes(self, response: requests.MetadataResponse, _: float) -> None:
        self._asked_nodes = False
        for topic in response.update.topics:
            if topic.partitions:
                self._partitions[topic.name] = len(topic.partitions), monotonic_ms()
        self._nodes = {node.id: node for node in response.update.nodes}
        known = self._coordinators.items()
        self._coordinators = {key: node for key, node in known if node in self._nodes}
        self._network.set_addresses(self._nodes.values())

    def _again(self, call: _Call, reason: str, *, elsewhere: bool = False) -> bool:
        """To be sent once more; false, as its operation is not done."""
        call.attempts += 1
        call.is_sent = False
        call.last_error = reason
        call.not_before_ms = monotonic_ms() + self._backoff.delay_ms(call.attempts)
        if elsewhere and call.key is not None:
            self._coordinators.pop(call.key, None)
        return False

    def _judge(self, call: _Call, code: int) -> bool:
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

    def _connect(self) -> None:
        """Connect to the bootstrap addresses, until a broker has said which brokers there are."""
        self._step = _Step([])
        while not self._nodes:
            now_ms = monotonic_ms()
            if now_ms > self._deadline_ms:
                raise self._out_of_time("no broker responded", self._network.describe_brokers())
            self._network.poll(self._ask_nodes(now_ms), monotonic_ms())

    def _ask_nodes(self, now_ms: float) -> float:
        if self._asked_nodes or now_ms < self._not_before_ms:
            return _MAX_POLL_MS
        connection = self._any_connection(now_ms)
        if connection is None:
            return 10.0
        self._require_protocol(connection)
        version = self._version(connection, apis.METADATA)
        topics = () if self._topic is None else (self._topic,)
        body = requests.encode_metadata(version, topics, False)
        self._asked_nodes = True
        self._ask(connection, apis.METADATA, version, body, self._on_nodes, 0, now_ms)
        return _MAX_POLL_MS

    def _ask(
        self,
        connection: BrokerConnection,
        api: int,
        version: int,
        body: bytes,
        on_response: OnResponse,
        asked: int,
        now_ms: float,
    ) -> None:
        """Send a look-up, of brokers or of coordinators."""
        timeout = self._options.request_timeout_ms
        request = Request(api, version, [body], timeout, on_response, self._on_failed_look_up, asked=asked)
        self._network.send(connection, request, now_ms)

    def _any_connection(self, now_ms: float) -> BrokerConnection | None:
        if self._distrusted:
            for other in self._nodes.keys() - self._distrusted:
                if self._is_ready(other, now_ms):
                    return self._network.connections[other]
        connection = self._network.least_loaded(now_ms)
        return connection if connection and self._network.is_ready(connection, now_ms) else None

    def _require_protocol(self, connection: BrokerConnection) -> None:
        if connection.features.get(_FEATURE, 0) >= _PROTOCOL_2_LEVEL:
            self.protocol = PROTOCOL_2
            return
        newest = connection.newest_version(apis.TXN_OFFSET_COMMIT)
        if newest < _FIRST_TXN_OFFSET_COMMIT:
            raise BrokerVersionError(
                "delivery.guarantee=exactly-once needs brokers of Apache Kafka 3.8 or later, which reject a "
                "late write of a transaction that has ended (KIP-890); here TxnOffsetCommit ends with "
                f"version {newest}, not {_FIRST_TXN_OFFSET_COMMIT}. Use delivery.guarantee=at-least-once, or "
                "newer brokers"
            )
        self.protocol = PROTOCOL_1

    def _look_up(self, step: _Step, now_ms: float) -> None:
        """Ask for coordinators that are not known: one request for each kind of key."""
        keys = dict.fromkeys([*(call.key for call in step.calls if call.key), *self._ahead])
        missing = [key for key in keys if key not in self._coordinators]
        for of_groups in (_TRANSACTION_KEY, _GROUP_KEY):
            names = [name for kind, name in missing if kind is of_groups]
            if not names or of_groups in self._asked_coordinators or now_ms < self._not_before_ms:
                continue
            connection = self._any_connection(now_ms)
            if connection is None:
                return
            api = apis.FIND_COORDINATOR
            version = self._version(connection, api)
            body = transaction_requests.encode_find_coordinator(version, names, of_groups=of_groups)
            self._asked_coordinators.add(of_groups)
            on_response = partial(self._on_coordinators, of_groups)
            self._ask(connection, api, version, body, on_response, len(names), now_ms)

    def _on_coordinators(
        self, of_groups: bool, response: transaction_requests.CoordinatorsResponse, _: float
    ) -> None:
        self._asked_coordinators.discard(of_groups)
        is_new = False
        for name, found in response.found.items():
            if found.node is not None:
                self._coordinators[of_groups, name] = found.node.id
                is_new |= found.node.id not in self._nodes
                self._nodes.setdefault(found.node.id, found.node)
            elif found.error_code in _COORDINATOR_MOVED or found.error_code in _MAY_PASS:
                error = kafka_errors.error_of(found.error_code).label
                self._last_error = f"the coordinator of '{name}' is not known: {error}"
                self._back_off()
            else:
                reason = kafka_errors.error_of(found.error_code).name
                advice = _ADVICE.get(found.error_code, found.error_message or "")
                raise ConfigurationError(f"'{name}' may not be used: {reason}; {advice}")
        if is_new:
            self._network.set_addresses(self._nodes.values())

    def _forget_coordinators(self, operations: tuple[Operation, ...]) -> None:
        """Forget coordinators that may have been replaced and not know it, so that other brokers are
        asked."""
        names: list[str] = []
        for operation in operations:
            match operation:
                case Describe(afresh=True):
                    names += operation.transactional_ids
                case EndTransaction(afresh=True):
                    names.append(operation.transactional_id)
        former = {self._coordinators.pop((_TRANSACTION_KEY, name), -1) for name in names} - {-1}
        if former:
            self._distrusted = former
            self._back_off()

    def _back_off(self) -> None:
        self._failures += 1
        self._not_before_ms = monotonic_ms() + self._backoff.delay_ms(min(self._failures, 6))

    def _forget(self, node_id: int) -> None:
        """A broker is gone, so its coordinators may have moved, and there may be new brokers."""
        self._coordinators = {key: node for key, node in self._coordinators.items() if node != node_id}
        self._asked_nodes = False
        self._back_off()
        if node_id in self._nodes and len(self._nodes) > 1:
            self._ask_nodes(max(monotonic_ms(), self._not_before_ms))

    # -- operations -------------------------------------------------------------------------------

    def _calls(self, step: _Step, index: int, operation: Operation) -> list[_Call]:
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

    def _init(self, step: _Step, index: int, operation: InitProducer) -> _Call:
        name, of, timeout = operation.transactional_id, operation.of, self._options.transaction_timeout_ms

        def take(call: _Call, response: requests.ProducerIdResponse) -> bool:
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

        return _Call(
            apis.INIT_PRODUCER_ID,
            lambda version: requests.encode_init_producer_id(version, *(of or (-1, -1)), name, timeout),
            take,
            (_TRANSACTION_KEY, name),
        )

    def _end(self, step: _Step, index: int, operation: EndTransaction) -> _Call:
        name, producer = operation.transactional_id, operation.producer

        def take(call: _Call, response: transaction_requests.EndTxnResponse) -> bool:
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
        return _Call(
            apis.END_TXN,
            lambda version: transaction_requests.encode_end_txn(version, name, *producer, commit=commit),
            take,
            (_TRANSACTION_KEY, name),
        )

    def _record_calls(self, step: _Step, index: int, operation: RecordOffsets) -> list[_Call]:
        """Under protocol 1 the group is added to the transaction before."""
        record = self._record(step, index, operation)
        if self.protocol == PROTOCOL_2:
            return [record]
        name, producer, group = operation.transactional_id, operation.producer, operation.group

        def take(call: _Call, response: transaction_requests.AddOffsetsResponse) -> bool:
            if not self._judge(call, response.error_code):
                return False
            if response.error_code:
                step.results[index] = _failed(response.error_code)
                step.calls.remove(record)
            return True

        record.after = _Call(
            apis.ADD_OFFSETS_TO_TXN,
            lambda version: transaction_requests.encode_add_offsets(version, name, *producer, group),
            take,
            (_TRANSACTION_KEY, name),
        )
        return [record.after, record]

    def _record(self, step: _Step, index: int, operation: RecordOffsets) -> _Call:
        name, producer, group = operation.transactional_id, operation.producer, operation.group
        offsets = {partition: (0, text) for partition, text in operation.entries}

        def take(call: _Call, response: transaction_requests.PartitionErrors) -> bool:
            code = next((one for one in response.errors.values() if one), kafka_errors.NONE)
            if not self._judge(call, code):
                return False
            step.results[index] = _failed(code) if code else None
            return True

        return _Call(
            apis.TXN_OFFSET_COMMIT,
            lambda version: transaction_requests.encode_txn_offset_commit(
                version, name, *producer, group, offsets
            ),
            take,
            (_GROUP_KEY, group),
            asked=2 * len(offsets),
        )

    def _fetch(self, step: _Step, index: int, group: str, partitions: list[TopicPartition] | None) -> _Call:
        def take(call: _Call, response: transaction_requests.OffsetFetchResponse) -> bool:
            code, offsets = response.groups.get(group, (kafka_errors.NONE, {}))
            if code == kafka_errors.GROUP_ID_NOT_FOUND:
                return True  # it has committed nothing
            code = code or next(
                (one.error_code for one in offsets.values() if one.error_code), kafka_errors.NONE
            )
            if code == kafka_errors.UNSTABLE_OFFSET_COMMIT:
                call.give_up_ms = min(call.give_up_ms, monotonic_ms() + _PENDING_PATIENCE_MS)
            if (
                code != kafka_errors.UNSTABLE_OFFSET_COMMIT or monotonic_ms() < call.give_up_ms
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
        return _Call(
            apis.OFFSET_FETCH,
            lambda version: transaction_requests.encode_offset_fetch(
                version, group, partitions, stable=stable
            ),
            take,
            (_GROUP_KEY, group),
            asked=2 * (2 * known if partitions is None else len(partitions)),
        )

    def _describe(self, step: _Step, index: int, name: str) -> _Call:
        def take(call: _Call, response: transaction_requests.DescribeTransactionsResponse) -> bool:
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

        return _Call(
            apis.DESCRIBE_TRANSACTIONS,
            lambda version: transaction_requests.encode_describe_transactions(version, (name,)),
            take,
            (_TRANSACTION_KEY, name),
        )

    def _list(self, step: _Step, index: int, operation: ListOpen | ListIds, node: int) -> _Call:
        states: tuple[str, ...] = ()
        pattern, age_ms = ANY_ID_PATTERN, -1
        if isinstance(operation, ListOpen):
            age_ms = operation.longer_than_ms
            states, pattern = (OPEN,), task_id_pattern(operation.prefix)
            # With protocol 1 ids that are not in use are in that state, too.
            if self.protocol == PROTOCOL_2 and age_ms < 0:
                states = (OPEN, NO_TRANSACTION)

        def take(call: _Call, response: transaction_requests.ListTransactionsResponse) -> bool:
            if not self._judge(call, response.error_code):
                return False
            step.results[index] += [name for name in response.ids if re.match(pattern, name)]
            return True

        return _Call(
            apis.LIST_TRANSACTIONS,
            lambda version: transaction_requests.encode_list_transactions(version, states, pattern, age_ms),
            take,
            node=node,
            give_up_ms=monotonic_ms() + _LIST_PATIENCE_MS,
        )
