"""A proxy in a process of its own whose responses come late, as from brokers that write to remote storage.

    python -m benchmarks.slow_responses HOST:PORT MILLISECONDS

It takes as many requests at once as the client sends: a delay, not a throttle. It ends with its standard
input.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

from benchmarks.surroundings import environment
from tests.support.proxy import RESPONSE, Proxy


class LateProxy(Proxy):
    """Passes responses on ``delay_s`` after they came."""

    def __init__(self, target: tuple[str, int], delay_s: float) -> None:
        self._delay_s = delay_s
        self._lines: dict[socket.socket, SimpleQueue[tuple[float, bytes]]] = {}
        super().__init__(target)
        self.rewrite = {target: ("127.0.0.1", self.port)}

    def _forward(self, sink: socket.socket, data: bytes, direction: str) -> None:
        if direction != RESPONSE:
            sink.sendall(data)
            return
        line = self._lines.get(sink)
        if line is None:
            line = self._lines[sink] = SimpleQueue()
            self._spawn(self._deliver, sink, line)
        line.put((time.monotonic() + self._delay_s, data))

    def _deliver(self, sink: socket.socket, line: Any) -> None:
        with contextlib.suppress(OSError):
            while True:
                due, data = line.get()
                time.sleep(max(0.0, due - time.monotonic()))
                sink.sendall(data)


@contextlib.contextmanager
def slow_responses(bootstrap: str, delay_ms: float) -> Iterator[str]:
    """A bootstrap address whose broker responds ``delay_ms`` late; the broker's own address if that is 0."""
    if not delay_ms:
        yield bootstrap
        return
    command = [sys.executable, "-m", "benchmarks.slow_responses", bootstrap, str(delay_ms)]
    with subprocess.Popen(
        command, env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.stdin.close()


def main() -> None:
    host, _, port = sys.argv[1].rpartition(":")
    proxy = LateProxy((host, int(port)), float(sys.argv[2]) / 1000)
    print(proxy.address, flush=True)
    done = threading.Thread(target=sys.stdin.read)
    done.start()
    done.join()


if __name__ == "__main__":
    main()
