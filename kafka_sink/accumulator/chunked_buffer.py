"""``incremental``: a batch is a list of pool chunks that follows its data (KAFKA-20576)."""

from __future__ import annotations

from kafka_sink.accumulator.batch_buffer import BatchBuffer, Data
from kafka_sink.accumulator.buffer_pool import BufferPool
from kafka_sink.errors import KafkaSinkError

LARGEST_CHUNK = 16384
# A chunk always holds the 61-byte batch header.
SMALLEST_CHUNK = 128


def chunk_size(batch_size: int) -> int:
    """Bytes of a chunk for a batch.size."""
    return max(SMALLEST_CHUNK, min(LARGEST_CHUNK, batch_size))


class ChunkedBuffer:
    """Chunks of one size; the last few may come from the heap, which are counted apart."""

    __slots__ = ("_chunk", "_chunks", "_pool", "_pooled", "_released", "capacity", "size")

    def __init__(self, pool: BufferPool, chunks: list[memoryview], pooled: int) -> None:
        self._pool = pool
        self._chunk = pool.poolable_size
        self._chunks = chunks
        self._pooled = pooled
        self._released = False
        self.capacity = len(chunks) * self._chunk
        self.size = 0

    def write(self, data: Data) -> None:
        """See BatchBuffer."""
        length = len(data)
        if self.size + length > self.capacity:
            raise ValueError(f"{length} bytes do not fit: {self.size} of {self.capacity} are written")
        chunk = self._chunk
        index, at = divmod(self.size, chunk)
        self.size += length
        if at + length <= chunk:
            # Also covers an empty write at the very end, where there is no chunk to index.
            if length:
                self._chunks[index][at : at + length] = data
            return
        view = memoryview(data)
        done = chunk - at
        if done:
            self._chunks[index][at:] = view[:done]
        while done < length:
            index += 1
            part = view[done : done + chunk]
            self._chunks[index][: len(part)] = part
            done += chunk

    def write_growing(self, data: Data) -> bool:
        """See BatchBuffer."""
        missing = self.missing(self.size + len(data))
        overflow = False
        if missing:
            chunks = None if self._pooled < len(self._chunks) else self._pool.try_allocate(missing)
            if chunks is None:
                overflow = True
                chunks = [self._pool.heap_allocate(self._chunk) for _ in range(missing)]
                self._chunks += chunks
                self.capacity += missing * self._chunk
            else:
                self.extend(chunks)
        self.write(data)
        return overflow

    def missing(self, projected: int) -> int:
        """Chunks to add for ``projected`` bytes in all."""
        return max(0, -(-(projected - self.capacity) // self._chunk))

    def extend(self, chunks: list[memoryview]) -> None:
        """Takes over pool chunks."""
        if self._pooled != len(self._chunks):
            raise KafkaSinkError("pool chunks after heap chunks")
        self._chunks += chunks
        self._pooled += len(chunks)
        self.capacity += len(chunks) * self._chunk

    def truncate(self, size: int) -> None:
        """See BatchBuffer."""
        if not 0 <= size <= self.size:
            raise ValueError(f"cannot truncate {self.size} bytes to {size}")
        self.size = size

    def views(self, start: int = 0) -> list[memoryview]:
        """See BatchBuffer."""
        chunk = self._chunk
        first, at = divmod(start, chunk)
        last, end = divmod(self.size, chunk)
        if start >= self.size:
            return []
        if first == last:
            return [self._chunks[first][at:end]]
        found = self._chunks[first:last]
        if at:
            found[0] = found[0][at:]
        if end:
            found.append(self._chunks[last][:end])
        return found

    def patch(self, data: bytes) -> None:
        """See BatchBuffer."""
        self._chunks[0][: len(data)] = data

    def trim(self) -> None:
        """See BatchBuffer."""
        used = max(1, -(-self.size // self._chunk))
        self._return_from(used)
        self.capacity = used * self._chunk

    def release(self) -> None:
        """See BatchBuffer."""
        if self._released:
            raise KafkaSinkError("a batch's memory was released twice")
        self._released = True
        self._return_from(0)
        self.capacity = self.size = 0

    def _return_from(self, keep: int) -> None:
        if self._pooled < len(self._chunks):
            heap_from = max(keep, self._pooled)
            self._pool.heap_deallocate((len(self._chunks) - heap_from) * self._chunk)
            del self._chunks[heap_from:]
        if keep < self._pooled:
            unused = self._chunks[keep:]
            del self._chunks[keep:]
            self._pooled = keep
            self._pool.deallocate(unused)


class IncrementalAllocator:
    """Only the chunks that are missing, all of one request in a single pool call."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool

    @property
    def queued(self) -> int:
        """See BufferAllocator."""
        return self._pool.queued

    def try_open(self, projected: int) -> ChunkedBuffer | None:
        """See BufferAllocator."""
        chunks = self._pool.try_allocate(self._count(projected))
        return None if chunks is None else ChunkedBuffer(self._pool, chunks, len(chunks))

    def open(self, projected: int, timeout_ms: float) -> ChunkedBuffer:
        """See BufferAllocator."""
        chunks = self._pool.allocate(self._count(projected), timeout_ms)
        return ChunkedBuffer(self._pool, chunks, len(chunks))

    def try_grow(self, buffer: BatchBuffer, projected: int) -> bool:
        """See BufferAllocator."""
        if not isinstance(buffer, ChunkedBuffer):
            raise TypeError(f"not a buffer of this allocator: {type(buffer).__name__}")
        missing = buffer.missing(projected)
        if not missing:
            return True
        chunks = self._pool.try_allocate(missing)
        if chunks is None:
            return False
        buffer.extend(chunks)
        return True

    def open_overflow(self, projected: int) -> ChunkedBuffer:
        """See BufferAllocator."""
        opened = self.try_open(projected)
        if opened is not None:
            return opened
        count = self._count(projected)
        chunks = [self._pool.heap_allocate(self._pool.poolable_size) for _ in range(count)]
        return ChunkedBuffer(self._pool, chunks, 0)

    def _count(self, projected: int) -> int:
        return max(1, -(-projected // self._pool.poolable_size))

    def trim_free(self) -> None:
        """See BufferAllocator."""
        self._pool.trim_free()

    def close(self) -> None:
        """See BufferAllocator."""
        self._pool.close()
