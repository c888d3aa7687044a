"""Chunks of one size, cut from anonymous mappings that the kernel backs only once they are written.

Why mappings instead of one bytearray per chunk, measured on Linux with 64 MiB in 16 KiB chunks (Python 3.11):
after 63 of 64 chunks were freed, the bytearrays still held all 64 MiB resident, because the C heap was
fragmented. The mappings held 2 MiB after MADV_DONTNEED, which took 4 ms for all chunks. Assigning a slice of
4 KiB costs 88 ns with a mapping, 97 ns with a memoryview and 268 ns with a bytearray, and a mapping accepts
any contiguous buffer. Huge pages would halve the time of the first touch (14 ms instead of 29 ms for 64 MiB),
but would not help afterwards, and would make 2 MiB resident for the first byte.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from kafka_sink.errors import BufferOwnershipError

# The size of one mapping. Creating it takes less than 50 us, during which the pool's lock is held.
_SLAB_BYTES = 1 << 20
_SLAB_CHUNKS = 64
# After this many returns of several chunks, the free chunks are sorted by place. Without sorting, a batch's
# 16 chunks were spread over 15 separate places after a while; with it, over 6. Each place costs the sender a
# checksum call and a buffer for sendmsg.
_RETURNS_BEFORE_SORT = 16
# Sorting 65,536 free chunks (1 GiB) takes 15 ms under the pool's lock, so more chunks are sorted less often.
_FREE_CHUNKS_A_RETURN = 128


@dataclass(slots=True, eq=False)
class Chunk:
    """``size`` bytes of the mapping ``slab``, from ``start``. ``view`` is the same memory, writable.
    ``place`` orders an arena's chunks, so that chunks that are adjacent in memory have consecutive places."""

    slab: mmap.mmap
    start: int
    view: memoryview
    place: int


