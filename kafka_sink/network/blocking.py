"""Requests of a step, sent from the caller's thread, which waits until all are answered.

It finds brokers and coordinators, and repeats requests whose response was lost or has an error that may pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from kafka_sink import kafka_errors
from kafka_sink.activity import WAIT_LISTENER
from kafka_sink.clock import RANDOM, ExponentialBackoff, monotonic_ms
from kafka_sink.errors import ConfigurationError, DeliveryError, is_final
from kafka_sink.model import Node
from kafka_sink.network import apis, requests, transaction_requests
from kafka_sink.network.broker_connection import BrokerConnection
from kafka_sink.network.broker_protocol import OnResponse, Request
from kafka_sink.network.client import NetworkClient
from kafka_sink.options import SinkOptions

GROUP_KEY, TRANSACTION_KEY = True, False
_MAX_POLL_MS = 100.0
_NODE_TIMEOUT_MS = 3000.0
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


# What a broker is asked to do.
_PURPOSES: Mapping[int, str] = {
    apis.METADATA: "describe the cluster",
    apis.CREATE_TOPICS: "create the topic",
    apis.INIT_PRODUCER_ID: "begin a transaction",
    apis.FIND_COORDINATOR: "name the coordinator of a transaction",
    apis.OFFSET_FETCH: "tell what was committed",
    apis.TXN_OFFSET_COMMIT: "record the decision",
    apis.END_TXN: "end a transaction",
    apis.LIST_TRANSACTIONS: "list open transactions",
    apis.DESCRIBE_TRANSACTIONS: "describe transactions",
}


def awaited(broker: Node | None, api: int) -> str:
    """Which broker is waited for, and what it is to do; None: not known yet."""
    who = f"broker {broker.id} ({broker.host}:{broker.port})" if broker and broker.id >= 0 else "a broker"
    return f"{who} to {_PURPOSES.get(api, f'answer {apis.APIS[api].name}')}"


@dataclass(slots=True, eq=False)
class Call:
    """One request of an operation. ``key`` names its coordinator; without one it goes to ``node``.

    ``encode`` makes its body of a version. ``take`` gets the call itself and its response, and says whether
    that is final.
    """

    api: int
    encode: Callable[[int], bytes]
    take: Callable[[Call, Any], bool]
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
    behind: Call | None = None
    # A call of the same step that has to be done before this one is sent.
    after: Call | None = None


@dataclass(slots=True)
class Step:
    """The operations of one step: calls that are not done, and the results so far."""

    results: list[Any]
    calls: list[Call] = field(default_factory=list)


class BlockingCalls:
    """One thread at a time. ``final`` are error codes that are an answer, ``advice`` is what to do about
    others."""

    final: ClassVar[frozenset[int]] = frozenset()
    advice: ClassVar[Mapping[int, str]] = {}

    def __init__(
        self,
        options: SinkOptions,
        network: NetworkClient | None = None,
        clock_ms: Callable[[], float] = monotonic_ms,
    ) -> None:
        self._options = options
        self._clock_ms = clock_ms
        self._network = network or NetworkClient(options, clock_ms)
        self._network.on_disconnected = self._on_disconnected
        backoff_ms = min(options.retry_backoff_ms, 20)
        self._backoff = ExponentialBackoff(backoff_ms, options.retry_backoff_max_ms, RANDOM.random)
        self._coordinators: dict[tuple[bool, str], int] = {}
        self._nodes: dict[int, Node] = {}
        # Each with the time of the response.
        self._partitions: dict[str, tuple[int, float]] = {}
        self._asked_nodes = False
        # Which broker was asked for coordinators last.
        self._asked_node: int | None = None
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
        self._allowed = ""
        self._step = Step([])
        self._last_error = "no broker responded"

    def close(self) -> None:
        self._network.close()

    def _versions(self, _api: int) -> tuple[int, int] | None:
        """Those to choose from, where these are not all."""
        return None

    def _require(self, connection: BrokerConnection) -> None:
        """Raise BrokerVersionError for a broker that is not enough."""

    def _finish(self, step: Step) -> None:
        if self._ahead:
            now_ms = self._clock_ms()
            for node in self._nodes:
                self._is_ready(node, now_ms)
        self._step = step
        since_ms = self._clock_ms()
        while step.calls:
            now_ms = self._clock_ms()
            if now_ms > self._deadline_ms:
                self._give_up(step)
            self._leave_brokers_out(step, now_ms)
            self._look_up(step, now_ms)
            wait = self._send_due(step, now_ms)
            self._network.poll(wait, self._clock_ms())
            WAIT_LISTENER.get()(partial(self._awaited, step), since_ms, self._deadline_ms)

    def _awaited(self, step: Step) -> str:
        """Which broker is waited for, and what it is to do."""
        call = next((one for one in step.calls if one.is_sent), next(iter(step.calls), None))
        if call is None:
            return "brokers"
        node = call.node if call.key is None else self._coordinators.get(call.key)
        api = call.api
        if node is None:
            node, api = self._asked_node, apis.FIND_COORDINATOR
        return awaited(None if node is None else self._nodes.get(node), api)

    def _give_up(self, step: Step) -> None:
        reasons = sorted({call.last_error for call in step.calls if call.last_error}) or [self._last_error]
        what = f"{apis.APIS[step.calls[0].api].name} did not succeed"
        raise self._out_of_time(what, f"{'; '.join(reasons)} (brokers: {self._network.describe_brokers()})")

    def _allow(self, timeout_ms: float, bound: str) -> None:
        """All that is asked until the next one has so long. ``bound``: the option that says so, or ""."""
        self._deadline_ms = self._clock_ms() + timeout_ms
        self._allowed = f"{timeout_ms / 1000:g} s" + (f", the time allowed by {bound}" if bound else "")

    def _out_of_time(self, what: str, why: str) -> DeliveryError:
        return DeliveryError(f"{what} within {self._allowed}: {why}")

    def _send_due(self, step: Step, now_ms: float) -> float:
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
                    timeout = min(timeout, _NODE_TIMEOUT_MS)
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
        return connection.api_version(api, self._versions(api))

    def _on_disconnected(self, node_id: int, cause: Exception, *_: object) -> None:
        self._last_error = str(cause)
        self._forget(node_id)
        if is_final(cause):
            raise cause

    def _leave_brokers_out(self, step: Step, now_ms: float) -> None:
        """Lists do not wait for a broker that is gone or hangs: others soon list its transactions."""
        for call in [one for one in step.calls if one.key is None and not one.is_sent]:
            if call.node in self._nodes and now_ms < call.give_up_ms:
                continue
            if call.give_up_ms < math.inf:
                step.calls.remove(call)
                self.left_out.add(-1 if call.node is None else call.node)
            else:
                call.node = next(iter(self._nodes))

    def _on_failure(self, call: Call, cause: Exception, *_: object) -> None:
        self._last_error = str(cause)
        self._again(call, str(cause))

    def _on_failed_look_up(self, cause: Exception, *_: object) -> None:
        self._last_error = str(cause)
        self._asked_nodes = False
        self._asked_coordinators.clear()
        self._back_off()

    def _on_response(self, call: Call, response: Any, _: float) -> None:
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
                self._partitions[topic.name] = len(topic.partitions), self._clock_ms()
        self._nodes = {node.id: node for node in response.update.nodes}
        known = self._coordinators.items()
        self._coordinators = {key: node for key, node in known if node in self._nodes}
        self._network.set_addresses(self._nodes.values())

    def _again(self, call: Call, reason: str, *, elsewhere: bool = False) -> bool:
        """To be sent once more; false, as its operation is not done."""
        call.attempts += 1
        call.is_sent = False
        call.last_error = reason
        call.not_before_ms = self._clock_ms() + self._backoff.delay_ms(call.attempts)
        if elsewhere and call.key is not None:
            self._coordinators.pop(call.key, None)
        return False

    def _judge(self, call: Call, code: int) -> bool:
        """Whether a response is final; false if the request must be repeated. Raises for a hopeless one."""
        if code == kafka_errors.NONE or code in self.final:
            return True
        name = kafka_errors.error_of(code).name
        if code in _COORDINATOR_MOVED:
            return self._again(call, name, elsewhere=True)
        if code in _MAY_PASS:
            return self._again(call, name)
        advice = self.advice.get(code)
        what = f"{apis.APIS[call.api].name} failed: {kafka_errors.error_of(code).label}"
        if advice:
            raise ConfigurationError(f"{what}; {advice}")
        raise DeliveryError(what)

    # -- brokers and coordinators -----------------------------------------------------------------

    def _connect(self) -> None:
        """Connect to the bootstrap addresses, until a broker has said which brokers there are."""
        self._step = Step([])
        since_ms = self._clock_ms()
        while not self._nodes:
            now_ms = self._clock_ms()
            if now_ms > self._deadline_ms:
                raise self._out_of_time("no broker responded", self._network.describe_brokers())
            self._network.poll(self._ask_nodes(now_ms), self._clock_ms())
            WAIT_LISTENER.get()(self._any_broker, since_ms, self._deadline_ms)

    def _any_broker(self) -> str:
        return f"any of the brokers {self._network.describe_brokers()}"

    def _ask_nodes(self, now_ms: float) -> float:
        if self._asked_nodes or now_ms < self._not_before_ms:
            return _MAX_POLL_MS
        connection = self._any_connection(now_ms)
        if connection is None:
            return 10.0
        self._require(connection)
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

    def _look_up(self, step: Step, now_ms: float) -> None:
        """Ask for coordinators that are not known: one request for each kind of key."""
        keys = dict.fromkeys([*(call.key for call in step.calls if call.key), *self._ahead])
        missing = [key for key in keys if key not in self._coordinators]
        for of_groups in (TRANSACTION_KEY, GROUP_KEY):
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
            self._asked_node = connection.node.id
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
                advice = self.advice.get(found.error_code, found.error_message or "")
                raise ConfigurationError(f"'{name}' may not be used: {reason}; {advice}")
        if is_new:
            self._network.set_addresses(self._nodes.values())

    def _back_off(self) -> None:
        self._failures += 1
        self._not_before_ms = self._clock_ms() + self._backoff.delay_ms(min(self._failures, 6))

    def _forget(self, node_id: int) -> None:
        """A broker is gone, so its coordinators may have moved, and there may be new brokers."""
        self._coordinators = {key: node for key, node in self._coordinators.items() if node != node_id}
        self._asked_nodes = False
        self._back_off()
        if node_id in self._nodes and len(self._nodes) > 1:
            self._ask_nodes(max(self._clock_ms(), self._not_before_ms))
