"""What the accumulator asks of a batch's memory, whichever allocation strategy stands behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kafka_sink.accumulator.pool_metrics import PoolMetrics

# Contiguous bytes; numpy and pyarrow data come as memoryviews.
Data = bytes | bytearray | memoryview


class BatchBuffer(Protocol):
    """Memory of one record batch; not thread-safe, it has one owner at a time.

    ``capacity`` bytes may be written without growth, ``size`` bytes are written.
    """

    capacity: int
    size: int

    @property
    def heap_bytes(self) -> int:
        """Bytes held from outside the pool."""

    def write(self, data: Data) -> None:
        """Appends; raises ValueError, changing nothing, where there is no room."""

    def write_growing(self, data: Data) -> bool:
        """Appends and grows as needed: pool without blocking, then heap. True when heap was needed now:
        the caller then closes the batch early. What is written here was reserved, so it may exceed the heap's
        limit; nothing new is reserved then until others have returned theirs."""

    def truncate(self, size: int) -> None:
        """Forgets what was written past ``size``; the memory stays."""

    def views(self, start: int = 0, end: int | None = None) -> list[memoryview]:
        """The bytes written from ``start`` to ``end`` (default: all), in order, without a copy, none
        empty. For reading, and only until the memory is released."""

    def patch(self, data: Data, position: int = 0) -> None:
        """Overwrites written bytes; raises ValueError, changing nothing, past their end."""

    def trim(self) -> None:
        """Returns memory that holds no data; called when the batch takes no more."""

    def release(self) -> None:
        """Returns everything, exactly once. A second call raises BufferOwnershipError, changing nothing, as
        does growing afterwards."""


class BufferAllocator(Protocol):
    """One per producer, chosen by buffer.memory.allocation.strategy. ``projected`` is what a batch will
    hold in all, in bytes, header included."""

    @property
    def queued(self) -> int:
        """Requests that wait for memory."""

    @property
    def overdrawn(self) -> bool:
        """Whether reserved rows took more heap than its limit, so that no new ones may be reserved."""

    def try_open(self, projected: int) -> BatchBuffer | None:
        """A new batch's memory, or None when the pool cannot give it now or others wait. Never blocks."""

    def open(self, projected: int, timeout_ms: float, watch: Callable[[], None] | None = None) -> BatchBuffer:
        """Waits in line; ``watch`` is called there at once and now and then, and may raise to end the wait.

        Raises BufferExhaustedError after the timeout, RecordTooLargeError at once for more than
        buffer.memory, ProducerClosedError when closed; nothing stays reserved then."""

    def try_grow(self, buffer: BatchBuffer, projected: int) -> bool:
        """Room for ``projected`` bytes in all, or False with nothing changed. Never blocks."""

    def growable_bytes(self, buffer: BatchBuffer) -> int:
        """By how much a batch could grow now. A hint: the pool may have less a moment later."""

    @property
    def moves_to_grow(self) -> bool:
        """Whether a batch that outgrows its first buffer moves to a larger one."""

    def open_overflow(self, projected: int) -> BatchBuffer:
        """For the pieces of a split batch: pool without blocking, then heap. Raises BufferExhaustedError
        at the heap's limit."""

    def metrics(self) -> PoolMetrics:
        """The pool's, which producers of a worker may share."""

    def restart_maxima(self) -> None:
        """The pool's peaks start from what is held now."""

    def trim_free(self) -> None:
        """Gives free memory back to the system."""

    def close(self) -> None:
        """Wakes this producer's waiters with an error; memory in use may still grow and be returned."""
