"""Runs the protocol's steps against brokers, on the caller's thread, over the project's own connections.

The operations of one step are sent at the same time. Their responses are the results of the step, and so are
errors that the protocol can act on; other errors are raised.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from kafka_sink import kafka_errors
from kafka_sink.clock import RANDOM, TOPIC_PROPAGATION_MS, ExponentialBackoff, monotonic_ms
from kafka_sink.errors import BrokerVersionError, ConfigurationError, DeliveryError, is_final
from kafka_sink.model import MetadataUpdate, Node, TopicPartition
from kafka_sink.network import apis, requests, transaction_requests
from kafka_sink.network.blocking import BlockingCalls, Call, KeyType, awaited
from kafka_sink.network.broker_connection import BrokerConnection
from kafka_sink.network.broker_protocol import ConnectionState
from kafka_sink.network.client import NetworkClient
from kafka_sink.network.wire import ErrorResponse
from kafka_sink.options import SinkOptions
from kafka_sink.transactions import operations as ops

Result = TypeVar("Result")
# KIP-890: brokers with the feature at level 2 use transaction protocol 2, all others protocol 1.
_FEATURE, _PROTOCOL_2_LEVEL = "transaction.version", 2
PROTOCOL_1, PROTOCOL_2 = 1, 2
# InitProducerId from version 6 on belongs to two-phase commit (KIP-939), which brokers have not finished.
_VERSIONS: Mapping[int, Mapping[int, tuple[int, int]]] = {
    PROTOCOL_1: {apis.INIT_PRODUCER_ID: (3, 5), apis.END_TXN: (3, 4), apis.TXN_OFFSET_COMMIT: (3, 4)},
    PROTOCOL_2: {apis.INIT_PRODUCER_ID: (3, 5), apis.END_TXN: (5, 5), apis.TXN_OFFSET_COMMIT: (5, 5)},
}
# Apache Kafka has this version of TxnOffsetCommit from 3.8 on. These brokers verify that what is written
# belongs to an open transaction (the first part of KIP-890).
_FIRST_TXN_OFFSET_COMMIT = 4
_LIST_PATIENCE_MS = 6000.0
# The timeout of a request that any of several brokers can answer.
_NODE_TIMEOUT_MS = 3000.0
# How long an offset may stay pending until that is the result. Brokers write markers faster.
_PENDING_PATIENCE_MS = 500.0
# DescribeTransactions' names of states in which a transaction's markers are being written begin with this.
_PREPARED = "Prepare"

# Implementations other than Apache Kafka's may leave out of a response what was requested. It is retried.
_INCOMPLETE = "the response lacks something that was requested"
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
        "grant Read on the topic for which progress is recorded (transaction.progress.topic)"
    ),
    kafka_errors.INVALID_TRANSACTION_TIMEOUT: (
        "kafka.transaction.timeout.ms is above the brokers' transaction.max.timeout.ms: lower it, or raise "
        "theirs"
    ),
    kafka_errors.UNKNOWN_TOPIC_OR_PARTITION: (
        "the topic for which progress is recorded (transaction.progress.topic) does not exist: create it"
    ),
    kafka_errors.OFFSET_METADATA_TOO_LARGE: (
        "the brokers' offset.metadata.max.bytes is below Kafka's default of 4096"
    ),
}

_COORDINATOR_MOVED = frozenset({kafka_errors.COORDINATOR_NOT_AVAILABLE, kafka_errors.NOT_COORDINATOR})
# These requests may go to any broker.
_LOOK_UPS = frozenset({apis.METADATA, apis.FIND_COORDINATOR})


@dataclass(frozen=True, slots=True)
class KnownBrokers:
    """The brokers and the protocol that one client has found. Other clients need not look them up."""

    nodes: tuple[Node, ...]
    coordinators: Mapping[tuple[KeyType, str], int]
    protocol: int


@dataclass(slots=True, eq=False)
class _StepAnswer:
    """The result of one operation of a step. Several calls may contribute to it."""

    result: Any = None


class TransactionClient(BlockingCalls):
    """Runs steps for one thread at a time. Its connections cost most, so it is kept for the next batch."""

    def __init__(
        self,
        options: SinkOptions,
        network: NetworkClient | None = None,
        clock_ms: Callable[[], float] = monotonic_ms,
    ) -> None:
        super().__init__(options, network, clock_ms)
        self._speak(PROTOCOL_2)
        self._knows_protocol = False
        self.network.on_disconnected = self._on_disconnected
        backoff_ms = min(options.retry_backoff_ms, 20)
        self._backoff = ExponentialBackoff(backoff_ms, options.retry_backoff_max_ms, RANDOM.random)
        # The steps that ``start`` began, and the pending answers of the first one.
        self._started: tuple[ops.TransactionSteps[Any], list[_StepAnswer]] | None = None
        # Kafka's coordinators: the broker for each kind of key and name that brokers have returned.
        self.coordinators: dict[tuple[KeyType, str], int] = {}
        self.nodes: dict[int, Node] = {}
        # For each topic, its number of partitions and when a broker returned it.
        self._partitions: dict[str, tuple[int, float]] = {}
        # For each kind of key, the last request for coordinators.
        self._look_ups: dict[KeyType, Call] = {}
        # The keys of coordinators that the next steps need.
        self._soon: list[tuple[KeyType, str]] = []
        # Brokers that may wrongly consider themselves coordinators. Others are asked for coordinators first.
        self._distrusted: set[int] = set()
        # Brokers that did not answer the last run's requests to all brokers, or -1 for one without an id.
        self.left_out: set[int] = set()
        self._allowed = ""
        self._last_error = "no broker responded"

    @property
    def known(self) -> KnownBrokers:
        return KnownBrokers(tuple(self.nodes.values()), dict(self.coordinators), self.protocol)

    def learn(self, known: KnownBrokers) -> None:
        """Use what another client has found, if this one has found nothing yet."""
        if not self.nodes:
            self._set_nodes(known.nodes)
            self.coordinators = dict(known.coordinators)
            self._speak(known.protocol)

    def take_connections(self, update: MetadataUpdate) -> None:
        """Use the network's connections, over which this metadata has just arrived. Raises as ``run``."""
        self.on_metadata(update)
        connections = self.network.connections.values()
        ready = next((one for one in connections if one.state is ConnectionState.READY), None)
        if ready is not None:
            self._require(ready)

    def on_metadata(self, update: MetadataUpdate) -> None:
        """Take the brokers and the numbers of partitions of a Metadata response that has just arrived."""
        now_ms = self._clock_ms()
        self._partitions |= {
            metadata.name: (len(metadata.partitions), now_ms)
            for metadata in update.topics
            if metadata.partitions
        }
        self._set_nodes(update.nodes)

    def _set_nodes(self, nodes: Iterable[Node]) -> None:
        self.nodes = {node.id: node for node in nodes}
        known = self.coordinators.items()
        self.coordinators = {key: node for key, node in known if node in self.nodes}
        self.network.set_addresses(self.nodes.values())

    def start(self, steps: ops.TransactionSteps[Any], wait_ms: float, timeout_ms: float) -> None:
        """Send the first step, and wait for its responses for ``wait_ms`` at most. ``run`` then goes on."""
        self._allow(timeout_ms, "kafka.max.block.ms")
        self._started = steps, self.begin_step(next(steps))
        until_ms = self._clock_ms() + wait_ms

        def advance(now_ms: float) -> float | None:
            due_ms, left_ms = self._send_due(now_ms), until_ms - now_ms
            return None if due_ms is None or left_ms <= 0 else min(due_ms, left_ms)

        self._loop(advance, self._awaited, until_ms)

    def run(
        self, steps: ops.TransactionSteps[Result], timeout_ms: float, bound: str = "kafka.max.block.ms"
    ) -> Result:
        """Run a generator of the protocol to its end, and return its result.

        It is a new one, or the one that was started last if nothing else was run in between.

        Raises what the generator raises; DeliveryError after ``timeout_ms``, which the option ``bound`` sets;
        ConfigurationError if a permission or a setting prevents it; BrokerVersionError for old brokers.
        """
        self._allow(timeout_ms, bound)
        self.left_out.clear()
        started, self._started = self._started, None
        try:
            if started is not None and started[0] is steps:
                answers = started[1]
            else:
                self._distrusted = set()
                answers = self.begin_step(next(steps))
            while True:
                try:
                    results = self.await_step(answers)
                except DeliveryError as error:
                    # The protocol decides what the error means for the batch.
                    wanted = steps.throw(error)
                else:
                    wanted = steps.send(results)
                answers = self.begin_step(wanted)
        except StopIteration as stop:
            result: Result = stop.value
            return result

    def partitions(self, topic: str, timeout_ms: float, bound: str = "kafka.max.block.ms") -> int:
        """The number of a topic's partitions, 0 if the topic does not exist; at most metadata.max.age.ms old.

        Partitions are only ever added, unless the topic is deleted and created again. A topic that brokers do
        not know may be new, so it is requested again for a while. Raises DeliveryError after ``timeout_ms``.
        """
        self._allow(timeout_ms, bound)
        now_ms = self._clock_ms()
        count, at_ms = self._partitions.pop(topic, (0, -math.inf))
        if at_ms >= now_ms - self._options.metadata_max_age_ms:
            self._partitions[topic] = count, at_ms
            return count
        self._describe_cluster(topic, now_ms + min(TOPIC_PROPAGATION_MS, timeout_ms / 2))
        return self._partitions.get(topic, (0, 0.0))[0]

    def _send_due(self, now_ms: float) -> float | None:
        if self.calls and now_ms <= self._deadline_ms:
            self._leave_brokers_out(now_ms)
            self._look_up(now_ms)
            for call in self.calls:
                if call.key is not None:
                    call.node = self.coordinators.get(call.key)
                elif call.api in _LOOK_UPS and not call.is_sent:
                    call.node = self._any_node(now_ms)
        return super()._send_due(now_ms)

    def _send(self, call: Call, connection: BrokerConnection, now_ms: float) -> None:
        # All requests of a step use one protocol, even while brokers change from protocol 1 to 2.
        if call.api == apis.METADATA:
            self._require(connection)
        super()._send(call, connection, now_ms)

    def _awaited(self) -> str:
        if not self.nodes:
            return f"any of the brokers {self.network.describe_brokers()}"
        call = next((call for call in self.calls if call.is_sent), next(iter(self.calls), None))
        if call is None:
            return "brokers"
        return awaited(None if call.node is None else self.nodes.get(call.node), call.api)

    def _give_up(self) -> None:
        reasons = sorted({call.last_error for call in self.calls if call.last_error}) or [self._last_error]
        what = f"{apis.APIS[self.calls[0].api].name} did not succeed within {self._allowed}"
        why = f"{'; '.join(reasons)} (brokers: {self.network.describe_brokers()})"
        raise DeliveryError(f"{what}: {why}")

    def _allow(self, timeout_ms: float, bound: str) -> None:
        """Give the requests from now on ``timeout_ms``. ``bound`` is the option that sets it, or ""."""
        self._deadline_ms = self._clock_ms() + timeout_ms
        self._allowed = f"{timeout_ms / 1000:g} s" + (f", the time allowed by {bound}" if bound else "")

    def _on_response(self, call: Call, response: Any, now_ms: float) -> None:
        if call in self.calls and call.behind in self.calls:
            self._again(call, "the request before it must be sent again")
        else:
            super()._on_response(call, response, now_ms)

    def begin_step(self, operations: tuple[ops.Operation, ...]) -> list[_StepAnswer]:
        """Prepare the calls for the operations of one step."""
        self.calls, self._soon = [], []  # a step that failed may have left some
        if not self.nodes or not self._knows_protocol:
            # Which calls an operation needs depends on the protocol.
            self._describe_cluster()
        self._forget_coordinators(operations)
        answers = [_StepAnswer() for _ in operations]
        for answer, operation in zip(answers, operations, strict=True):
            self.calls += self._calls(answer, operation)
        return answers

    def await_step(self, answers: list[_StepAnswer]) -> tuple[Any, ...]:
        """Wait until all calls are complete."""

        def advance(now_ms: float) -> float | None:
            if all(call.api in _LOOK_UPS for call in self.calls):
                self.calls = []  # nothing waits for look-ups alone
            return self._send_due(now_ms)

        self._loop(advance, self._awaited, self._deadline_ms)
        return tuple(answer.result for answer in answers)

    def _require(self, connection: BrokerConnection) -> None:
        if connection.protocol.features.get(_FEATURE, 0) >= _PROTOCOL_2_LEVEL:
            self._speak(PROTOCOL_2)
            return
        newest = connection.newest_version(apis.TXN_OFFSET_COMMIT)
        if newest < _FIRST_TXN_OFFSET_COMMIT:
            lacks = f"TxnOffsetCommit has version {newest} instead of {_FIRST_TXN_OFFSET_COMMIT}"
        elif connection.newest_version(apis.LIST_TRANSACTIONS) < 0:
            # Implementations other than Apache Kafka's may have TxnOffsetCommit 4 without ListTransactions.
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
        self._knows_protocol = True

    def _forget_coordinators(self, operations: tuple[ops.Operation, ...]) -> None:
        """Forget coordinators that may have been replaced unawares, so that other brokers are asked."""
        names: list[str] = []
        for operation in operations:
            match operation:
                case ops.Describe(afresh=True):
                    names += operation.transactional_ids
                case ops.EndTransaction(afresh=True):
                    names.append(operation.transactional_id)
        former = {self.coordinators.pop((KeyType.TRANSACTION, name), -1) for name in names} - {-1}
        if former:
            self._distrusted = former

    def _leave_brokers_out(self, now_ms: float) -> None:
        """Drop requests to brokers that are gone or hang, of those that each broker is sent.

        Other brokers soon take such a broker's transactions over and list them.
        """
        for call in [call for call in self.calls if call.key is None and not call.is_sent]:
            if call.api in _LOOK_UPS:
                continue
            if call.node not in self.nodes or now_ms >= call.give_up_ms:
                self.calls.remove(call)
                self.left_out.add(-1 if call.node is None else call.node)

    def _on_disconnected(self, node_id: int, cause: Exception, *_: object) -> None:
        """Handle a lost broker: its coordinators may have moved, and there may be new brokers."""
        self._last_error = str(cause)
        self.coordinators = {key: node for key, node in self.coordinators.items() if node != node_id}
        is_asked = any(call.api == apis.METADATA for call in self.calls)
        # Even the only broker may have moved: a bootstrap address then returns its new address.
        if node_id in self.nodes and not is_asked:
            self.calls.append(self._describing_cluster())
        if is_final(cause):
            raise cause

    def _on_failure(self, call: Call, cause: Exception, *_: object) -> None:
        self._last_error = str(cause)
        self._again(call, str(cause))

    def _again(self, call: Call, reason: str, *, elsewhere: bool = False) -> bool:
        """Send the call once more later. Returns False, because its operation is not done."""
        call.attempts += 1
        call.is_sent = False
        call.last_error = reason
        call.not_before_ms = self._clock_ms() + self._backoff.delay_ms(call.attempts)
        if elsewhere and call.key is not None:
            self.coordinators.pop(call.key, None)
        behind = call.behind
        if behind is not None and behind not in self.calls and call in self.calls:
            # Another coordinator may answer by now, which has not received what was sent before.
            behind.is_sent, behind.not_before_ms = False, call.not_before_ms
            self.calls.insert(0, behind)
        return False

    def _done(self, call: Call, answer: _StepAnswer, code: int, result: object = None) -> bool:
        """Judge a response as ``_judge`` does. If it is final, set the operation's result."""
        if not self._judge(call, code):
            return False
        answer.result = ops.Failed(kafka_errors.error_of(code).name) if code else result
        return True

    def _judge(self, call: Call, code: int) -> bool:
        """Whether a response is final. If not, its request is repeated. Raises for a fatal error."""
        if code == kafka_errors.NONE or code in _REFUSALS:
            return True
        error = kafka_errors.error_of(code)
        advice = _ADVICE.get(code)
        if error.retriable and not advice:
            return self._again(call, error.name, elsewhere=code in _COORDINATOR_MOVED)
        what = f"{apis.APIS[call.api].name} failed: {error.label}"
        if advice:
            raise ConfigurationError(f"{what}; {advice}")
        raise DeliveryError(what)

    def _describe_cluster(self, topic: str = "", missing_ms: float = 0.0) -> None:
        """Request the list of brokers, from the bootstrap addresses at first."""
        self.calls = [self._describing_cluster(topic, missing_ms)]
        self._loop(self._send_due, self._awaited, self._deadline_ms)

    def _describing_cluster(self, topic: str = "", missing_ms: float = 0.0) -> Call:
        """``missing_ms``: from this time on a topic that a broker does not know counts as missing."""

        def take(call: Call, response: requests.MetadataResponse) -> bool:
            update, now_ms = response.update, self._clock_ms()
            if not update.nodes:
                return self._again(call, "the broker has just started and returned no brokers yet")
            self.on_metadata(update)
            code = update.errors.get(topic, kafka_errors.NONE)
            is_missing = code == kafka_errors.UNKNOWN_TOPIC_OR_PARTITION and now_ms >= missing_ms
            if code and not is_missing:
                return self._again(call, kafka_errors.error_of(code).name)
            return True

        topics = (topic,) if topic else ()
        return Call(
            apis.METADATA,
            lambda version: requests.encode_metadata(version, topics, False),
            take,
            timeout_ms=_NODE_TIMEOUT_MS if self.nodes else math.inf,
        )

    def _any_node(self, now_ms: float) -> int | None:
        for other in self.nodes.keys() - self._distrusted if self._distrusted else ():
            if self._is_ready(other, now_ms):
                return other
        connection = self.network.least_loaded(now_ms)
        return None if connection is None else connection.node.id

    def _look_up(self, now_ms: float) -> None:
        """Request the coordinators that are not known, with one request for each kind of key."""
        keys = dict.fromkeys((*(call.key for call in self.calls if call.key), *self._soon))
        for node in {self.coordinators[key] for key in self._soon if key in self.coordinators}:
            self._is_ready(node, now_ms)
        for kind in KeyType:
            names = [name for asked, name in keys if asked is kind and (kind, name) not in self.coordinators]
            if names and self._look_ups.get(kind) not in self.calls:
                self._look_ups[kind] = self._finding_coordinators(kind, names)
                self.calls.append(self._look_ups[kind])

    def _finding_coordinators(self, kind: KeyType, names: list[str]) -> Call:
        def take(call: Call, response: transaction_requests.CoordinatorsResponse) -> bool:
            new: dict[int, Node] = {}
            problem = ""
            for name in names:
                coordinator = response.found.get(name)
                if coordinator is None:
                    problem = f"the coordinator of '{name}' is not known: {_INCOMPLETE}"
                    continue
                error = kafka_errors.error_of(coordinator.error_code)
                if coordinator.node is not None:
                    self.coordinators[kind, name] = coordinator.node.id
                    if coordinator.node.id not in self.nodes:
                        new[coordinator.node.id] = coordinator.node
                elif error.retriable:
                    problem = f"the coordinator of '{name}' is not known: {error.label}"
                else:
                    advice = _ADVICE.get(coordinator.error_code, coordinator.error_message or "")
                    raise ConfigurationError(f"'{name}' may not be used: {error.name}; {advice}")
            if new:
                self.nodes |= new
                self.network.set_addresses(self.nodes.values())
            return self._again(call, problem) if problem else True

        return Call(
            apis.FIND_COORDINATOR,
            lambda version: transaction_requests.encode_find_coordinator(
                version, names, of_groups=kind is KeyType.GROUP
            ),
            take,
            asked=len(names),
        )

    def _calls(self, answer: _StepAnswer, operation: ops.Operation) -> list[Call]:
        match operation:
            case ops.InitProducer(name, expected):
                return [self._init(answer, name, expected)]
            case ops.EndTransaction():
                return [self._end(answer, operation)]
            case ops.RecordOffsets():
                return self._record(answer, operation)
            case ops.FetchOffsets() | ops.FetchStableOffsets():
                return self._fetch(answer, operation)
            case ops.Describe(names, _, once_ended):
                answer.result = {}
                return [self._describe(answer, name, once_ended=once_ended) for name in names]
            case ops.LookUp(groups, names):
                self._soon += [(KeyType.GROUP, group) for group in groups]
                self._soon += [(KeyType.TRANSACTION, name) for name in names]
                return []
            case ops.ListOpen() | ops.ListIds():
                return self._list(answer, operation)

    def _init(self, answer: _StepAnswer, name: str, expected: ops.ProducerEpoch | None) -> Call:
        timeout = self._options.transaction_timeout_ms

        def take(call: Call, response: requests.ProducerIdResponse) -> bool:
            code = response.error_code
            if expected is None and code in _REFUSALS:
                # Another producer is taking the id over at this moment.
                return self._again(call, kafka_errors.error_of(code).name)
            if code in _REFUSALS and answer.result is not None:
                return True  # keep the result that `_end` stored (see there)
            return self._done(
                call, answer, code, ops.ProducerEpoch(response.producer_id, response.producer_epoch)
            )

        return Call(
            apis.INIT_PRODUCER_ID,
            lambda version: requests.encode_init_producer_id(version, *(expected or (-1, -1)), name, timeout),
            take,
            (KeyType.TRANSACTION, name),
        )

    def _end(self, answer: _StepAnswer, operation: ops.EndTransaction) -> Call:
        name, producer, commit = operation.transactional_id, operation.producer, operation.commit

        def take(call: Call, response: requests.ProducerIdResponse) -> bool:
            code = response.error_code
            epoch = ops.ProducerEpoch(response.producer_id, response.producer_epoch)
            if self.protocol == PROTOCOL_2:
                return self._done(call, answer, code, epoch)
            if not self._done(call, answer, code, producer):
                return False
            if not code and not (operation.of_task and commit):
                # EndTxn itself does this under protocol 2: no two transactions have the same id and epoch. If
                # another producer has raised the epoch since then, that does as well. Then the result stays
                # the ended epoch, which the id no longer has.
                self.calls.append(self._init(answer, name, producer))
            return True

        return Call(
            apis.END_TXN,
            lambda version: transaction_requests.encode_end_txn(version, name, *producer, commit=commit),
            take,
            (KeyType.TRANSACTION, name),
        )

    def _record(self, answer: _StepAnswer, operation: ops.RecordOffsets) -> list[Call]:
        """Under protocol 1 the group is added to the transaction first."""
        name, producer, group = operation.transactional_id, operation.producer, operation.group
        offsets = {partition: (0, text) for partition, text in operation.entries}

        def judged(call: Call, code: int) -> bool:
            is_final = self._done(call, answer, code)
            if is_final and code:
                # A refused request is not sent again, whatever becomes of the fetch that follows it.
                for other in self.calls:
                    other.behind = None if other.behind is record else other.behind
            return is_final

        def take(call: Call, response: transaction_requests.PartitionErrors) -> bool:
            if not offsets.keys() <= response.errors.keys():
                return self._again(call, _INCOMPLETE)
            return judged(call, next(filter(None, response.errors.values()), kafka_errors.NONE))

        record = Call(
            apis.TXN_OFFSET_COMMIT,
            lambda version: transaction_requests.encode_txn_offset_commit(
                version, name, *producer, group, offsets
            ),
            take,
            (KeyType.GROUP, group),
            asked=2 * len(offsets),
        )
        if self.protocol == PROTOCOL_2:
            return [record]

        def take_added(call: Call, response: ErrorResponse) -> bool:
            is_final = judged(call, response.error_code)
            if is_final and response.error_code:
                self.calls.remove(record)
            return is_final

        record.after = Call(
            apis.ADD_OFFSETS_TO_TXN,
            lambda version: transaction_requests.encode_add_offsets(version, name, *producer, group),
            take_added,
            (KeyType.TRANSACTION, name),
        )
        return [record.after, record]

    def _fetch(self, answer: _StepAnswer, operation: ops.FetchOffsets | ops.FetchStableOffsets) -> list[Call]:
        answer.result = {}
        if operation.keys:
            groups: dict[str, list[TopicPartition]] = {}
            for key in operation.keys:
                groups.setdefault(key.group, []).append(key.partition)
            stable = isinstance(operation, ops.FetchStableOffsets)
            return [self._fetch_group(answer, group, keys, stable=stable) for group, keys in groups.items()]
        assert isinstance(operation, ops.FetchOffsets)
        calls = [self._fetch_group(answer, group, None) for group in operation.groups]
        for call in calls:
            recorded = (record for record in self.calls if record.api == apis.TXN_OFFSET_COMMIT)
            call.behind = next((record for record in recorded if record.key == call.key), None)
        return calls

    def _fetch_group(
        self,
        answer: _StepAnswer,
        group: str,
        partitions: list[TopicPartition] | None,
        *,
        stable: bool = False,
    ) -> Call:
        def take(call: Call, response: transaction_requests.OffsetFetchResponse) -> bool:
            if group not in response.groups:
                return self._again(call, _INCOMPLETE)
            code, offsets = response.groups[group]
            if code == kafka_errors.GROUP_ID_NOT_FOUND:
                return True  # the group has committed nothing
            errors = (offset.error_code for offset in offsets.values())
            code = code or next(filter(None, errors), kafka_errors.NONE)
            is_pending = code == kafka_errors.UNSTABLE_OFFSET_COMMIT
            if is_pending:
                call.give_up_ms = min(call.give_up_ms, self._clock_ms() + _PENDING_PATIENCE_MS)
            if not (is_pending and self._clock_ms() >= call.give_up_ms) and not self._judge(call, code):
                return False
            answer.result |= {
                ops.OffsetKey(group, partition): None if offset.error_code else offset.metadata
                for partition, offset in offsets.items()
                if offset.offset >= 0 or offset.error_code
            }
            return True

        # Such a group has offsets of one topic, or of two topics if jobs have changed their topic.
        known = max((count for count, _ in self._partitions.values()), default=0)
        return Call(
            apis.OFFSET_FETCH,
            lambda version: transaction_requests.encode_offset_fetch(
                version, group, partitions, stable=stable
            ),
            take,
            (KeyType.GROUP, group),
            asked=2 * (2 * known if partitions is None else len(partitions)),
        )

    def _describe(self, answer: _StepAnswer, name: str, *, once_ended: bool) -> Call:
        def take(call: Call, response: transaction_requests.DescribeTransactionsResponse) -> bool:
            transaction = response.transactions.get(name)
            if transaction is None:
                return self._again(call, _INCOMPLETE)
            if transaction.error_code == kafka_errors.TRANSACTIONAL_ID_NOT_FOUND:
                return True
            if not self._judge(call, transaction.error_code):
                return False
            if transaction.producer_epoch > ops.LAST_EPOCH and transaction.state.startswith(_PREPARED):
                # The end has chosen the next producer id, which is not shown before the end is complete.
                return self._again(call, f"'{name}' is about to get another producer id")
            if once_ended and transaction.state.startswith(_PREPARED):
                return self._again(call, f"the transaction of '{name}' is being ended")
            producer = ops.ProducerEpoch(transaction.producer_id, transaction.producer_epoch)
            answer.result[name] = ops.Described(
                transaction.state,
                producer,
                transaction.started_ms,
                transaction.partitions,
                self.protocol == PROTOCOL_2,
            )
            return True

        return Call(
            apis.DESCRIBE_TRANSACTIONS,
            lambda version: transaction_requests.encode_describe_transactions(version, (name,)),
            take,
            (KeyType.TRANSACTION, name),
        )

    def _list(self, answer: _StepAnswer, operation: ops.ListOpen | ops.ListIds) -> list[Call]:
        states: tuple[str, ...] = ()
        pattern = ops.ANY_ID_PATTERN
        if isinstance(operation, ops.ListOpen):
            states, pattern = (ops.OPEN,), ops.task_id_pattern(operation.prefix)
            # Under protocol 1 ids that are not in use also have the state NO_TRANSACTION.
            if self.protocol == PROTOCOL_2:
                states = (ops.OPEN, ops.NO_TRANSACTION)
        answer.result = []

        def take(call: Call, response: transaction_requests.ListTransactionsResponse) -> bool:
            if not self._judge(call, response.error_code):
                return False
            answer.result += [name for name in response.ids if re.match(pattern, name)]
            return True

        give_up_ms = self._clock_ms() + _LIST_PATIENCE_MS
        return [
            Call(
                apis.LIST_TRANSACTIONS,
                lambda version: transaction_requests.encode_list_transactions(version, states, pattern),
                take,
                node=node,
                timeout_ms=_NODE_TIMEOUT_MS,
                give_up_ms=give_up_ms,
            )
            for node in self.nodes
        ]
