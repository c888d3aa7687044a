"""The memory of a split batch's pieces: parts of the batch's own memory, so that a split needs no other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kafka_sink.accumulator.batch_buffer import BatchBuffer, Data
from kafka_sink.errors import BufferOwnershipError


class _SharedBuffer:
    """A batch's buffer, which goes back to the pool with the last of its ``users``."""

    __slots__ = ("buffer", "users")

    def __init__(self, buffer: BatchBuffer) -> None:
        self.buffer = buffer
        self.users = 0


class PieceBuffer:
    """A BatchBuffer: parts of a shared buffer, as the whole memory of one sealed batch. Its size is fixed.

    Pieces of one batch, and pieces of those, share its buffer. As what is written there stays where it is, a
    piece in flight does not mind that another is split.
    """

    __slots__ = ("_parts", "_released", "_shared", "capacity", "size")

    # A piece is sealed. The memory that its pieces took beyond the batch's own counts in the pool's metrics.
    heap_bytes = 0
    overflowed = False

    def __init__(self, shared: _SharedBuffer, parts: Sequence[tuple[int, int]]) -> None:
        self._shared = shared
        shared.users += 1
        self._parts = parts
        self._released = False
        self.capacity = self.size = sum(end - start for start, end in parts)

    def _ranges(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Where the bytes from ``start`` to ``end`` lie in the shared buffer, in order."""
        if not 0 <= start <= end <= self.size:
            raise ValueError(f"no bytes {start} to {end} in {self.size} that are written")
        at = 0
        for begin, stop in self._parts:
            first, last = max(start - at, 0), min(end - at, stop - begin)
            if first < last:
                yield begin + first, begin + last
            at += stop - begin

    def views(self, start: int = 0, end: int | None = None) -> list[memoryview]:
        ranges = self._ranges(start, self.size if end is None else end)
        return [view for begin, stop in ranges for view in self._shared.buffer.views(begin, stop)]

    def patch(self, data: Data, position: int = 0) -> None:
        source = memoryview(data)
        done = 0
        for begin, stop in self._ranges(position, position + len(source)):
            self._shared.buffer.patch(source[done : done + stop - begin], begin)
            done += stop - begin

    def write(self, data: Data) -> None:
        """A piece is written when it is made."""
        if len(data):
            raise ValueError(f"{len(data)} bytes do not fit: {self.size} of {self.capacity} are written")

    def write_growing(self, *parts: Data) -> bool:
        """See ``write``."""
        for part in parts:
            self.write(part)
        return False

    def truncate(self, size: int) -> None:
        """A piece is as long as it was made."""
        if size != self.size:
            raise ValueError(f"cannot truncate {self.size} bytes to {size}")

    def trim(self) -> None:
        """Nothing to return: the buffer goes back whole."""

    def release(self) -> None:
        if self._released:
            raise BufferOwnershipError("a batch's memory was released twice")
        self._released = True
        self._shared.users -= 1
        if not self._shared.users:
            self._shared.buffer.release()
        self._parts = ()
        self.capacity = self.size = 0


def share(buffer: BatchBuffer) -> PieceBuffer:
    """What a batch holds in place of ``buffer`` when its pieces are to share it."""
    if isinstance(buffer, PieceBuffer):
        return buffer
    return PieceBuffer(_SharedBuffer(buffer), [(0, buffer.size)])


def put_pieces(whole: PieceBuffer, pieces: Sequence[bytes | bytearray]) -> list[PieceBuffer]:
    """Buffers that hold these bytes, in order, in the memory of ``whole``, whose own bytes are lost.

    What does not fit goes behind everything else in the shared buffer, which grows for it: from the pool
    without blocking, otherwise from the heap, also beyond its limit. ``whole`` has to be released as before.
    """
    shared = whole._shared
    missing = sum(map(len, pieces)) - whole.size
    free = list(whole._parts)
    if missing > 0:
        # First, as it may raise.
        begin = shared.buffer.size
        shared.buffer.write_growing(bytes(missing))
        free.append((begin, begin + missing))
    made = []
    for data in pieces:
        buffer = PieceBuffer(shared, _cut(free, len(data)))
        made.append(buffer)
        buffer.patch(data)
    return made


def _cut(free: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Take ``size`` bytes from the start of ``free``."""
    taken: list[tuple[int, int]] = []
    while size:
        begin, end = free.pop(0)
        stop = min(end, begin + size)
        taken.append((begin, stop))
        size -= stop - begin
        if stop < end:
            free.insert(0, (stop, end))
    return taken
