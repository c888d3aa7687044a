"""Processor time of processes, read from the outside (Linux)."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_COORDINATOR = b"kafka_sink.coordinator"


@dataclass(frozen=True)
class ProcessorTime:
    """Seconds in user and system mode by process: the driver's JVM, the Python processes below it, the
    coordinator."""

    jvm: Mapping[int, float]
    python: Mapping[int, float]
    coordinator: Mapping[int, float]

    def since(self, earlier: ProcessorTime) -> dict[str, float]:
        """Seconds from then to now. What processes used that have ended meanwhile is missing."""
        return {
            "jvm": grown(self.jvm, earlier.jvm),
            "python": grown(self.python, earlier.python),
            "coordinator": grown(self.coordinator, earlier.coordinator),
        }


def grown(now: Mapping[int, float], then: Mapping[int, float]) -> float:
    """The sum of what processes have used since then."""
    return sum(seconds - then.get(process, 0.0) for process, seconds in now.items())


def of_spark(jvm: int) -> ProcessorTime:
    """Of a Spark in local mode so far. ``jvm`` is the process id of its driver.

    Workers that have ended are missing: their daemon ignores SIGCHLD, so no process gets their time.
    """
    stats = _stats()
    python, coordinator = {}, {}
    for process, (parent, seconds, _) in stats.items():
        if process == jvm:
            continue
        if _is_coordinator(process):
            coordinator[process] = seconds
        elif _is_below(parent, jvm, stats):
            python[process] = seconds
    return ProcessorTime({jvm: stats[jvm][1]}, python, coordinator)


def of_process(process: int) -> float:
    """Of one process so far, without those that it started."""
    return _stats()[process][1]


def page_faults(jvm: int) -> dict[int, int]:
    """By process of a Spark in local mode, those that no disk was read for. ``jvm`` is as in ``of_spark``."""
    stats = _stats()
    return {process: faults for process, (_, _, faults) in stats.items() if _is_below(process, jvm, stats)}


def _stats() -> dict[int, tuple[int, float, int]]:
    """Each process's parent, seconds and minor page faults."""
    found = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            try:
                # The name, in brackets, may hold anything.
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            seconds = (int(fields[11]) + int(fields[12])) * _TICK_S
            found[int(entry.name)] = (int(fields[1]), seconds, int(fields[7]))
    return found


def _is_below(process: int, root: int, stats: dict[int, tuple[int, float, int]]) -> bool:
    while process in stats and process != root:
        process = stats[process][0]
    return process == root


def _is_coordinator(process: int) -> bool:
    try:
        return _COORDINATOR in (_PROC / str(process) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False


class Meter:
    """Processor time since its creation: of Spark with its Python processes, and apart of the brokers."""

    def __init__(self, jvm: int, brokers: Collection[int]) -> None:
        self._jvm, self._brokers = jvm, brokers
        self._spark, self._servers = of_spark(jvm), self._of_brokers()

    def _of_brokers(self) -> float:
        return sum(map(of_process, self._brokers))

    def read(self) -> tuple[float, float]:
        """Seconds of Spark, and of the brokers."""
        return sum(of_spark(self._jvm).since(self._spark).values()), self._of_brokers() - self._servers
