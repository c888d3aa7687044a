"""The client that runs protocol steps, over a network that a test scripts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from kafka_sink import kafka_errors
from kafka_sink.clock import WAIT_LISTENER
from kafka_sink.errors import BrokerVersionError, ConfigurationError, DeliveryError
from kafka_sink.model import MetadataUpdate, Node, PartitionMetadata, TopicPartition
from kafka_sink.network import apis
from kafka_sink.network.blocking import KeyType
from kafka_sink.network.requests import MetadataResponse, ProducerIdResponse
from kafka_sink.network.transaction_requests import (
    CommittedOffset,
    CoordinatorsResponse,
    DescribeTransactionsResponse,
    FoundCoordinator,
    ListTransactionsResponse,
    OffsetFetchResponse,
    PartitionErrors,
    TransactionDescription,
)
from kafka_sink.network.wire import ErrorResponse
from kafka_sink.transactions.client import PROTOCOL_2, KnownBrokers, TransactionClient
from kafka_sink.transactions.operations import (
    EndTransaction,
    Failed,
    FetchOffsets,
    ListOpen,
    OffsetKey,
    Operation,
    ProducerEpoch,
    RecordOffsets,
    TransactionSteps,
    describe,
    fetch_offsets,
    fetch_stable_offsets,
    init_producer,
)
from tests.support import transaction_network
from tests.support.topic_metadata import topic_of
from tests.support.transaction_network import NODES, Connection


class Network(transaction_network.Network):
    """Brokers that answer at once; ``dead`` refuse connections, ``silent`` never answer. ``answers``: what
    the others say to requests other than those below, by broker and API; None: the connection is lost."""

    def __init__(self, answers: Callable[[int, int], Any] | None = None) -> None:
        super().__init__()
        self.dead: set[int] = set()
        self.silent: set[int] = set()
        # Of the topic "t", which each Metadata response has.
        self.partitions = 1
        self.unknown_until_ms = 0.0
        # A broker that has just started names none, itself included.
        self.empty_until_ms = 0.0
        self.described = 0
        self._answers = answers
        self._waiting: list[tuple[float, Any, int]] = []

    def is_ready(self, connection: Any, now_ms: float) -> bool:
        node = connection.node.id
        if node in self.dead:
            refused = ConnectionRefusedError("refused")
            self.happened.append(lambda: self.on_disconnected(node, refused, False, 0))
        return node not in self.dead

    def least_loaded(self, _now_ms: float) -> Any:
        usable = (one for node, one in self.connections.items() if node not in self.dead | self.silent)
        return next(usable, None)

    def send(self, connection: Any, request: Any, now_ms: float) -> None:
        node, api = connection.node.id, request.api_key
        if node in self.silent:
            self._waiting.append((now_ms + request.timeout_ms, request, node))
        elif api == apis.METADATA:
            self.respond(request, MetadataResponse(self._described()))
        elif api == apis.FIND_COORDINATOR:
            named = self.coordinators(node).items()
            found = {name: FoundCoordinator(NODES[number], 0, None) for name, number in named}
            self.respond(request, CoordinatorsResponse(found))
        elif api == apis.LIST_TRANSACTIONS:
            self.respond(request, ListTransactionsResponse(0, [f"p-task-{node}-0"]))
        elif (response := self.answer(node, api)) is not None:
            self.respond(request, response)
        else:
            self.lose(node, request)

    def _described(self) -> MetadataUpdate:
        self.described += 1
        alive = tuple(node for number, node in NODES.items() if number not in self.dead)
        if self.now_ms < self.empty_until_ms:
            self.now_ms += 1.0
            alive = ()
        if self.now_ms < self.unknown_until_ms:
            return MetadataUpdate(alive, (), {"t": kafka_errors.UNKNOWN_TOPIC_OR_PARTITION})
        partitions = tuple(PartitionMetadata("t", number) for number in range(self.partitions))
        return MetadataUpdate(alive, (topic_of("t", None, partitions),))

    def coordinators(self, _node: int) -> dict[str, int]:
        """Brokers by the names that they coordinate, as this broker says."""
        return dict.fromkeys(("g", "id", "p-driver"), 1)

    def answer(self, node: int, api: int) -> Any:
        assert self._answers is not None, f"API {api} of broker {node}"
        return self._answers(node, api)

    def poll(self, wait_ms: float, now_ms: float) -> int:
        count = super().poll(wait_ms, now_ms)
        for due, request, node in [one for one in self._waiting if one[0] <= self.now_ms]:
            self._waiting.remove((due, request, node))
            self.lose(node, request)
        return count


@pytest.fixture
def network() -> Network:
    return Network()


def connected(network: Network) -> TransactionClient:
    client = network.client()
    assert client.run(listing(), 60_000) == {"p-task-1-0", "p-task-2-0", "p-task-3-0"}
    network.now_ms = 0.0
    return client


def step(*operations: Operation) -> TransactionSteps[tuple[Any, ...]]:
    return (yield operations)


def listing() -> TransactionSteps[set[str]]:
    (names,) = yield (ListOpen("p"),)
    return set(names)


def test_a_list_waits_for_no_broker_that_left_and_a_moment_only_for_one_that_hangs(network: Network) -> None:
    """Catches: a commit failed, as the list was still to come from a broker that had left the cluster."""
    client = connected(network)
    network.dead = {2}
    assert client.run(listing(), 60_000) == {"p-task-1-0", "p-task-3-0"}
    assert network.now_ms < 1_000
    network = Network()
    client = connected(network)
    network.silent = {2}
    assert client.run(listing(), 60_000) == {"p-task-1-0", "p-task-3-0"}
    assert network.now_ms < 10_000
    assert client.left_out == {2}, "for people, who must know of it"
    network.silent = set()
    assert client.run(listing(), 60_000) == {"p-task-1-0", "p-task-2-0", "p-task-3-0"}
    assert not client.left_out


def test_a_broker_that_knows_no_brokers_yet_is_asked_again_after_a_while(network: Network) -> None:
    """Catches: one request right after the other until a broker that has just started knew some."""
    network.empty_until_ms = 500.0
    assert len(network.client().run(listing(), 60_000)) == 3
    assert network.described < 20


def test_brokers_that_lack_what_exactly_once_needs_are_refused_saying_so() -> None:
    """Catches: brokers that others wrote, with one of the APIs and without another (tansu)."""
    older = {apis.TXN_OFFSET_COMMIT: 3, apis.LIST_TRANSACTIONS: 1}
    for newest, missing in (
        (older, "TxnOffsetCommit has version 3 instead of 4"),
        ({apis.TXN_OFFSET_COMMIT: 4}, "ListTransactions is missing"),
    ):
        network = Network()
        for one in network.connections.values():
            one.protocol.features, one.newest = {}, newest
        with pytest.raises(BrokerVersionError, match=f"needs brokers of Apache Kafka 3.8 .*here {missing}"):
            network.client().run(listing(), 60_000)


def test_without_any_broker_a_step_ends_with_its_time_and_its_steps_are_told(network: Network) -> None:
    """Only they know what it means for a batch."""

    def steps() -> TransactionSteps[str]:
        try:
            yield from fetch_offsets("p-decision")
        except DeliveryError as error:
            return f"the batch may be there: {error}"
        raise AssertionError

    client = connected(network)
    network.silent = {1, 2, 3}
    with pytest.raises(DeliveryError, match=r"within 20 s: "):
        client.run(fetch_offsets("p-decision"), 20_000, "")
    with pytest.raises(DeliveryError, match=r"within 0\.5 s, the time allowed by kafka\.max\.block\.ms: "):
        client.run(fetch_offsets("p-decision"), 500, "kafka.max.block.ms")
    with pytest.raises(DeliveryError, match=r"within 1 s, the time allowed by kafka\.max\.block\.ms: "):
        client.partitions("other", 1_000, "kafka.max.block.ms")
    assert client.run(steps(), 20_000).startswith("the batch may be there: ")


def test_a_group_that_does_not_exist_has_no_offsets() -> None:
    """Catches: a prefix's first batch failed on brokers that know no group without offsets."""

    unknown = OffsetFetchResponse({"g": (kafka_errors.GROUP_ID_NOT_FOUND, {})})
    client = Network(lambda *_: unknown).client()
    assert client.run(fetch_offsets("g"), 60_000) == {}
    assert client.run(fetch_stable_offsets(OffsetKey("g", PLACE)), 60_000) == {}


