"""Chunks of one size, cut from anonymous mappings that the kernel backs only once they are written.

Mappings instead of one bytearray per chunk, measured on Linux with 64 MiB in 16 KiB chunks (Python 3.11):
after 63 of 64 chunks were freed, bytearrays still held all 64 MiB resident (the C heap was fragmented),
mappings held 2 MiB after MADV_DONTNEED, in 4 ms for everything. Assigning a slice to a mapping costs 88 ns
and 4 KiB of copying, to a memoryview 97 and to a bytearray 268; it also takes any contiguous buffer.
Huge pages would halve the first touch (14 ms for 64 MiB instead of 29), change nothing once warm, and make
2 MiB resident for the first byte: not worth it.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from operator import attrgetter

from kafka_sink.errors import BufferOwnershipError

# One mapping holds up to this many bytes or chunks; making it stays below 50 us under the pool's lock.
_SLAB_BYTES = 1 << 20
_SLAB_CHUNKS = 64
# After so many returns of several chunks, the free ones are sorted by place. Without this, a batch's 16
# chunks lay in 15 places after a while, now in 6. Each place costs the sender a checksum and a buffer.
_RETURNS_BEFORE_SORT = 16
# A sort of 65,536 free chunks (1 GiB) takes 15 ms under the pool's lock. So there are more returns before it.
_FREE_CHUNKS_A_RETURN = 128


class Chunk:
    """``size`` bytes at ``start`` of ``slab``; ``view`` is the same memory, writable.

    ``place`` orders an arena's chunks so that neighbours follow each other.
    """

    __slots__ = ("place", "slab", "start", "view")

    def __init__(self, slab: mmap.mmap, start: int, view: memoryview, place: int) -> None:
        self.place = place
        self.slab = slab
        self.start = start
        self.view = view


class ChunkArena:
    """All chunks of one size. Not thread-safe: the pool's lock guards it.

    A chunk is lent, free (written before, kept for reuse) or bare (no memory behind it). ``kept`` False:
    what comes back is unmapped instead, as Kafka does with buffers of an odd size. ``heap``: memory that
    is counted outside the pool.
    """

    __slots__ = ("_bare", "_carved", "_lent", "_pages", "_returns", "free", "heap", "kept", "size")

    def __init__(self, size: int, *, kept: bool, heap: bool = False) -> None:
        self.size = size
        self.kept = kept
        self.heap = heap
        self.free: list[Chunk] = []
        self._bare: list[Chunk] = []
        # Chunks made so far, and returns of several since the last sort.
        self._carved = self._returns = 0
        self._lent: set[Chunk] = set()
        self._pages = _SharedPages(size) if kept and size < mmap.PAGESIZE else None

    def take(self, count: int) -> list[Chunk]:
        """``count`` chunks, free ones first. Of these the last one returned comes first, as it is still in a
        cache, or after a sort the one that lies first.

        Raises MemoryError or OSError, changing nothing, when the system has no memory.
        """
        free = self.free
        if count == 1 and free:
            # By far the most frequent request; the general way costs three times as much.
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
            # Bare chunks lie in ascending order from the end, so that neighbours stay neighbours.
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
        slab = _map(self.size * count)
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
        """Take lent chunks back. Raises BufferOwnershipError, changing nothing, if any is not lent."""
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
            # Their mapping stays while another of its chunks is in use.
            _forget_pages(chunks, self.size)

    @property
    def lent(self) -> int:
        return len(self._lent)

    def discard_free(self, wanted: int | None = None) -> int:
        """Give the memory of ``wanted`` free chunks (all: None) back to the system; return how many.

        Those that would be taken last go first. Only whole pages can go, so that chunks below a page's size
        leave with the last of those that share their page.
        """
        count = len(self.free) if wanted is None else min(wanted, len(self.free))
        if not count:
            return 0
        leaving = self.free[:count]
        del self.free[:count]
        if not self._lent and not self.free:
            # Nobody holds a part of any mapping: unmap them all.
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
    """How much of each page no chunk in use lies on, where chunks are smaller than pages.

    Chunks become bare one by one and in any order: were the pages of each call's chunks looked at alone,
    hardly any would ever go, and 64 MiB of 1 KiB chunks stayed resident beside 64 MiB of larger ones.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        # By mapping and page: bytes of bare chunks.
        self._bare: dict[tuple[int, int], int] = {}

    def _parts(self, chunk: Chunk) -> Iterator[tuple[int, int]]:
        """Pages that a chunk lies on, and bytes of it there."""
        at, end = chunk.start, chunk.start + self._size
        while at < end:
            page = at // mmap.PAGESIZE
            stop = min(end, (page + 1) * mmap.PAGESIZE)
            yield page, stop - at
            at = stop

    def fresh(self, chunks: Sequence[Chunk]) -> None:
        """Chunks of a new mapping, none of whose pages was touched yet."""
        for chunk in chunks:
            for page, part in self._parts(chunk):
                place = id(chunk.slab), page
                self._bare[place] = self._bare.get(place, 0) + part

    def used(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            for page, part in self._parts(chunk):
                self._bare[id(chunk.slab), page] -= part

    def bare(self, chunks: Sequence[Chunk]) -> None:
        """Chunks hold nothing any more: pages that are all bare now go back to the system."""
        for chunk in chunks:
            for page, part in self._parts(chunk):
                bare = self._bare[id(chunk.slab), page] = self._bare[id(chunk.slab), page] + part
                start = page * mmap.PAGESIZE
                if bare == min(mmap.PAGESIZE, len(chunk.slab) - start):
                    _forget(chunk.slab, start, bare)


def _map(size: int) -> mmap.mmap:
    # Private: a shared anonymous mapping is shared memory to the kernel, and to forked children.
    if hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return mmap.mmap(-1, size)


def _forget_pages(chunks: list[Chunk], size: int) -> None:
    """Drop the pages behind chunks, runs of neighbours together."""
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
            _forget(slabs[slab], first, last - first)


def _forget(slab: mmap.mmap, start: int, size: int) -> None:
    if hasattr(mmap, "MADV_DONTNEED"):
        slab.madvise(mmap.MADV_DONTNEED, start, size)
