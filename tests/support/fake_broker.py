"""A scripted Kafka cluster in this process, for faults that no real broker produces on demand.

It speaks ApiVersions, Metadata, Produce, InitProducerId, CreateTopics of one topic, DescribeConfigs of one
broker, and client metrics where ``versions`` offers them, on real sockets of 127.0.0.1, the most through
kafka-python's codecs. Each request takes the next scripted ``Reply`` of its API, and the right response once
there is none.
Batches are checked as a real broker does (``fake_log``), so a lost, doubled or reordered batch shows.

What it leaves out: replication and elections (leaders move when a test says so), acks other than "appended",
the content of batches (records are counted by their header, never decompressed), timestamps and log append
time, retention, quotas, authorization, TLS, SASL, transactions, Fetch and everything else a consumer needs,
more than one request at a time per connection, and limits on the size of a request.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from kafka.protocol.admin import DescribeConfigsRequest
from kafka.protocol.admin.topics import CreateTopicsRequest
from kafka.protocol.metadata import ApiVersionsRequest, MetadataRequest
from kafka.protocol.producer import InitProducerIdRequest, ProduceRequest

from tests.support.fake_log import MAX_MESSAGE_BYTES, RecordBatch
from tests.support.fake_replies import OK, Refuse, Reply
from tests.support.fake_state import (
    API_VERSIONS,
    CREATE_TOPICS,
    DESCRIBE_CONFIGS,
    INIT_PRODUCER_ID,
    METADATA,
    PRODUCE,
    UNSUPPORTED_VERSION,
    VERSIONS,
    FakeState,
    framed,
)
from tests.support.ports import HeldPort
from tests.support.telemetry_messages import GET_SUBSCRIPTIONS, PUSH, TelemetryRequest, Wanted

__all__ = [
    "API_VERSIONS",
    "CREATE_TOPICS",
    "DESCRIBE_CONFIGS",
    "INIT_PRODUCER_ID",
    "METADATA",
    "PRODUCE",
    "REQUESTS",
    "FakeCluster",
    "Received",
]

REQUESTS: dict[int, Any] = {
    PRODUCE: ProduceRequest,
    METADATA: MetadataRequest,
    API_VERSIONS: ApiVersionsRequest,
    INIT_PRODUCER_ID: InitProducerIdRequest,
    CREATE_TOPICS: CreateTopicsRequest,
    DESCRIBE_CONFIGS: DescribeConfigsRequest,
    GET_SUBSCRIPTIONS: TelemetryRequest,
    PUSH: TelemetryRequest,
}


@dataclass(frozen=True)
class Received:
    """One request as it arrived; ``body`` is kafka-python's object, ``batches`` the batches of a Produce
    request."""

    node_id: int
    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None
    body: Any
    batches: tuple[RecordBatch, ...] = ()


@dataclass
class _Listener:
    id: int
    held: HeldPort
    listener: socket.socket
    connections: set[socket.socket] = field(default_factory=set)
    thawed: threading.Event = field(default_factory=threading.Event)
    running: bool = True


class FakeCluster(AbstractContextManager["FakeCluster"]):
    """Brokers with ids 0 .. brokers-1; a context manager. Methods may be called from any thread."""

    def __init__(
        self,
        topics: Mapping[str, int] | None = None,
        brokers: int = 1,
        versions: Mapping[int, tuple[int, int]] | None = None,
        max_message_bytes: int | Mapping[str, int] = MAX_MESSAGE_BYTES,
        cluster_id: str = "fake",
        without: Collection[int] = (),
    ) -> None:
        """``without``: APIs that these brokers lack."""
        self.lock = threading.RLock()  # guards all below but the threads and the closed flag
        self.requests: list[Received] = []
        self._scripts: dict[tuple[int, int | None], deque[Reply]] = defaultdict(deque)
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        self._nodes = [self._listen(node_id, HeldPort()) for node_id in range(brokers)]
        ports = [node.held.number for node in self._nodes]
        offered = {
            api: found for api, found in {**VERSIONS, **(versions or {})}.items() if api not in without
        }
        self._state = FakeState(ports, offered, max_message_bytes, cluster_id)
        for name, partitions in (topics or {}).items():
            self.create_topic(name, partitions)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closed.set()
        for node in self._nodes:
            self.stop(node.id)
            node.thawed.set()
            node.held.close()
        for thread in self._threads:
            thread.join(10)

    # -- methods with which a test looks at the cluster -----------------------------------------------

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(f"127.0.0.1:{node.held.number}" for node in self._nodes)

    def port(self, node_id: int) -> int:
        """A broker's port; it stays over stop and start."""
        return self._nodes[node_id].held.number

    def received(self, api_key: int, node_id: int | None = None) -> list[Received]:
        with self.lock:
            return [r for r in self.requests if r.api_key == api_key and node_id in (None, r.node_id)]

    def connections(self) -> int:
        with self.lock:
            return sum(len(node.connections) for node in self._nodes)

    def batches(self, topic: str, partition: int) -> list[RecordBatch]:
        with self.lock:
            return list(self._state.topics[topic].logs[partition].batches)

    # -- methods with which a test changes the cluster ------------------------------------------------

    def script(self, api_key: int, *replies: Reply, node_id: int | None = None) -> None:
        """Answer the next requests of this API with these replies, one each; only on that broker if it is
        given."""
        with self.lock:
            self._scripts[api_key, node_id].extend(replies)

    def want_metrics(self, wanted: Wanted) -> None:
        with self.lock:
            self._state.wanted = wanted

    def zone(self, client_id: str, node_id: int) -> None:
        """This broker leads all partitions for this client; each broker of a zone takes rows for them."""
        with self.lock:
            self._state.zones[client_id] = node_id

    def advertise(self, *ports: int) -> None:
        """Let metadata contain these addresses instead of the addresses on which the brokers listen."""
        with self.lock:
            self._state.ports = list(ports)

    def create_topic(self, name: str, partitions: int) -> None:
        """Create or recreate a topic: a new id, empty logs, epochs from 0. Leaders go round the brokers."""
        with self.lock:
            self._state.create_topic(name, partitions)

    def add_partitions(self, name: str, partitions: int) -> None:
        """Add partitions up to this number; brokers report them at once."""
        with self.lock:
            self._state.add_partitions(name, partitions)

    def delete_topic(self, name: str) -> None:
        with self.lock:
            del self._state.topics[name]

    def move_leader(self, topic: str, partition: int, node_id: int) -> None:
        """Move the leader, with the next epoch."""
        with self.lock:
            leaders = self._state.topics[topic].leaders
            leaders[partition] = (node_id, leaders[partition][1] + 1)

    def disconnect(self, node_id: int) -> None:
        with self.lock:
            open_now = list(self._nodes[node_id].connections)
        for connection in open_now:
            _reset(connection)

    def stop(self, node_id: int) -> None:
        """Let the broker refuse connections, and reset its open ones."""
        node = self._nodes[node_id]
        with self.lock:
            node.running = False
        with contextlib.suppress(OSError):
            node.listener.shutdown(socket.SHUT_RDWR)  # wakes accept; close alone does not
        node.listener.close()
        self.disconnect(node_id)

    def start(self, node_id: int) -> None:
        self._nodes[node_id] = self._listen(node_id, self._nodes[node_id].held)

    def freeze(self, node_id: int) -> None:
        """Reads no further request until thawed; connections stay open and new ones are taken."""
        self._nodes[node_id].thawed.clear()

    def thaw(self, node_id: int) -> None:
        self._nodes[node_id].thawed.set()

    # -- sockets --------------------------------------------------------------------------------------

    def _listen(self, node_id: int, held: HeldPort) -> _Listener:
        node = _Listener(node_id, held, held.listen())
        node.thawed.set()
        self._spawn(self._accept, node)
        return node

    def _spawn(self, target: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, name="fake-broker", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, node: _Listener) -> None:
        while True:
            try:
                connection, _ = node.listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self.lock:
                if not node.running:
                    connection.close()
                    return
                node.connections.add(connection)
            self._spawn(self._serve, node, connection)

    def _serve(self, node: _Listener, connection: socket.socket) -> None:
        try:
            while not self._closed.is_set():
                payload = _read_frame(connection)
                node.thawed.wait()
                if payload is None or not self._handle(node, connection, payload):
                    return
        except OSError:
            pass  # reset by either side: tests do that
        finally:
            with self.lock:
                node.connections.discard(connection)
            connection.close()

    # -- requests -------------------------------------------------------------------------------------

    def _handle(self, node: _Listener, connection: socket.socket, payload: bytes) -> bool:
        """False if the connection must be closed."""
        api_key, version, correlation = struct.unpack_from(">hhi", payload)
        low, high = self._state.versions.get(api_key, (0, -1))
        if api_key not in REQUESTS or not low <= version <= high:
            if api_key != API_VERSIONS:
                return False  # as a real broker does
            connection.sendall(self._refused_versions(correlation))
            return True
        request = REQUESTS[api_key].decode(payload, version=version, header=True)
        with self.lock:
            reply = self._next_reply(api_key, node.id)
            batches = () if api_key != PRODUCE else self._state.parse_batches(request)
            client_id = request.header.client_id
            self.requests.append(
                Received(node.id, api_key, version, correlation, client_id, request, batches)
            )
            if isinstance(reply, Refuse):
                return False
            response = self._state.answer(node.id, api_key, version, request, reply)
        frame = framed(response, correlation)
        if reply.delay_ms:
            self._closed.wait(reply.delay_ms / 1000)
        if reply.mangle is not None:
            frame = reply.mangle(frame)
        without_response = api_key == PRODUCE and request.acks == 0
        if not reply.silent and not without_response and frame:
            connection.sendall(frame)
        return not reply.disconnect

    def _next_reply(self, api_key: int, node_id: int) -> Reply:
        for key in ((api_key, node_id), (api_key, None)):
            if self._scripts[key]:
                return self._scripts[key].popleft()
        return OK

    def _refused_versions(self, correlation: int) -> bytes:
        """KIP-511: version 0's format, whatever was asked."""
        return framed(self._state.api_versions(0, None, Reply(error=UNSUPPORTED_VERSION)), correlation)


def _read_frame(connection: socket.socket) -> bytes | None:
    head = _read_exactly(connection, 4)
    return None if head is None else _read_exactly(connection, int.from_bytes(head, "big"))


def _read_exactly(connection: socket.socket, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        piece = connection.recv(min(count - len(data), 1 << 20))
        if not piece:
            return None
        data += piece
    return bytes(data)


def _reset(connection: socket.socket) -> None:
    """A TCP reset, as from a peer that died; shutdown wakes the thread that reads."""
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.shutdown(socket.SHUT_RDWR)