class MovedBroker(Network):
    """The only broker of a cluster has another address than the client has learnt."""

    def __init__(self) -> None:
        super().__init__(lambda *_: OffsetFetchResponse({"g": (0, {})}))
        self.address = Node(1, "moved", 9)
        self.connections = {number: Connection(Node(number, "host", 1), 2) for number in (-1, 1)}

    def is_ready(self, connection: Any, now_ms: float) -> bool:
        self.dead = set() if connection.node.id < 0 or connection.node == self.address else {1}
        self.now_ms += len(self.dead)
        return super().is_ready(connection, now_ms)

    def least_loaded(self, _now_ms: float) -> Any:
        return self.connections[-1]

    def _described(self) -> MetadataUpdate:
        return MetadataUpdate((self.address,), ())

    def set_addresses(self, nodes: Iterable[Node]) -> None:
        for node in nodes:
            self.connections[node.id].node = node


def test_the_only_broker_is_found_again_at_another_address() -> None:
    """Catches: a commit asked at the address that planning had found until kafka.delivery.timeout.ms."""
    network = MovedBroker()
    client = network.client()
    client.learn(KnownBrokers((NODES[1],), {(KeyType.GROUP, "g"): 1}, PROTOCOL_2))
    assert client.run(fetch_offsets("g"), 2_000) == {}


