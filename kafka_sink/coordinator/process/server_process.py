"""The process that serves tasks, until the driver or the application's folder is gone.

Its parent, the supervisor, starts it again when it ends otherwise. It tells the parent of each cluster that
it gets, so that its successor has it.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import resource
import socket
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakMethod, WeakValueDictionary

from kafka_sink.clock import monotonic_ms
from kafka_sink.coordinator.breaker.cluster_breakers import Breakers, breaker_handler
from kafka_sink.coordinator.breaker.messages import KIND as BREAKER
from kafka_sink.coordinator.figures.application_figures import ApplicationFigures
from kafka_sink.coordinator.figures.handler import FiguresHandler
from kafka_sink.coordinator.figures.live_view import LiveView
from kafka_sink.coordinator.figures.messages import KIND as FIGURES
from kafka_sink.coordinator.metadata.fetcher import metadata_handler
from kafka_sink.coordinator.metadata.messages import KIND as METADATA
from kafka_sink.coordinator.process.rendezvous_directory import (
    LONG_LIFE_S,
    WATCH_S,
    CommandPipe,
    console_marker,
    is_current,
    known_cluster_marker,
    starts_file,
    ui_marker,
)
from kafka_sink.coordinator.process.terminal_progress import TerminalProgress
from kafka_sink.coordinator.rates.handler import rate_handler
from kafka_sink.coordinator.rates.messages import KIND as RATES
from kafka_sink.coordinator.transport.connections import ServerBounds
from kafka_sink.coordinator.transport.handlers import Handler, HandlerFactory
from kafka_sink.coordinator.transport.loop_watch import LoopWatch
from kafka_sink.coordinator.transport.server import CoordinatorServer
from kafka_sink.coordinator.writes.channel import KIND as WRITES
from kafka_sink.coordinator.writes.handler import write_handler
from kafka_sink.coordinator.writes.running_jobs import JobWatch, RunningJobs, find_ui
from kafka_sink.driver.driver_process import DriverProcess
from kafka_sink.errors import ConfigurationError
from kafka_sink.options import SinkOptions, parse

_log = logging.getLogger(__name__)
_MAX_NAME = 200
# Bytes that one peer may leave unread.
_UNREAD_BYTES = 16 * 1024 * 1024
# Open files other than connections: to brokers, log files, files that Python opens. Of few files, half.
_OTHER_FILES = 1000


class _Report:
    """Lines to the supervisor. It may be gone; then there is nobody to report to."""

    def __init__(self, transport: asyncio.WriteTransport) -> None:
        self._transport = transport

    def send(self, line: Mapping[str, Any]) -> None:
        if not self._transport.is_closing():
            self._transport.write(json.dumps(line).encode() + b"\n")


class _Display:
    """What users see of the application's writes while they run."""

    def __init__(self, driver: DriverProcess, folder: Path, token: str) -> None:
        self.figures = ApplicationFigures()
        self.live_view = LiveView(self.figures, ui_marker(folder, token))
        self._driver = driver
        is_wanted = console_marker(folder, token).exists
        self._terminal = TerminalProgress(driver.pid, self.figures.progress, is_wanted)
        self.figures.on_end = self._terminal.update
        self._has_looked = False

    def update(self) -> None:
        """Once a second."""
        if self.figures.reports and not self._has_looked:
            # Reads the JVM's open files: once.
            self._has_looked = True
            ui = find_ui(self._driver)
            self.figures.spark_ui = ui[1] if ui else None
        self.figures.sample(monotonic_ms())
        self.live_view.record()
        self._terminal.update()

    def close(self) -> None:
        # The terminal of a driver that is gone belongs to the shell again.
        if self._driver.is_alive():
            self._terminal.clear()
        self.live_view.close()


