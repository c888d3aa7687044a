"""Private memory of Spark's Python workers, watched from the outside (Linux)."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.sampler import Sampler

_PROC = Path("/proc")
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

    ``peak`` is of the largest worker. Workers are forked by a daemon, whose pages they share until either
    writes: those are the daemon's, not theirs.
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
            private, resident = memory_of(worker)
            self.peak.private = max(self.peak.private, private)
            self.peak.resident = max(self.peak.resident, resident)


def memory_of(process: int) -> tuple[int, int]:
    """(private, resident) bytes of a process; zeros where it has ended."""
    try:
        text = (_PROC / str(process) / "smaps_rollup").read_text()
    except OSError:
        return 0, 0
    found = {line.split(":")[0]: int(line.split()[1]) << 10 for line in text.splitlines()[1:]}
    private = found.get("Private_Clean", 0) + found.get("Private_Dirty", 0)
    return private, found.get("Rss", 0)


def python_workers(root: int) -> list[int]:
    """Processes below ``root`` that a daemon of PySpark has forked."""
    parents: dict[int, int] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            try:
                # The name, in brackets, may hold anything.
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
    return [
        process
        for process, parent in parents.items()
        if _is_below(parent, root, parents) and _is_daemon(parent) and _is_daemon(process)
    ]


def _is_below(process: int, root: int, parents: dict[int, int]) -> bool:
    while process in parents and process != root:
        process = parents[process]
    return process == root


def _is_daemon(process: int) -> bool:
    """A forked worker keeps its daemon's command line."""
    try:
        return b"pyspark.daemon" in (_PROC / str(process) / "cmdline").read_bytes()
    except OSError:
        return False