class FormerCoordinator(Network):
    """Broker 1 was an id's coordinator and takes itself for it still; broker 2 is. Offsets stay pending."""

    def coordinators(self, node: int) -> dict[str, int]:
        return dict.fromkeys(("g", "id"), 1 if node == 1 else 2)

    def answer(self, node: int, api: int) -> Any:
        if api == apis.OFFSET_FETCH:
            pending = CommittedOffset(-1, "", kafka_errors.UNSTABLE_OFFSET_COMMIT)
            return OffsetFetchResponse({"g": (0, {PLACE: pending})})
        return (
            ProducerIdResponse(kafka_errors.PRODUCER_FENCED, -1, -1)
            if node == 1
            else ProducerIdResponse(0, 1, 1)
        )


def test_a_coordinator_that_is_not_believed_is_asked_for_at_another_broker() -> None:
    """Catches: a broker that was frozen and replaced named itself again, and so the driver gave up."""
    network = FormerCoordinator()

    client, end = network.client(), EndTransaction("id", ProducerEpoch(1, 0), commit=True)
    assert client.run(step(end), 60_000) == (Failed("PRODUCER_FENCED"),)
    assert client.run(step(replace(end, afresh=True)), 60_000) == (ProducerEpoch(1, 1),)
    assert client.run(step(end), 60_000) == (ProducerEpoch(1, 1),)


def test_an_offset_that_stays_pending_is_said_to_be() -> None:
    """Catches: a run waited for a marker in a transaction that only it could end, until its bound."""
    network = FormerCoordinator()
    client = network.client()
    assert client.run(fetch_stable_offsets(OffsetKey("g", PLACE)), 60_000) == {OffsetKey("g", PLACE): None}
    assert network.now_ms < 5_000


def test_a_topic_that_is_created_again_with_fewer_partitions_is_asked_for_again(network: Network) -> None:
    """Catches: a query recorded progress for a partition that its topic had no more, until it ended."""
    network.partitions = 5
    client = connected(network)
    assert client.partitions("t", 60_000) == 5
    network.partitions = 2
    assert client.partitions("t", 60_000) == 5, "micro-batches that follow each other do not ask"
    network.now_ms += 300_001
    assert client.partitions("t", 60_000) == 2


def test_a_topic_just_created_is_asked_for_until_the_broker_knows_it(network: Network) -> None:
    """Catches: a job with topic.create=true refused, as one broker had not heard of the topic yet."""
    network.unknown_until_ms = 1_000.0
    client = connected(network)
    assert client.partitions("t", 60_000) == 1
    network.unknown_until_ms = math.inf
    network.now_ms = 400_000.0
    assert client.partitions("t", 60_000) == 0, "one that stays unknown is missing"
    assert 405_000 <= network.now_ms < 407_000


class Coordinators(Network):
    """Broker 1 was a group's coordinator, and learns between two requests that broker 2 is. Or brokers say
    that it is once more, when the connection to broker 2 is lost behind the first of two requests."""

    def __init__(self, coordinator: int = 1) -> None:
        super().__init__()
        self.coordinator = coordinator
        self.asked: list[tuple[int, int]] = []
        self._loses = coordinator == 2

    def coordinators(self, _node: int) -> dict[str, int]:
        return {"g": self.coordinator}

    def answer(self, node: int, api: int) -> Any:
        self.asked.append((node, api))
        if api == apis.OFFSET_FETCH:
            if self._loses:
                self._loses, self.coordinator = False, 1
                return None
            text = {1: "former", 2: "present"}[node]
            return OffsetFetchResponse({"g": (0, {PLACE: CommittedOffset(0, text, 0)})})
        if self.coordinator == 1:
            # Before it has appended anything.
            self.coordinator = 2
            return PartitionErrors({PLACE: kafka_errors.CONCURRENT_TRANSACTIONS})
        error = kafka_errors.NOT_COORDINATOR if node == 1 else kafka_errors.NONE
        return PartitionErrors({PLACE: error})


PLACE = TopicPartition("t", 0)


