"""Starts the process that serves tasks, and starts it again when it ends before the application.

The supervisor keeps the listening socket, the secret and the clusters. Running tasks therefore find the next
process where the last one was, and no write has to be planned for it. The first restart is immediate, later
ones wait: see ``pause_s``. If the supervisor ends, the other process goes on; planning starts both when
neither is left.

It imports next to nothing, and takes a third of the memory of the process that serves.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from kafka_sink.coordinator.process.rendezvous_directory import (
    LONG_LIFE_S,
    WATCH_S,
    CommandPipe,
    is_current,
    pause_s,
)
from kafka_sink.driver.driver_process import DriverProcess

_log = logging.getLogger(__name__)
_FIRST_LINE_S = 10.0
# A process that has reported nothing for so many seconds, though it should every second, is ended.
_MAX_SILENT_CHECKS = 30
_MAX_CLUSTERS = 64


class KnownClusters:
    """What a process that serves must know first, by the lines of planning and of its predecessor."""

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self._clusters: dict[str, dict[str, Any]] = {}
        # Where the live view is, if there is one.
        self._live_view: dict[str, Any] | None = None
        for line in lines:
            self.take(line)

    def take(self, line: Mapping[str, Any]) -> None:
        """A cluster that was added or forgotten, the live view's place, or nothing new."""
        if "ui" in line:
            self._live_view = dict(line)
        key = line.get("cluster")
        if isinstance(key, str):
            self._clusters.pop(key, None)
            self._clusters[key] = dict(line)
            if len(self._clusters) > _MAX_CLUSTERS:
                del self._clusters[next(iter(self._clusters))]
        self._clusters.pop(str(line.get("forgotten")), None)

    def lines(self) -> list[dict[str, Any]]:
        """For the next process."""
        view = [] if self._live_view is None else [self._live_view]
        return [*self._clusters.values(), *view]


def watch(
    child: int,
    reading: int,
    take: Callable[[Mapping[str, Any]], None],
    *,
    check_s: float = WATCH_S,
    max_silent_checks: int = _MAX_SILENT_CHECKS,
) -> None:
    """Take the process's reports until it ends, which closes the pipe. End one that reports nothing."""
    os.set_blocking(reading, False)
    reports = CommandPipe(reading)
    silent_checks = 0
    while True:
        ready, _, _ = select.select([reading], [], [], check_s)
        if not ready:
            # Counted, as no clock tells a process that hangs from a machine that was suspended.
            silent_checks += 1
            if silent_checks > max_silent_checks:
                _log.warning("the process that serves tasks does not respond")
                os.kill(child, signal.SIGKILL)
            continue
        silent_checks = 0
        for line in reports.lines():
            take(line)
        if reports.is_closed:
            return


class ServerSupervisor:
    """``settings``: as the launcher sends them. ``commands``: the pipe where planning adds clusters."""

    def __init__(
        self, settings: Mapping[str, Any], clusters: list[dict[str, Any]], commands: CommandPipe
    ) -> None:
        self._settings = settings
        self._commands = commands
        self._known = KnownClusters(clusters)
        self._driver = DriverProcess(int(settings["driver"][0]), str(settings["driver"][1]))
        self._marker = Path(settings["marker"])

    def run(self) -> None:
        """Return when the application has ended."""
        ended_early = 0
        while self._is_needed():
            started = time.monotonic()
            code = self._serve_once()
            if code == 0:
                return
            ended_early = 1 if time.monotonic() - started >= LONG_LIFE_S else ended_early + 1
            pause = pause_s(ended_early)
            _log.warning(
                "the process that serves tasks ended (%d); it is started again in %.0f s", code, pause
            )
            self._turn_away(pause)

    def _is_needed(self) -> bool:
        return self._driver.is_alive() and is_current(self._marker, self._settings["token"])

    def _serve_once(self) -> int:
        """Fork the process that serves, and wait for its end. Returns its exit code, or minus the signal."""
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            try:
                from kafka_sink.coordinator.process.server_process import serve

                serve(self._settings, self._known.lines(), self._commands, writing)
            except BaseException:  # noqa: BLE001 - it must not run the supervisor's code
                _log.exception("the coordinator failed")
            os._exit(1)
        os.close(writing)
        try:
            watch(child, reading, self._known.take)
        finally:
            os.close(reading)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    def _turn_away(self, seconds: float) -> None:
        """Close connections at once meanwhile, so that tasks do not wait for a challenge."""
        until = time.monotonic() + seconds
        with socket.socket(fileno=os.dup(int(self._settings["listening"]))) as listening:
            listening.setblocking(False)
            while (left := until - time.monotonic()) > 0 and self._is_needed():
                ready, _, _ = select.select([listening], [], [], min(left, WATCH_S))
                try:
                    while ready:
                        listening.accept()[0].close()
                except OSError:
                    continue


def main() -> int:
    """Return the exit code, which is 2 if no settings arrived on stdin."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Ctrl-C in the driver's terminal interrupts a job. The application goes on, and so does the coordinator.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    commands = CommandPipe(0)
    deadline = time.monotonic() + _FIRST_LINE_S
    while not (lines := commands.lines()):
        if time.monotonic() > deadline:
            return 2
        select.select([0], [], [], 0.1)
    ServerSupervisor(lines[0], lines[1:], commands).run()
    return 0