async def _serve(
    settings: Mapping[str, Any],
    first: Iterable[Mapping[str, Any]],
    commands: CommandPipe,
    report_fd: int,
    watch: LoopWatch,
) -> None:
    loop = asyncio.get_running_loop()
    pipe, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(report_fd, "wb"))
    report = _Report(pipe)

    def add(added: Iterable[Mapping[str, Any]]) -> None:
        for one in added:
            try:
                server.add_cluster(one["cluster"], parse(one["options"]).options)
            except (KeyError, ConfigurationError):
                # The reason is not logged: it may quote a password.
                _log.warning("The coordinator ignores a cluster with invalid options")

    def obey(lines: Iterable[Mapping[str, Any]]) -> None:
        for line in lines:
            if isinstance(line.get("ui"), dict):
                # The process that replaces this one takes the same port.
                report.send({"ui": display.live_view.open(line["ui"])})
            else:
                report.send(line)
                add([line])

    def read_commands() -> None:
        obey(commands.lines())

    driver = DriverProcess(int(settings["driver"][0]), str(settings["driver"][1]))
    marker = Path(settings["marker"])
    display = _Display(driver, marker.parent, settings["token"])

    def forgotten(key: str) -> None:
        known_cluster_marker(marker.parent, settings["token"], key).unlink(missing_ok=True)
        report.send({"forgotten": key})

    jobs = RunningJobs(partial(find_ui, driver), monotonic_ms)
    server = CoordinatorServer(
        bytes.fromhex(settings["secret"]),
        _handlers(display.figures, jobs, watch.stood_ms),
        monotonic_ms,
        _bounds(settings["bounds"]),
        look=read_commands,
        forgotten=forgotten,
        watch=watch,
    )
    display.figures.coordinator = server.state
    obey(first)
    listening = socket.socket(fileno=int(settings["listening"]))
    await server.start(listening)
    loop.add_reader(0, read_commands)
    loop.call_later(LONG_LIFE_S, lambda: starts_file(marker.parent).unlink(missing_ok=True))
    await _until_over(driver, marker, settings["token"], report, display)
    display.close()
    server.close()
    jobs.close()


async def _until_over(
    driver: DriverProcess, marker: Path, token: str, report: _Report, display: _Display
) -> None:
    """Return once the driver is gone, or another coordinator has taken over."""
    while driver.is_alive() and is_current(marker, token):
        report.send({})
        display.update()
        await asyncio.sleep(WATCH_S)


def _handlers(
    figures: ApplicationFigures,
    jobs: JobWatch | None = None,
    stood_ms: Callable[[float], float] = lambda _: 0.0,
) -> dict[str, HandlerFactory]:
    """The handlers of each cluster. Those with something for the live view share ``figures``.

    ``stood_ms``: of the loop.
    """
    writes = partial(write_handler, jobs=jobs, listener=figures)
    breakers: Breakers = WeakValueDictionary()

    def metadata(options: SinkOptions, wake: Callable[[], None]) -> Handler:
        return metadata_handler(options, wake, figures.lookups(_shown(options)))

    def breaker(options: SinkOptions, wake: Callable[[], None]) -> Handler:
        handler = breaker_handler(options, wake, breakers, stood_ms)
        figures.add_mutes(_shown(options), WeakMethod(handler.muted))
        return handler

    def job_figures(options: SinkOptions, _wake: Callable[[], None]) -> Handler:
        return FiguresHandler(_shown(options), figures)

    return {
        METADATA: metadata,
        BREAKER: breaker,
        WRITES: writes,
        RATES: rate_handler,
        FIGURES: job_figures,
    }


def _shown(options: SinkOptions) -> str:
    """The name of a cluster in the live view: its bootstrap addresses."""
    return ",".join(f"{host}:{port}" for host, port in options.bootstrap_servers)[:_MAX_NAME]


def _bounds(settings: dict[str, Any]) -> ServerBounds:
    """The server's bounds. Each connection is an open file, whose number the system limits."""
    connections, memory = int(settings["connections"]), int(settings["buffer_memory"])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    files = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    while soft != resource.RLIM_INFINITY and soft < files:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
            break
        except (OSError, ValueError):
            # The system's own limit is lower: kern.maxfilesperproc of macOS.
            files = max(soft, files // 2)
    if files < wanted:
        connections = max(1, files - _OTHER_FILES, files // 2)
        _log.warning(
            "The coordinator takes at most %d connections instead of coordinator.max.connections=%s, "
            "because its process may open only %d files",
            *(connections, settings["connections"], files),
        )
    return ServerBounds(
        connections=connections,
        unfinished_bytes=memory,
        unread_bytes=min(_UNREAD_BYTES, memory),
        unread_bytes_of_all=memory,
        messages_per_s=float(settings["messages_per_s"]),
    )


def collect_garbage_seldom() -> None:
    """A full collection looks at all objects of all tasks at once, and stops the loop for that long.

    Counts of references free what tasks leave behind, ``Connections`` what sockets do. Other cycles, as of
    exceptions, are mostly young. Young objects are looked at a few at a time: each may hold many others.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100, 5, 10_000)


def serve(
    settings: Mapping[str, Any], clusters: Iterable[Mapping[str, Any]], commands: CommandPipe, report_fd: int
) -> None:
    """Serve until the application ends. Never returns."""
    watch = LoopWatch(monotonic_ms)
    collect_garbage_seldom()
    loop = watch.new_loop()
    asyncio.set_event_loop(loop)
    loop.run_until_complete(_serve(settings, clusters, commands, report_fd, watch))
    # The threads that fetch metadata are daemons. They hold nothing worth waiting for.
    os._exit(0)
