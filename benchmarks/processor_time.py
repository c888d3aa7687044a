"""Processor time of processes, read from the outside (Linux)."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_COORDINATOR = b"kafka_sink.coordinator"


@dataclass(frozen=True)
class ProcessorTime:
    """Seconds in user and system mode: the driver's JVM, the Python processes below it, the coordinator."""

    jvm: float
    python: float
    coordinator: float

    def __sub__(self, earlier: ProcessorTime) -> ProcessorTime:
        return ProcessorTime(
            self.jvm - earlier.jvm, self.python - earlier.python, self.coordinator - earlier.coordinator
        )

    @property
    def total(self) -> float:
        """All of them."""
        return self.jvm + self.python + self.coordinator


def of_spark(jvm: int) -> ProcessorTime:
    """Of a Spark in local mode so far. ``jvm`` is the process id of its driver.

    Workers that have ended do not count: their daemon ignores SIGCHLD, so no process gets their time.
    """
    stats = _stats()
    python = coordinator = 0.0
    for process, (parent, own, ended) in stats.items():
        if process == jvm:
            continue
        if _is_coordinator(process):
            coordinator += own + ended
        elif _is_below(parent, jvm, stats):
            python += own + ended
    return ProcessorTime(stats[jvm][1], python, coordinator)


def of_process(process: int) -> float:
    """Of one process so far, without those that it started."""
    return _stats()[process][1]


def _stats() -> dict[int, tuple[int, float, float]]:
    """By process: its parent, its own seconds, and those of its ended children."""
    found = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            try:
                # The name, in brackets, may hold anything.
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            ticks = [int(one) for one in fields[11:15]]
            found[int(entry.name)] = (
                int(fields[1]),
                (ticks[0] + ticks[1]) * _TICK_S,
                (ticks[2] + ticks[3]) * _TICK_S,
            )
    return found


def _is_below(process: int, root: int, stats: dict[int, tuple[int, float, float]]) -> bool:
    while process in stats and process != root:
        process = stats[process][0]
    return process == root


def _is_coordinator(process: int) -> bool:
    try:
        return _COORDINATOR in (_PROC / str(process) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
