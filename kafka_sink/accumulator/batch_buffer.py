"""What the accumulator asks of a batch's memory, whichever allocation strategy stands behind it."""

from __future__ import annotations

from typing import Protocol

Data = bytes | memoryview


class BatchBuffer(Protocol):
    """Memory of one record batch; not thread-safe, it has one owner at a time.

    ``capacity`` bytes may be written without growth, ``size`` bytes are written.
    """

    capacity: int
    size: int

    def write(self, data: Data) -> None:
        """Appends; raises ValueError, changing nothing, where there is no room."""

    def write_growing(self, data: Data) -> bool:
        """Appends and grows as needed: pool without blocking, then heap. True when heap was needed."""

    def truncate(self, size: int) -> None:
        """Forgets what was written past ``size``; the memory stays."""

    def views(self, start: int = 0) -> list[memoryview]:
        """The bytes written from ``start`` on, in order and without a copy."""

    def patch(self, data: bytes) -> None:
        """Overwrites the first bytes; they lie in the first chunk."""

    def trim(self) -> None:
        """Returns memory that holds no data; the batch takes no more."""

    def release(self) -> None:
        """Returns everything, exactly once; a second call raises KafkaSinkError."""


class BufferAllocator(Protocol):
    """One per producer, chosen by buffer.memory.allocation.strategy. ``projected`` is what a batch will
    hold, in bytes, header included."""

    @property
    def queued(self) -> int:
        """Requests that wait for memory."""

    def try_open(self, projected: int) -> BatchBuffer | None:
        """A new batch's memory, or None when the pool cannot give it now."""

    def open(self, projected: int, timeout_ms: float) -> BatchBuffer:
        """Waits in line. Raises BufferExhaustedError, or RecordTooLargeError at once."""

    def try_grow(self, buffer: BatchBuffer, projected: int) -> bool:
        """Room for ``projected`` bytes in all, or False with nothing changed."""

    def open_overflow(self, projected: int) -> BatchBuffer:
        """For the pieces of a split batch: pool without blocking, then heap."""

    def trim_free(self) -> None:
        """Gives free memory back to the system."""

    def close(self) -> None:
        """Wakes all waiters with an error."""
