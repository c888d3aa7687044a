"""Private memory of Spark's Python workers, watched from the outside (Linux)."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass

from benchmarks.sampler import Sampler
from tests.support.processes import below, command_of, memory_of

_SAMPLE_S = 0.02
_LOOK_FOR_WORKERS_S = 0.2


@dataclass
class Peak:
    """Bytes of the worker that held most: pages that no other process shares, and all resident ones."""

    private: int = 0
    resident: int = 0
    workers: int = 0


class WorkerMemory(Sampler):
    """Samples every Python worker below ``root`` (a process id) while the block runs.

    ``peak`` is that of the largest worker. Workers are forked by a daemon, whose pages they share until
    either writes: those pages are the daemon's, not the worker's.
    """

    def __init__(self, root: int) -> None:
        super().__init__("worker-memory", _SAMPLE_S)
        self.peak = Peak()
        self._root = root
        self._seen: set[int] = set()
        self._workers: list[int] = []
        self._look_at = 0.0

    def sample(self) -> None:
        """See Sampler."""
        if time.monotonic() >= self._look_at:
            self._workers = python_workers(self._root)
            self._seen.update(self._workers)
            self.peak.workers = len(self._seen)
            self._look_at = time.monotonic() + _LOOK_FOR_WORKERS_S
        for worker in self._workers:
            with suppress(OSError):  # it has ended
                private, resident = memory_of(worker)
                self.peak.private = max(self.peak.private, private)
                self.peak.resident = max(self.peak.resident, resident)


def python_workers(root: int) -> list[int]:
    """Processes below ``root`` that a daemon of PySpark has forked: they keep its command line."""
    daemons = {pid: one for pid, one in below(root).items() if "pyspark.daemon" in command_of(pid)}
    return [pid for pid, one in daemons.items() if one.parent in daemons]
