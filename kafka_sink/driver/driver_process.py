"""Processes of this host. Planning finds the driver's, and the coordinator ends when that process ends."""

from __future__ import annotations

import os
from dataclasses import dataclass

from kafka_sink import spark_application

# The parent of a planning worker is Spark's Python daemon, or the JVM itself if the daemon is switched off.
_MAX_ANCESTORS = 4


@dataclass(frozen=True, slots=True)
class HostProcess:
    """A process, identified by its pid and its start time, because pids are reused."""

    pid: int
    started: str

    @classmethod
    def running(cls, pid: int) -> HostProcess | None:
        """The process that has this pid now."""
        state = _look(pid)
        return None if state is None else cls(pid, state.started)

    def is_alive(self) -> bool:
        """Whether it is running. A zombie is not: it only waits for its parent."""
        state = _look(self.pid)
        return state is not None and state.started == self.started and not state.zombie

    def arguments(self) -> list[str]:
        """The command line; empty if it cannot be read."""
        try:
            with open(f"/proc/{self.pid}/cmdline", encoding="utf-8", errors="replace") as file:
                return file.read().split("\0")
        except OSError:
            return []


@dataclass(frozen=True, slots=True)
class _Found:
    parent: int
    started: str
    zombie: bool
    command: str


def find_driver_process() -> HostProcess | None:
    """The driver's JVM. None if there is no such process, or if there is no /proc that shows it.

    It is the nearest ancestor that does not run Python, unless this process has started it.
    """
    application = spark_application.current()
    if application is not None and application.driver_pid is not None:
        return HostProcess.running(application.driver_pid)
    pid = os.getppid()
    for _ in range(_MAX_ANCESTORS):
        ancestor = _look(pid)
        if ancestor is None or pid <= 0:
            return None
        if not ancestor.command.lower().startswith("python"):
            return HostProcess(pid, ancestor.started)
        pid = ancestor.parent
    return None


def _look(pid: int) -> _Found | None:
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            stat = file.read()
    except OSError:
        return None
    # The command is in parentheses and may contain any character.
    head, _, tail = stat.rpartition(")")
    fields = tail.split()
    return _Found(int(fields[1]), fields[19], fields[0] in "ZX", head.partition("(")[2])
