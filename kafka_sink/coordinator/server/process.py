"""The process that serves tasks, until the driver or the application's folder is gone.

Its parent, the supervisor, starts it again when it ends otherwise. It reports the clusters that it gets to
the parent, so that its successor has them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kafka_sink.clock import monotonic_ms
from kafka_sink.coordinator.server.breaker_handler import breaker_handler
from kafka_sink.coordinator.server.command_pipe import CommandPipe
from kafka_sink.coordinator.server.connections import ServerBounds
from kafka_sink.coordinator.server.metadata_fetcher import metadata_handler
from kafka_sink.coordinator.server.server import CoordinatorServer
from kafka_sink.coordinator.server.write_handler import write_handler
from kafka_sink.coordinator.wire.application_files import (
    LONG_LIFE_S,
    WATCH_S,
    is_current,
    known_cluster_marker,
    starts_file,
)
from kafka_sink.coordinator.wire.driver_process import DriverProcess
from kafka_sink.errors import ConfigurationError
from kafka_sink.options import parse

_log = logging.getLogger(__name__)
# Bytes that one peer may leave unread.
_UNREAD_BYTES = 16 * 1024 * 1024
# Open files other than connections: to brokers, log files, files that Python opens.
_OTHER_FILES = 1000
_HANDLERS = {"metadata": metadata_handler, "breaker": breaker_handler, "writes": write_handler}


class _Report:
    """Lines to the supervisor. It may be gone; then there is nobody to report to."""

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        self._transport = transport

    def send(self, line: Mapping[str, Any]) -> None:
        if not self._transport.is_closing():
            self._transport.write(json.dumps(line).encode() + b"\n")


async def _serve(
    settings: Mapping[str, Any], clusters: Iterable[Mapping[str, Any]], commands: CommandPipe, report_fd: int
) -> None:
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(report_fd, "wb"))
    report = _Report(transport)

    def add(added: Iterable[Mapping[str, Any]]) -> None:
        for one in added:
            try:
                server.add_cluster(one["cluster"], parse(one["options"]).options)
            except (KeyError, ConfigurationError):
                # The reason is not logged: it may quote a password.
                _log.warning("The coordinator ignores a cluster with invalid options")

    def read_commands() -> None:
        for line in commands.lines():
            report.send(line)
            add([line])

    driver = DriverProcess(int(settings["driver"][0]), str(settings["driver"][1]))
    marker = Path(settings["marker"])

    def forgotten(key: str) -> None:
        known_cluster_marker(marker.parent, settings["token"], key).unlink(missing_ok=True)
        report.send({"forgotten": key})

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
    loop.add_reader(0, read_commands)
    loop.call_later(LONG_LIFE_S, lambda: starts_file(marker.parent).unlink(missing_ok=True))
    while driver.is_alive() and is_current(marker, settings["token"]):
        report.send({})
        await asyncio.sleep(WATCH_S)
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


def serve(
    settings: Mapping[str, Any], clusters: Iterable[Mapping[str, Any]], commands: CommandPipe, report_fd: int
) -> None:
    """Serve until the application ends. Never returns."""
    asyncio.run(_serve(settings, clusters, commands, report_fd))
    # The threads that fetch metadata are daemons. They hold nothing worth waiting for.
    os._exit(0)
