"""Threads, files and memory of a process, as Linux reports them."""

from __future__ import annotations

import gc
import os
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType

import pyarrow as pa

from tests.support.processes import memory_of

# Arrow's allocator, mimalloc, maps segments of this size. One whose memory is all free stays resident until
# the allocator is next used or asked to release it: a process seems to grow, or to shrink, by 31 MiB at once.
ARROW_SEGMENT_BYTES = 32 << 20


def release_arrow() -> None:
    """Give back the memory that Arrow's allocator keeps, so that resident memory is memory in use."""
    pa.default_memory_pool().release_unused()


@dataclass(frozen=True)
class Footprint:
    """Counts, and resident private bytes (what other processes share is not counted)."""

    threads: int
    files: int
    sockets: int
    private_bytes: int


@dataclass
class Traced:
    """Bytes of the objects that Python has made since: in the end, and at most."""

    held: int = 0
    peak: int = 0


@contextmanager
def traced() -> Iterator[Traced]:
    found = Traced()
    tracemalloc.start()
    try:
        yield found
        found.held, found.peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()


def held_bytes(one: object) -> int:
    seen: dict[int, object] = {}
    ahead = [one]
    while ahead:
        found = ahead.pop()
        if id(found) not in seen and not isinstance(found, (type, ModuleType, FunctionType)):
            seen[id(found)] = found
            ahead += gc.get_referents(found)
    return sum(map(sys.getsizeof, seen.values()))


def of_process(pid: int) -> Footprint:
    folder = Path(f"/proc/{pid}")
    open_files = []
    for entry in (folder / "fd").iterdir():
        try:
            open_files.append(os.readlink(entry))
        except FileNotFoundError:
            # The listing's own, or closed meanwhile.
            pass
    return Footprint(
        threads=len(list((folder / "task").iterdir())),
        files=len(open_files),
        sockets=sum(name.startswith("socket:") for name in open_files),
        private_bytes=memory_of(pid)[0],
    )
