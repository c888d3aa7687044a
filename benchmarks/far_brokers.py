"""Proxies in a process of their own that make brokers seem far away: a delay, and no throttle.

    python -m benchmarks.far_brokers HOST:PORT[,HOST:PORT...]

Each direction of a connection is a delay line: bytes arrive half a round trip after they were sent, however
many follow them. The process prints the proxies' addresses, which clients also see in responses. Each line
``ROUND_TRIP_MS TAIL_MS`` on its standard input sets the delay from then on. If the tail is above 0, every
twentieth response of a connection arrives that long after its request, and later responses wait for it,
because brokers respond in order. The process ends with its standard input.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

from benchmarks.surroundings import environment
from tests.support.proxy import REQUEST, RESPONSE, Proxy, ProxyCluster

# One response in this many is late if there is a tail: 5 %.
TAIL_EVERY = 20
# The bytes of a delay line wait in the proxy. Without a large buffer the sender would wait for its thread.
_SOCKET_BYTES = 1 << 22


class FarProxy(Proxy):
    """Passes the bytes of both directions on late. Another thread may set the delay at any time."""

    def __init__(self, target: tuple[str, int]) -> None:
        self.round_trip_s = self.tail_s = 0.0
        self._lines: dict[tuple[socket.socket, str], SimpleQueue[tuple[float, bytes]]] = {}
        self._answered: Counter[socket.socket] = Counter()
        super().__init__(target)

    def _run(self, pair: Any) -> None:
        super()._run(pair)
        for end in ((pair.broker, REQUEST), (pair.client, RESPONSE)):
            if (line := self._lines.pop(end, None)) is not None:
                line.put((0.0, b""))
        del self._answered[pair.client]

    def _forward(self, sink: socket.socket, data: bytes, direction: str) -> None:
        delay_s = self.round_trip_s / 2
        if direction == RESPONSE and self.tail_s > 0:
            self._answered[sink] += 1
            if self._answered[sink] % TAIL_EVERY == 0:
                delay_s = self.tail_s - self.round_trip_s / 2
        line = self._lines.get((sink, direction))
        if line is None:
            line = self._lines[sink, direction] = SimpleQueue()
            sink.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SOCKET_BYTES)
            self._spawn(self._deliver, sink, line)
        line.put((time.monotonic() + delay_s, data))

    def _deliver(self, sink: socket.socket, line: Any) -> None:
        with contextlib.suppress(OSError):
            while (entry := line.get())[1]:
                due, data = entry
                time.sleep(max(0.0, due - time.monotonic()))
                sink.sendall(data)


class FarCluster(ProxyCluster):
    """A proxy in front of each broker."""

    kind = FarProxy

    def delay(self, round_trip_ms: float, tail_ms: float) -> None:
        for proxy in self.proxies:
            assert isinstance(proxy, FarProxy)
            proxy.round_trip_s, proxy.tail_s = round_trip_ms / 1000, tail_ms / 1000


class FarBrokers:
    """The process with the proxies. Clients connect to ``bootstrap_servers``."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._commands = process.stdin
        self.bootstrap_servers = process.stdout.readline().strip()

    def delay(self, round_trip_ms: float, tail_ms: float = 0.0) -> None:
        self._commands.write(f"{round_trip_ms} {tail_ms}\n")
        self._commands.flush()


@contextlib.contextmanager
def far_brokers(bootstrap: str, round_trip_ms: float = 0.0) -> Iterator[FarBrokers]:
    """Proxies in front of all brokers of a cluster."""
    command = [sys.executable, "-m", "benchmarks.far_brokers", bootstrap]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        try:
            proxies = FarBrokers(process)
            proxies.delay(round_trip_ms)
            yield proxies
        finally:
            process.stdin.close()


def main() -> None:
    cluster = FarCluster(sys.argv[1])
    print(cluster.bootstrap_servers, flush=True)
    for line in sys.stdin:
        round_trip_ms, tail_ms = map(float, line.split())
        cluster.delay(round_trip_ms, tail_ms)


if __name__ == "__main__":
    main()
