"""The coordinator's process. It serves until the driver or the application's folder is gone.

stdin is a pipe with one JSON object per line. The first line holds the process's settings, each later line a
cluster.
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
# Options may contain a bundle of certificates, which takes hundreds of kilobytes.
_MAX_LINE_BYTES = 16 * 1024 * 1024
# A process that has lived this long does not count as one that keeps ending.
_LONG_LIFE_S = 600.0
# Bytes that one peer may leave unread.
_UNREAD_BYTES = 16 * 1024 * 1024
# Open files other than connections: to brokers, log files, files that Python opens.
_OTHER_FILES = 1000
_HANDLERS = {"metadata": metadata_handler, "breaker": breaker_handler, "writes": write_handler}


class CommandPipe:
    """Reads lines from stdin without blocking."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._held: list[bytes] = []
        self._held_bytes = 0

    def lines(self) -> list[dict[str, Any]]:
        """The complete lines. Skips invalid JSON, which a writer leaves behind when it dies within a line."""
        data = self._read()
        if b"\n" not in data:
            self._hold(data)
            return []
        *complete, partial = b"".join((*self._held, data)).split(b"\n")
        self._held, self._held_bytes = [], 0
        self._hold(partial)
        messages = []
        for line in filter(None, complete):
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if isinstance(message, dict):
                messages.append(message)
        return messages

    def _read(self) -> bytes:
        pieces = []
        try:
            while data := os.read(self._handle, _READ_BYTES):
                pieces.append(data)
        except BlockingIOError:
            pass
        return b"".join(pieces)

    def _hold(self, data: bytes) -> None:
        """Keep a partial line. Of a line that is too long the start is dropped; its end is invalid JSON."""
        if self._held_bytes + len(data) > _MAX_LINE_BYTES:
            self._held, self._held_bytes = [], 0
        self._held.append(data)
        self._held_bytes += len(data)


async def _serve(settings: dict[str, Any], commands: CommandPipe, clusters: list[dict[str, Any]]) -> None:
    def add(added: list[dict[str, Any]]) -> None:
        for one in added:
            try:
                server.add_cluster(one["cluster"], parse(one["options"]).options)
            except (KeyError, ConfigurationError):
                # The reason is not logged: it may quote a password.
                _log.warning("The coordinator ignores a cluster with invalid options")

    def read_commands() -> None:
        add(commands.lines())

    driver = DriverProcess(int(settings["driver"][0]), str(settings["driver"][1]))
    marker = Path(settings["marker"])

    def forgotten(key: str) -> None:
        known_cluster_marker(marker.parent, settings["token"], key).unlink(missing_ok=True)

    server = CoordinatorServer(
        bytes.fromhex(settings["secret"]),
        _HANDLERS,
        monotonic_ms,
        _bounds(settings["bounds"]),
        look=read_commands,
        forgotten=forgotten,
    )
    add(clusters)
    listening = socket.socket(fileno=int(settings["listening"]))
    await server.start(listening)
    loop = asyncio.get_running_loop()
    loop.add_reader(0, read_commands)
    loop.call_later(_LONG_LIFE_S, lambda: starts_file(marker.parent).unlink(missing_ok=True))
    while driver.is_alive() and _is_current(marker, settings["token"]):
        await asyncio.sleep(_WATCH_S)
    server.close()


def _bounds(settings: dict[str, Any]) -> ServerBounds:
    """The server's bounds. Each connection is an open file, whose number the system limits."""
    connections, memory = int(settings["connections"]), int(settings["buffer_memory"])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if hard != resource.RLIM_INFINITY and wanted > hard:
        connections = max(1, hard - _OTHER_FILES)
        _log.warning(
            "The coordinator takes at most %d connections instead of coordinator.max.connections=%s, "
            "because its process may open only %d files",
            *(connections, settings["connections"], hard),
        )
        wanted = hard
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return ServerBounds(
        connections=connections,
        unfinished_bytes=memory,
        unread_bytes=min(_UNREAD_BYTES, memory),
        unread_bytes_of_all=memory,
        messages_per_s=float(settings["messages_per_s"]),
    )


def _is_current(marker: Path, token: str) -> bool:
    """Whether the application's folder exists, and no other coordinator has been started in it."""
    try:
        return bool(json.loads(marker.read_bytes())["token"] == token)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def main() -> int:
    """Returns the exit code, which is 2 if no settings arrived on stdin."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Ctrl-C in the driver's terminal interrupts a job. The application goes on, and so does the coordinator.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    stdin = CommandPipe(0)
    deadline = time.monotonic() + _FIRST_LINE_S
    while not (lines := stdin.lines()):
        if time.monotonic() > deadline:
            return 2
        select.select([0], [], [], 0.1)
    asyncio.run(_serve(lines[0], stdin, lines[1:]))
    # The threads that fetch metadata are daemons. They hold nothing worth waiting for.
    os._exit(0)
