"""The memory of a batch as the accumulator uses it, with either allocation strategy, or shared by pieces."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from kafka_sink.accumulator.buffer_pool import BufferPool, LentChunks, PoolClient
from kafka_sink.errors import BufferOwnershipError

# Contiguous bytes; numpy and pyarrow data come as memoryviews.
Data = bytes | bytearray | memoryview


class BatchBuffer(Protocol):
    """The memory of one record batch. Not thread-safe: it has one owner at a time.

    ``capacity`` bytes may be written without growth, ``size`` bytes are written. ``overflowed``: whether
    ``write_growing`` took heap memory that nobody had reserved.
    """

    capacity: int
    size: int
    overflowed: bool

    @property
    def heap_bytes(self) -> int:
        """Bytes held from outside the pool."""

    def write(self, data: Data) -> None:
        """Append. Raises ValueError, changing nothing, if there is no room."""

    def write_growing(self, *parts: Data) -> bool:
        """Append all parts, growing as needed: as ``try_grow`` does, otherwise from the heap. Return whether
        it took heap memory. The data cannot wait, so it may exceed the heap's limit; then no new request is
        granted until enough heap memory has come back. What is written stays where it is."""

    def truncate(self, size: int) -> None:
        """Drop the bytes past ``size`` but keep their memory."""

    def views(self, start: int = 0, end: int | None = None) -> list[memoryview]:
        """The bytes written from ``start`` to ``end`` (default: all), in order and without a copy. No view is
        empty. They are for reading, until the memory is released."""

    def patch(self, data: Data, position: int = 0) -> None:
        """Overwrite written bytes. Raises ValueError, changing nothing, past their end."""

    def trim(self) -> None:
        """Return memory that holds no data. Called when the batch takes no more rows."""

    def release(self, returned: list[LentChunks] | None = None) -> None:
        """Return all memory. A second call raises BufferOwnershipError and changes nothing; so does growing
        afterwards. With ``returned`` the pool's chunks go there, and the caller calls ``give_all``."""


class BufferAllocator(ABC):
    """One producer's access to the pool, chosen by buffer.memory.allocation.strategy.

    ``projected`` is the number of bytes that a batch will hold in all, header included; ``first_record`` that
    with its first record alone (default: the same).

    ``batch_size``: default the pool's poolable size; given if producers share a pool.
    """

    def __init__(
        self, pool: BufferPool, batch_size: int | None = None, heap_bytes: int | None = None
    ) -> None:
        """``heap_bytes``: what batches may need beyond the pool; default two of them, for growing and
        splitting one."""
        self.pool = pool
        # batch.size = 0 is legal: every record then gets a buffer of its own size.
        self._batch_size = max(1, pool.poolable_size if batch_size is None else batch_size)
        self._client = PoolClient()
        self._heap_bytes = 2 * self._batch_size if heap_bytes is None else heap_bytes
        self.begin()

    @abstractmethod
    def try_open(self, projected: int, first_record: int | None = None) -> BatchBuffer | None:
        """A new batch's memory, or None when the pool cannot give it now or others wait. Never blocks."""

    def try_open_all(self, projected: Sequence[int]) -> Sequence[BatchBuffer]:
        """As ``try_open`` for each, up to the first that the pool refuses."""
        found: list[BatchBuffer] = []
        try:
            for size in projected:
                buffer = self.try_open(size)
                if buffer is None:
                    break
                found.append(buffer)
        except BaseException:
            for buffer in found:
                buffer.release()
            raise
        return found

    @abstractmethod
    def open(
        self,
        projected: int,
        timeout_ms: float,
        watch: Callable[[], None] | None = None,
        first_record: int | None = None,
    ) -> BatchBuffer:
        """A new batch's memory; waits in line for it. ``watch`` is called at the start of the wait and from
        time to time, and may raise to end it.

        Raises BufferExhaustedError after the timeout, RecordTooLargeError at once for more than
        buffer.memory, ProducerClosedError when closed; nothing stays reserved then."""

    @abstractmethod
    def try_grow(self, buffer: BatchBuffer, projected: int) -> bool:
        """Make room for ``projected`` bytes in all. Return False, changing nothing, where memory is short.

        Never blocks."""

    @abstractmethod
    def growable_bytes(self, buffer: BatchBuffer) -> int:
        """The bytes by which a batch could grow now. A hint: there may be fewer a moment later."""

    @property
    @abstractmethod
    def has_fixed_buffers(self) -> bool:
        """Whether a batch takes batch.size from the pool when it opens, and nothing later."""

    def begin(self) -> None:
        """A task begins: the heap may hold what its batches need, and the pool's peaks are reset to the
        present values. A new allocator has begun."""
        self.pool.admit_heap(self._client, self._heap_bytes)
        self.pool.restart_maxima()

    def rest(self) -> None:
        """Between tasks: the heap's limit is what other producers need, and free memory goes back to the
        system."""
        self.pool.withdraw_heap(self._client)
        self.pool.trim_free()

    def close(self) -> None:
        """End this producer's waits with an error. Memory in use may still grow and be returned."""
        self.pool.close_client(self._client)
        self.pool.trim_free()


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
        for part in parts:
            self.write(part)
        return False

    def truncate(self, size: int) -> None:
        """A piece is as long as it was made."""
        if size != self.size:
            raise ValueError(f"cannot truncate {self.size} bytes to {size}")

    def trim(self) -> None:
        """Nothing to return: the buffer goes back whole."""

    def release(self, returned: list[LentChunks] | None = None) -> None:
        if self._released:
            raise BufferOwnershipError("a batch's memory was released twice")
        self._released = True
        self._shared.users -= 1
        if not self._shared.users:
            self._shared.buffer.release(returned)
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
    taken: list[tuple[int, int]] = []
    while size:
        begin, end = free.pop(0)
        stop = min(end, begin + size)
        taken.append((begin, stop))
        size -= stop - begin
        if stop < end:
            free.insert(0, (stop, end))
    return taken
