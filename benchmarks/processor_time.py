"""Processor time of processes, from /proc (Linux)."""

from __future__ import annotations

import os
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


def processor_s(pids: set[int]) -> float:
    """Processor time of these processes, and of children of theirs that have ended."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS


def tree(root: int) -> set[int]:
    """A process and all below it."""
    found, frontier = {root}, {root}
    while frontier:
        below = set()
        for pid in frontier:
            for path in Path(f"/proc/{pid}/task").glob("*/children"):
                try:
                    below |= set(map(int, path.read_text().split()))
                except OSError:
                    pass
        frontier = below - found
        found |= frontier
    return found


class Meter:
    """Processor time since its creation: that of this process and all below it, and apart that of brokers."""

    def __init__(self, brokers: set[int]) -> None:
        self._brokers = brokers
        self._before = self._now()

    def _now(self) -> tuple[float, float]:
        return processor_s(tree(os.getpid()) - self._brokers), processor_s(self._brokers)

    def read(self) -> tuple[float, float]:
        """Seconds of Spark with its Python workers, and of the brokers."""
        now = self._now()
        return now[0] - self._before[0], now[1] - self._before[1]