@pytest.mark.parametrize("first", [1, 2])
def test_offsets_fetched_behind_recorded_ones_are_of_the_coordinator_that_took_them(first: int) -> None:
    """Catches: a decision was checked against what a former coordinator reported."""
    network = Coordinators(first)
    record = RecordOffsets("id", ProducerEpoch(1, 0), "g", ((PLACE, "new"),))
    failed, found = network.client().run(step(record, FetchOffsets(("g",))), 60_000)
    assert failed is None
    assert found == {OffsetKey("g", PLACE): "present"}
    assert network.asked[-2:] == [(2, apis.TXN_OFFSET_COMMIT), (2, apis.OFFSET_FETCH)]


def test_describe_waits_while_an_id_gets_another_producer_id() -> None:
    """Catches: what an id still showed at its last epoch was taken for another driver's."""
    states = iter([("PrepareCommit", 7, 32_767), ("CompleteCommit", 1007, 0)])

    def answer(*_: int) -> DescribeTransactionsResponse:
        one = TransactionDescription(0, *next(states), -1, 60_000, 1)
        return DescribeTransactionsResponse({"p-driver": one})

    found = Network(answer).client().run(describe("p-driver"), 60_000)
    assert found["p-driver"].producer == ProducerEpoch(1007, 0)


def test_wait_listener_gets_the_awaited_broker_step_and_times(network: Network) -> None:
    """Catches: a minute of silence while a frozen broker is to begin the driver's transaction."""
    network.silent, heard = {1}, []
    client = network.client()
    token = WAIT_LISTENER.set(lambda awaited, *times: heard.append((awaited(), *times)))
    try:
        with pytest.raises(DeliveryError):
            client.run(init_producer("p-driver"), 60_000)
    finally:
        WAIT_LISTENER.reset(token)
    waits = [times for text, *times in heard if text == "broker 1 (host:1) to begin a transaction"]
    assert len(waits) > len(heard) / 2
    assert {until_ms for _, until_ms in waits} == {60_000.0}
    assert len({since_ms for since_ms, _ in waits}) == 1, "though its request was sent again"


