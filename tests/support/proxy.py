"""A programmable TCP proxy in front of a broker, and one in front of each broker of a cluster.

    with ProxyCluster(cluster3.bootstrap_servers) as proxies:
        proxies[0].swallow(PRODUCE)          # delivered, and the client never learns of it
        write(bootstrap_servers=proxies.bootstrap_servers)
        assert proxies.requests[METADATA] < 5

Clients find brokers by the addresses in Metadata and FindCoordinator responses, so the proxy rewrites them
there (and in the endpoints of Produce responses, KIP-951) to those of the proxies: the broker needs no
setting and the brokers talk to each other directly.

It leaves out: addresses in DescribeCluster responses, encrypted connections, and IPv6.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from kafka.protocol.metadata import FindCoordinatorResponse, MetadataResponse
from kafka.protocol.producer import ProduceResponse

from tests.support.ports import HeldPort

PRODUCE, METADATA, FIND_COORDINATOR, API_VERSIONS, INIT_PRODUCER_ID = 0, 3, 10, 18, 22
REQUEST, RESPONSE = "request", "response"
_FIRST_PRODUCE_WITH_ENDPOINTS = 10
_PIECE = 64 * 1024
_RESET = struct.pack("ii", 1, 0)

Address = tuple[str, int]


class _Cut(Exception):
    """This connection ends now."""


@dataclass(eq=False)
class _Pair:
    """A client's connection and the one to the broker that belongs to it."""

    client: socket.socket
    broker: socket.socket
    # correlation id -> (api key, version) of requests seen and not answered; both pumps use it.
    asked: dict[int, tuple[int, int]] = field(default_factory=dict)

    def reset(self) -> None:
        """Ends both sides with a TCP reset; wakes the pumps."""
        for side in (self.client, self.broker):
            with contextlib.suppress(OSError):
                side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                side.shutdown(socket.SHUT_RDWR)


def frames(received: bytearray) -> Iterator[bytes]:
    """Takes whole messages, their lengths included, out of what was received."""
    while len(received) >= 4 and len(received) >= (size := int.from_bytes(received[:4], "big") + 4):
        yield bytes(received[:size])
        del received[:size]