class ChunkArena:
    """All chunks of one size. Not thread-safe: the pool's lock guards it.

    A chunk is lent, free (written before and kept for reuse) or bare (not backed by memory). If ``kept`` is
    False, returned chunks are unmapped instead of kept, as Kafka does with buffers of an unusual size.
    ``heap`` marks memory that does not count as the pool's.
    """

    __slots__ = ("_bare", "_carved", "_lent", "_pages", "_returns", "free", "heap", "kept", "size")

    def __init__(self, size: int, *, kept: bool, heap: bool = False) -> None:
        self.size = size
        self.kept = kept
        self.heap = heap
        self.free: list[Chunk] = []
        self._bare: list[Chunk] = []
        # The number of chunks so far, and of returns of several chunks since the last sort.
        self._carved = self._returns = 0
        self._lent: set[Chunk] = set()
        self._pages = _SharedPages(size) if kept and size < mmap.PAGESIZE else None

    def take(self, count: int) -> list[Chunk]:
        """Lend ``count`` chunks, free ones first.

        The chunk returned last is taken first, as it is still in the CPU's cache. After a sort, the chunk
        with the lowest place is first.

        Raises MemoryError or OSError, changing nothing, if the system has no memory.
        """
        free = self.free
        if count == 1 and free:
            # This is by far the most frequent request. The general code below takes three times as long.
            chunk = free.pop()
            self._lent.add(chunk)
            return [chunk]
        missing = count - len(free)
        if missing <= 0:
            taken = free[: -count - 1 : -1]
            del free[len(free) - count :]
        else:
            while len(self._bare) < missing:
                self._carve(missing)
            # Bare chunks are in descending order and taken from the end, so that neighbours stay so.
            bare = self._bare[: -missing - 1 : -1]
            del self._bare[-missing:]
            if self._pages is not None:
                self._pages.used(bare)
            taken = free[::-1] + bare
            free.clear()
        self._lent.update(taken)
        return taken

    def _carve(self, wanted: int) -> None:
        count = min(_SLAB_CHUNKS, max(1, _SLAB_BYTES // self.size)) if self.kept else wanted
        # A shared mapping would be shared memory for the kernel, and forked children would share it.
        slab = mmap.mmap(-1, self.size * count, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = memoryview(slab)
        size = self.size
        carved = [
            Chunk(slab, index * size, whole[index * size : (index + 1) * size], self._carved + index)
            for index in range(count - 1, -1, -1)
        ]
        self._carved += count
        self._bare[:0] = carved
        if self._pages is not None:
            self._pages.fresh(carved)

    def give(self, chunks: list[Chunk]) -> None:
        """Take lent chunks back. Raises BufferOwnershipError, changing nothing, if one is not lent."""
        lent = self._lent
        if len(chunks) == 1 and chunks[0] in lent:
            lent.remove(chunks[0])
            if self.kept:
                self.free.append(chunks[0])
            elif lent:
                _forget_pages(chunks, self.size)
            return
        if not lent.issuperset(chunks):
            raise BufferOwnershipError(f"chunks of {self.size} bytes returned that are not lent out")
        before = len(lent)
        lent.difference_update(chunks)
        if before - len(lent) != len(chunks):
            lent.update(chunks)
            raise BufferOwnershipError(f"one chunk of {self.size} bytes returned twice in one call")
        if self.kept:
            self.free.extend(reversed(chunks))
            self._returns += 1
            if self._returns >= max(_RETURNS_BEFORE_SORT, len(self.free) // _FREE_CHUNKS_A_RETURN):
                self._returns = 0
                self.free.sort(key=attrgetter("place"), reverse=True)
        elif lent:
            # The mapping stays as long as another of its chunks is in use, so only its pages can be freed.
            _forget_pages(chunks, self.size)

    @property
    def lent(self) -> int:
        return len(self._lent)

    def discard_free(self, wanted: int | None = None) -> int:
        """Free the memory of ``wanted`` free chunks (None: of all), and return how many there were.

        The chunks that would be taken last go first. Only whole pages can be freed, so the memory of chunks
        smaller than a page is freed with the last chunk on that page.
        """
        count = len(self.free) if wanted is None else min(wanted, len(self.free))
        if not count:
            return 0
        leaving = self.free[:count]
        del self.free[:count]
        if not self._lent and not self.free:
            # No chunk of any mapping is in use: unmap all mappings.
            self._bare.clear()
            if self._pages is not None:
                self._pages = _SharedPages(self.size)
            return count
        if self._pages is None:
            _forget_pages(leaving, self.size)
        else:
            self._pages.bare(leaving)
        self._bare += reversed(leaving)
        return count


class _SharedPages:
    """The unused part of each page, if chunks are smaller than pages.

    Chunks become bare one at a time and in any order. If each call only looked at the pages of its own
    chunks, it would hardly ever find a whole page, and 64 MiB of 1 KiB chunks would stay resident.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        # The bytes of bare chunks, by mapping and page.
        self._bare: dict[tuple[int, int], int] = {}

    def _parts(self, chunk: Chunk) -> Iterator[tuple[int, int]]:
        """The pages that a chunk lies on, each with the number of the chunk's bytes on it."""
        at, end = chunk.start, chunk.start + self._size
        while at < end:
            page = at // mmap.PAGESIZE
            stop = min(end, (page + 1) * mmap.PAGESIZE)
            yield page, stop - at
            at = stop

    def fresh(self, chunks: Sequence[Chunk]) -> None:
        """Add the chunks of a new mapping. None of its pages was touched yet."""
        for chunk in chunks:
            for page, part in self._parts(chunk):
                place = id(chunk.slab), page
                self._bare[place] = self._bare.get(place, 0) + part

    def used(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            for page, part in self._parts(chunk):
                self._bare[id(chunk.slab), page] -= part

    def bare(self, chunks: Sequence[Chunk]) -> None:
        """Mark chunks as bare. Pages on which all chunks are bare are returned to the system."""
        for chunk in chunks:
            for page, part in self._parts(chunk):
                bare = self._bare[id(chunk.slab), page] = self._bare[id(chunk.slab), page] + part
                start = page * mmap.PAGESIZE
                if bare == min(mmap.PAGESIZE, len(chunk.slab) - start):
                    chunk.slab.madvise(mmap.MADV_DONTNEED, start, bare)


def _forget_pages(chunks: list[Chunk], size: int) -> None:
    """Return the pages of these chunks to the system, with one call for each run of adjacent chunks."""
    slabs = {id(chunk.slab): chunk.slab for chunk in chunks}
    places = sorted((id(chunk.slab), chunk.start) for chunk in chunks)
    at = 0
    while at < len(places):
        slab, begin = places[at]
        end = begin + size
        at += 1
        while at < len(places) and places[at] == (slab, end):
            end += size
            at += 1
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        last = len(slabs[slab]) if end == len(slabs[slab]) else end // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last:
            slabs[slab].madvise(mmap.MADV_DONTNEED, first, last - first)