class Forgetful(Network):
    """Brokers whose first response to each request leaves out what was asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[int] = []

    def answer(self, node: int, api: int) -> Any:
        self.asked.append(api)
        is_first = self.asked.count(api) == 1
        if api == apis.TXN_OFFSET_COMMIT:
            return PartitionErrors({} if is_first else {PLACE: kafka_errors.NONE})
        if api == apis.OFFSET_FETCH:
            groups = {} if is_first else {"g": (0, {PLACE: CommittedOffset(0, "decided", 0)})}
            return OffsetFetchResponse(groups)
        one = TransactionDescription(0, "Ongoing", 1, 0, -1, 60_000, 1)
        return DescribeTransactionsResponse({} if is_first else {"id": one})


def test_a_response_that_leaves_out_what_was_asked_for_says_nothing_of_it() -> None:
    """Catches: a decision taken for recorded, or for not there, as a broker did not name it."""
    network = Forgetful()
    client = network.client()
    record = RecordOffsets("id", ProducerEpoch(1, 0), "g", ((PLACE, "decided"),))
    assert client.run(step(record), 60_000) == (None,)
    assert client.run(fetch_offsets("g"), 60_000) == {OffsetKey("g", PLACE): "decided"}
    assert client.run(describe("id"), 60_000)["id"].state == "Ongoing"
    assert [network.asked.count(api) for api in dict.fromkeys(network.asked)] == [2, 2, 2]


def test_a_broker_that_does_not_name_the_coordinator_is_not_asked_as_fast_as_it_responds() -> None:
    asked: list[int] = []

    class Nameless(Network):
        def coordinators(self, node: int) -> dict[str, int]:
            asked.append(node)
            self.now_ms += 1.0
            return {"another": 1}

    with pytest.raises(DeliveryError, match="the coordinator of 'g' is not known: the response lacks"):
        Nameless().client().run(fetch_offsets("g"), 10_000)
    assert len(asked) < 50


@pytest.mark.parametrize("code", [kafka_errors.COORDINATOR_LOAD_IN_PROGRESS, kafka_errors.INVALID_REQUEST])
def test_requests_of_a_failed_step_are_not_repeated(code: int) -> None:
    """A task whose progress marker fails aborts over the same client."""
    refused = TopicPartition("t", 0)
    sent: list[int] = []

    def answer(_node: int, api: int) -> Any:
        sent.append(api)
        return ProducerIdResponse(0, 5, 2) if api == apis.END_TXN else PartitionErrors({refused: code})

    client, producer = connected(Network(answer)), ProducerEpoch(5, 1)
    with pytest.raises(DeliveryError, match="TxnOffsetCommit"):
        client.run(step(RecordOffsets("id", producer, "g", ((refused, "marker"),))), 500)
    sent.clear()
    assert client.run(step(EndTransaction("id", producer, commit=False)), 500) == (ProducerEpoch(5, 2),)
    assert sent == [apis.END_TXN]


@pytest.mark.parametrize("protocol", [1, 2])
def test_a_refused_record_is_not_sent_again_with_the_fetch_behind_it(protocol: int) -> None:
    """Catches: under protocol 1 offsets were sent for a transaction that the group had not been added to, and
    their answer replaced the refusal."""
    partition, fenced = TopicPartition("t", 0), kafka_errors.PRODUCER_FENCED
    sent: list[int] = []

    def answer(_node: int, api: int) -> Any:
        sent.append(api)
        if api == apis.OFFSET_FETCH:
            is_first = sent.count(api) == 1
            return OffsetFetchResponse({"g": (is_first * kafka_errors.COORDINATOR_LOAD_IN_PROGRESS, {})})
        if api == apis.ADD_OFFSETS_TO_TXN:
            return ErrorResponse(fenced)
        return PartitionErrors({partition: fenced})

    network = Network(answer)
    for connection in network.connections.values():
        connection.protocol.features["transaction.version"] = protocol
    record = RecordOffsets("id", ProducerEpoch(5, 1), "g", ((partition, "decision"),))
    results = connected(network).run(step(record, FetchOffsets(("g",))), 5_000)
    assert results == (Failed("PRODUCER_FENCED"), {})
    refused = apis.ADD_OFFSETS_TO_TXN if protocol == 1 else apis.TXN_OFFSET_COMMIT
    assert sent == [refused, apis.OFFSET_FETCH, apis.OFFSET_FETCH]


def test_an_id_that_is_being_taken_over_is_asked_for_again_and_a_topic_that_is_missing_is_not() -> None:
    codes = [kafka_errors.PRODUCER_FENCED, kafka_errors.NONE]
    partition = TopicPartition("t", 0)

    def answer(_node: int, api: int) -> Any:
        if api == apis.INIT_PRODUCER_ID:
            return ProducerIdResponse(codes.pop(0), 5, 2)
        return PartitionErrors({partition: kafka_errors.UNKNOWN_TOPIC_OR_PARTITION})

    client = connected(Network(answer))
    assert client.run(init_producer("id"), 500) == ProducerEpoch(5, 2)
    with pytest.raises(ConfigurationError, match=r"transaction\.progress\.topic"):
        client.run(step(RecordOffsets("id", ProducerEpoch(5, 2), "g", ((partition, "marker"),))), 500)


def test_started_steps_are_not_sent_again_and_known_brokers_are_not_looked_up() -> None:
    """Catches: a marker that waited for the rows, and tasks that looked up what planning had found."""
    sent: list[tuple[int, int]] = []

    def answer(node: int, api: int) -> PartitionErrors:
        sent.append((node, api))
        return PartitionErrors({PLACE: kafka_errors.NONE})

    network = Network(answer)
    first = connected(network)
    first.run(step(RecordOffsets("id", ProducerEpoch(5, 2), "g", ((PLACE, "marker"),))), 500)
    described = network.described
    client = network.client()
    client.learn(first.known)
    steps = step(RecordOffsets("id", ProducerEpoch(5, 2), "g", ((PLACE, "marker"),)))
    client.start(steps, 0, 500)
    assert sent == [(1, apis.TXN_OFFSET_COMMIT)] * 2
    assert client.run(steps, 500) == (None,)
    assert len(sent) == 2
    assert network.described == described


def test_a_client_that_learns_the_brokers_also_learns_their_protocol() -> None:
    """Catches: with protocol 1 each job's decision was refused, because its group was not added first."""
    sent: list[int] = []

    def answer(_node: int, api: int) -> Any:
        sent.append(api)
        return ErrorResponse(0) if api == apis.ADD_OFFSETS_TO_TXN else PartitionErrors({PLACE: 0})

    network = Network(answer)
    for connection in network.connections.values():
        connection.protocol.features["transaction.version"] = 1
    record = RecordOffsets("id", ProducerEpoch(5, 2), "g", ((PLACE, "decision"),))
    first = connected(network)
    first.run(step(record), 500)
    client = network.client()
    client.learn(first.known)
    assert client.run(step(record), 500) == (None,)
    assert sent == [apis.ADD_OFFSETS_TO_TXN, apis.TXN_OFFSET_COMMIT] * 2