class Proxy(AbstractContextManager["Proxy"]):
    """Forwards 127.0.0.1:``port`` to ``target``, and counts requests by API key; a context manager.

    Faults are set from any thread.
    """

    def __init__(self, target: Address) -> None:
        self.target = target
        self.rewrite: Mapping[Address, Address] = {}
        self.requests: Counter[int] = Counter()
        self._lock = threading.Lock()  # guards counts, rules and _pairs
        self._swallow: Counter[int] = Counter()
        self._cut_after: dict[str, int] = {}
        self._delay_ms = 0.0
        self._trickle = (0, 0.0)
        self._thawed = {REQUEST: threading.Event(), RESPONSE: threading.Event()}
        self.thaw()
        self._closed = threading.Event()
        self._pairs: set[_Pair] = set()
        self._threads: list[threading.Thread] = []
        self._listener: socket.socket | None = None
        self._held = HeldPort()
        self.port = self._held.number
        self.accept()

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._closed.set()
        self.thaw()
        self.refuse()
        self._held.close()
        self.cut()
        for thread in self._threads:
            thread.join(10)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    # -- faults -----------------------------------------------------------------------------------

    def cut(self) -> None:
        """Resets all connections that are open; new ones are taken."""
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            pair.reset()

    def cut_after(self, count: int, direction: str = REQUEST) -> None:
        """Lets ``count`` more bytes pass in that direction, over all connections, drops what follows and
        resets the connection that it happens on. Once."""
        with self._lock:
            self._cut_after[direction] = count

    def swallow(self, api_key: int, count: int = 1) -> None:
        """Delivers the next requests of this API, drops the responses and resets their connections."""
        with self._lock:
            self._swallow[api_key] += count

    def slow(self, delay_ms: float = 0.0, trickle_bytes: int = 0, trickle_ms: float = 0.0) -> None:
        """Holds every piece back for ``delay_ms``; passes at most ``trickle_bytes`` each ``trickle_ms``.

        Applies to both directions; without arguments all is fast again.
        """
        self._delay_ms, self._trickle = delay_ms, (trickle_bytes, trickle_ms)

    def freeze(self, *directions: str) -> None:
        """Forwards nothing (in these directions, else in both); connections stay open, new ones are taken."""
        for direction in directions or (REQUEST, RESPONSE):
            self._thawed[direction].clear()

    def thaw(self) -> None:
        for thawed in self._thawed.values():
            thawed.set()

    def refuse(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes accept; close alone does not
            listener.close()

    def accept(self) -> None:
        if self._listener is None:
            self._listener = self._held.listen()
            self._spawn(self._accept, self._listener)

    def receive_buffer(self, size: int) -> None:
        assert self._listener is not None
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)

    # -- pumps ------------------------------------------------------------------------------------

    def _spawn(self, target: Any, *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, name="fault-proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                broker = socket.create_connection(self.target)
            except OSError:
                client.close()
                continue
            pair = _Pair(client, broker)
            for side in (client, broker):
                side.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._pairs.add(pair)
            self._spawn(self._run, pair)

    def _run(self, pair: _Pair) -> None:
        downward = threading.Thread(target=self._guard, args=(self._responses, pair), daemon=True)
        downward.start()
        self._guard(self._questions, pair)
        downward.join()
        with self._lock:
            self._pairs.discard(pair)
        pair.client.close()
        pair.broker.close()

    def _guard(self, pump: Any, pair: _Pair) -> None:
        try:
            pump(pair)
        except (OSError, _Cut):
            pair.reset()  # the other pump must also end

    def _questions(self, pair: _Pair) -> None:
        received = bytearray()
        while data := pair.client.recv(_PIECE):
            # A request is recorded before its end is forwarded, so before there can be a response.
            received += data
            for frame in frames(received):
                api_key, version, correlation = struct.unpack_from(">hhi", frame, 4)
                pair.asked[correlation] = (api_key, version)
                with self._lock:
                    self.requests[api_key] += 1
            self._forward(pair.broker, data, REQUEST)
        pair.broker.shutdown(socket.SHUT_WR)

    def _responses(self, pair: _Pair) -> None:
        received = bytearray()
        while data := pair.broker.recv(_PIECE):
            received += data
            for frame in frames(received):
                self._forward(pair.client, self._on_response(pair, frame), RESPONSE)
        pair.client.shutdown(socket.SHUT_WR)

    def _on_response(self, pair: _Pair, frame: bytes) -> bytes:
        api_key, version = pair.asked.pop(int.from_bytes(frame[4:8], "big"))
        with self._lock:
            if self._swallow[api_key]:
                self._swallow[api_key] -= 1
                raise _Cut
        return rewritten(api_key, version, frame, self.rewrite)

    def _forward(self, sink: socket.socket, data: bytes, direction: str) -> None:
        step, pause_ms = self._trickle
        for at in range(0, len(data), step or len(data)):
            piece = data[at : at + (step or len(data))]
            wait_ms = self._delay_ms + (pause_ms if step else 0.0)
            if wait_ms:
                self._closed.wait(wait_ms / 1000)
            self._thawed[direction].wait()
            with self._lock:
                left = self._cut_after.get(direction)
                if left is not None and left > len(piece):
                    self._cut_after[direction] = left - len(piece)
                    left = None
                elif left is not None:
                    del self._cut_after[direction]
            if left is not None:
                # Half a message must arrive before the reset: shutdown first sends the queued bytes.
                sink.sendall(piece[:left])
                sink.shutdown(socket.SHUT_WR)
                self._closed.wait(0.05)
                raise _Cut
            sink.sendall(piece)


def rewritten(api_key: int, version: int, frame: bytes, addresses: Mapping[Address, Address]) -> bytes:
    """A response frame with brokers' addresses exchanged; unchanged if it contains none."""
    if api_key == METADATA and addresses:
        response = MetadataResponse.decode(frame[4:], version=version, header=True)
        nodes = response.brokers
    elif api_key == PRODUCE and addresses and version >= _FIRST_PRODUCE_WITH_ENDPOINTS:
        response = ProduceResponse.decode(frame[4:], version=version, header=True)
        nodes = response.node_endpoints
    elif api_key == FIND_COORDINATOR and addresses:
        response = FindCoordinatorResponse.decode(frame[4:], version=version, header=True)
        nodes = response.coordinators or [response]
    else:
        return frame
    if not nodes:
        return frame
    for node in nodes:
        node.host, node.port = addresses.get((node.host, node.port), (node.host, node.port))
    response.with_header(correlation_id=int.from_bytes(frame[4:8], "big"))
    return bytes(response.encode(header=True, framed=True))


class ProxyCluster(AbstractContextManager["ProxyCluster"]):
    """One Proxy in front of each of the ``bootstrap_servers``, which must be all brokers of a cluster."""

    kind: type[Proxy] = Proxy

    def __init__(self, bootstrap_servers: str) -> None:
        self.proxies: list[Proxy] = []
        for entry in bootstrap_servers.split(","):
            host, _, port = entry.rpartition(":")
            self.proxies.append(self.kind((host, int(port))))
        addresses = {proxy.target: ("127.0.0.1", proxy.port) for proxy in self.proxies}
        for proxy in self.proxies:
            proxy.rewrite = addresses

    def __exit__(self, *_: object) -> None:
        for proxy in self.proxies:
            proxy.close()

    def __getitem__(self, index: int) -> Proxy:
        return self.proxies[index]

    def __iter__(self) -> Iterator[Proxy]:
        return iter(self.proxies)

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(proxy.address for proxy in self.proxies)

    @property
    def requests(self) -> Counter[int]:
        return sum((proxy.requests for proxy in self.proxies), Counter())
