"""The coordinator's process: it serves until the driver, or the application's folder, is gone.

stdin is a pipe of lines of JSON. The first tells what to serve and what to watch, each later one a cluster.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import select
import signal
import socket
import time
from pathlib import Path
from typing import Any

from kafka_sink.clock import monotonic_ms
from kafka_sink.coordinator.server.breaker_handler import breaker_handler
from kafka_sink.coordinator.server.connections import ServerBounds
from kafka_sink.coordinator.server.metadata_fetcher import metadata_handler
from kafka_sink.coordinator.server.server import CoordinatorServer
from kafka_sink.coordinator.server.write_handler import write_handler
from kafka_sink.coordinator.wire.application_files import known_cluster_marker, starts_file
from kafka_sink.coordinator.wire.driver_process import DriverProcess
from kafka_sink.errors import ConfigurationError
from kafka_sink.options import parse

_log = logging.getLogger(__name__)
_WATCH_S = 1.0
_FIRST_LINE_S = 10.0
_READ_BYTES = 64 * 1024
# Certificates travel in options, and a bundle of them has hundreds of kilobytes.
_MAX_LINE_BYTES = 16 * 1024 * 1024
# A life that is no sign of a process that keeps ending.
_LONG_LIFE_S = 600.0
# Of one peer.
_UNREAD_BYTES = 16 * 1024 * 1024
# Of brokers, of logs, of what Python opens.
_OTHER_FILES = 1000
_HANDLERS = {"metadata": metadata_handler, "breaker": breaker_handler, "writes": write_handler}


class CommandPipe:
    """The lines that have come through stdin; never blocks."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._held: list[bytes] = []
        self._held_bytes = 0

    def lines(self) -> list[dict[str, Any]]:
        """What is whole by now. What is no JSON is half of a line that somebody died over: left out."""
        data = self._read()
        if b"\n" not in data:
            self._hold(data)
            return []
        *whole, rest = b"".join((*self._held, data)).split(b"\n")
        self._held, self._held_bytes = [], 0
        self._hold(rest)
        told = []
        for one in filter(None, whole):
            try:
                message = json.loads(one)
            except ValueError:
                continue
            if isinstance(message, dict):
                told.append(message)
        return told

    def _read(self) -> bytes:
        pieces = []
        try:
            while data := os.read(self._handle, _READ_BYTES):
                pieces.append(data)
        except BlockingIOError:
            pass
        return b"".join(pieces)

    def _hold(self, data: bytes) -> None:
        """Of a line that is too long nothing is understood: its end is no JSON."""
        if self._held_bytes + len(data) > _MAX_LINE_BYTES:
            self._held, self._held_bytes = [], 0
        self._held.append(data)
        self._held_bytes += len(data)


async def _serve(first: dict[str, Any], later: CommandPipe, rest: list[dict[str, Any]]) -> None:
    def add(told: list[dict[str, Any]]) -> None:
        for one in told:
            try:
                server.add_cluster(one["cluster"], parse(one["options"]).options)
            except (KeyError, ConfigurationError):
                # Not the reason: a password may be what was refused.
                _log.warning("a cluster's options were not understood")

    def look() -> None:
        add(later.lines())

    driver = DriverProcess(int(first["driver"][0]), str(first["driver"][1]))
    marker = Path(first["marker"])

    def forgotten(key: str) -> None:
        known_cluster_marker(marker.parent, first["token"], key).unlink(missing_ok=True)

    server = CoordinatorServer(
        bytes.fromhex(first["secret"]),
        _HANDLERS,
        monotonic_ms,
        _bounds(first["bounds"]),
        look=look,
        forgotten=forgotten,
    )
    add(rest)
    listening = socket.socket(fileno=int(first["listening"]))
    await server.start(listening)
    loop = asyncio.get_running_loop()
    loop.add_reader(0, look)
    loop.call_later(_LONG_LIFE_S, lambda: starts_file(marker.parent).unlink(missing_ok=True))
    while driver.is_alive() and _is_current(marker, first["token"]):
        await asyncio.sleep(_WATCH_S)
    server.close()


def _bounds(told: dict[str, Any]) -> ServerBounds:
    """Each connection is an open file, of which the system allows so many."""
    connections, memory = int(told["connections"]), int(told["buffer_memory"])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and wanted > hard:
        connections = max(1, hard - _OTHER_FILES)
        _log.warning(
            "at most %d connections, not coordinator.max.connections=%s: the process may open %d files",
            *(connections, told["connections"], hard),
        )
        wanted = hard
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return ServerBounds(
        connections=connections,
        unfinished_bytes=memory,
        unread_bytes=min(_UNREAD_BYTES, memory),
        unread_bytes_of_all=memory,
        messages_per_s=float(told["messages_per_s"]),
    )


def _is_current(marker: Path, token: str) -> bool:
    """Whether the application's folder is there, and nobody has started another coordinator in it."""
    try:
        return bool(json.loads(marker.read_bytes())["token"] == token)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def main() -> int:
    """Returns the exit code; 2 where stdin told nothing."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # The driver's terminal is not ours: Ctrl-C there interrupts a job, not the application.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stdin = CommandPipe(0)
    deadline = time.monotonic() + _FIRST_LINE_S
    while not (lines := stdin.lines()):
        if time.monotonic() > deadline:
            return 2
        select.select([0], [], [], 0.1)
    asyncio.run(_serve(lines[0], stdin, lines[1:]))
    # Threads that fetch metadata are daemons; nothing of theirs is worth waiting for.
    os._exit(0)
