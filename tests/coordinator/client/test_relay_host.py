"""Workers that end with their task keep one connection, where a process beside Spark's daemon has it."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kafka_sink.coordinator.client import relay_host
from kafka_sink.coordinator.transport.address import CoordinatorAddress
from tests.support.coordinator_harness import eventually, serving

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kafka_sink.daemon forks on Linux only")
ROOT = Path(__file__).resolve().parents[3]
# What Spark's daemon does without reuse of workers: forks one for each task, some of which overlap.
DAEMON = """
import os, sys, time
from kafka_sink import daemon
from kafka_sink.clock import monotonic_ms
from kafka_sink.coordinator.client.executor_relay import ExecutorRelay
from kafka_sink.coordinator.transport.address import CoordinatorAddress, Rendezvous

address = CoordinatorAddress("127.0.0.1", Rendezvous({port}, {cluster!r}, {secret!r}))

def task(number):
    connection = ExecutorRelay(address, 20_000.0, monotonic_ms).connect()
    connection.send("echo", {{"n": number}}, monotonic_ms())
    connection.receive(monotonic_ms())
    time.sleep(0.1)
    os._exit(0 if connection.is_relayed else 1)

daemon._run_relays()
codes = []
for number in range({tasks}):
    pids = []
    for _ in range(2):
        pid = os.fork()
        if not pid:
            task(number)
        pids.append(pid)
    codes += [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
print(codes, flush=True)
sys.stdin.read()
"""


def test_one_connection_serves_workers_that_end_with_their_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a relay that ends with each worker, so that each task after it made a connection."""
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    with serving() as found:
        assert found.server is not None
        opened: list[str] = []
        add = found.server._connections.add
        found.server._connections.add = lambda peer: opened.append(peer.source) or add(peer)  # type: ignore[method-assign, func-returns-value]
        rendezvous = found.address.rendezvous
        code = DAEMON.format(
            port=rendezvous.port, cluster=rendezvous.cluster, secret=rendezvous.secret, tasks=4
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"{[0] * 8}\n"
            assert len(opened) == found.connections() == 1
            eventually(lambda: len(found.echo.gone) == 8)
        finally:
            process.communicate("")
        eventually(lambda: found.connections() == 0)


def request(port: int) -> bytes:
    return json.dumps({"host": "h", "rendezvous": {"port": port, "cluster": "c", "secret": "00"}}).encode()


def asked_of(requests: Sequence[bytes], expected: int) -> list[int]:
    """The ports of the coordinators for which the process becomes the relay."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    go, asked = threading.Event(), []

    def become_relay(address: CoordinatorAddress) -> None:
        asked.append(address.rendezvous.port)
        go.wait(20)

    serving_thread = threading.Thread(target=relay_host._serve, args=(theirs, become_relay))
    serving_thread.start()
    with ours:
        for one in requests:
            ours.send(one)
        eventually(lambda: len(asked) >= expected)
    serving_thread.join(20)
    go.set()
    theirs.close()
    return sorted(asked)


def test_workers_that_ask_for_the_same_relay_cost_one_thread() -> None:
    """Catches: threads that piled up while the coordinator could not be reached, 2 s each."""
    assert asked_of([*[request(1)] * 50, request(2)], 2) == [1, 2]


def test_different_relays_are_started_so_many_at_a_time() -> None:
    assert len(asked_of([request(port) for port in range(100)], 64)) == 64


@pytest.mark.parametrize(
    "invalid",
    [
        b"x",
        b"[]",
        b"\xff",
        b"{}",
        b'{"rendezvous": 3}',
        b'{"rendezvous": {"secret": 3}}',
        b'{"rendezvous": {"secret": "no"}}',
        request(3)[:-1],
        request(3).replace(b"{", b'{"new": 1, '),
        request(3).replace(b"{", b"{" + b" " * 5_000),
        b"[" * 4_000,
    ],
)
def test_an_invalid_request_is_refused_and_others_are_served(invalid: bytes) -> None:
    """Catches: one such request ended the relays of a host."""
    assert asked_of([invalid, request(4)], 1) == [4]
