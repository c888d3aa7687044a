"""``buffer.memory``: real, reused memory with first-come-first-served waiters.

All of it is handed out in units of ``poolable_size`` from a free list, or as one buffer of another size
that is counted but not kept (Kafka's BufferPool). Allocation is lazy. Accounting, at every moment outside
the lock: allocated = used + free <= total.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kafka_sink.errors import BufferExhaustedError, KafkaSinkError, RecordTooLargeError

Memory = memoryview


class _Waiter:
    """One blocked request: a unit, all of its chunks or none."""

    __slots__ = ("event", "gathered", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.gathered = 0
        self.event = threading.Event()


@dataclass(frozen=True, slots=True)
class PoolMetrics:
    """Kafka's names with underscores; bytes, nanoseconds and counts."""

    buffer_total_bytes: int
    buffer_available_bytes: int
    bufferpool_wait_time_total: int
    buffer_exhausted_total: int
    waiting_threads: int
    allocated_bytes: int
    used_bytes: int
    peak_used_bytes: int
    heap_bytes: int
    peak_heap_bytes: int


class BufferPool:
    """Thread-safe. Sizes are bytes; a request is granted whole or not at all."""

    def __init__(self, total_bytes: int, poolable_size: int, *, clock_ms: Callable[[], float]) -> None:
        self.total_bytes = total_bytes
        self.poolable_size = poolable_size
        self._clock_ms = clock_ms
        self._lock = threading.Lock()  # guards everything below
        self._free: list[Memory] = []
        self._used = 0
        self._peak_used = 0
        # Granted to waiters, piece by piece, but not yet taken by them; counts as used.
        self._waiters: deque[_Waiter] = deque()
        self._closed = False
        self._wait_ns = 0
        self._exhausted = 0
        self._heap = 0
        self._peak_heap = 0

    # -- taking -----------------------------------------------------------------------------------

    def try_allocate(self, count: int, size: int | None = None) -> list[Memory] | None:
        """``count`` buffers of ``size`` (default: the poolable size), or None if they are not to be had
        now. Never overtakes a waiter."""
        wanted = count * (size or self.poolable_size)
        with self._lock:
            if self._waiters or self._used + wanted > self.total_bytes or self._closed:
                return None
            self._account(wanted)
            return self._hand_out(count, size)

    def allocate(self, count: int, timeout_ms: float, size: int | None = None) -> list[Memory]:
        """Waits up to ``timeout_ms`` (max.block.ms) in line with the others.

        Raises RecordTooLargeError at once for more than the pool ever has, BufferExhaustedError after
        the timeout; either way nothing stays reserved.
        """
        wanted = count * (size or self.poolable_size)
        if wanted > self.total_bytes:
            raise RecordTooLargeError(
                f"{wanted} bytes are needed at once, but kafka.buffer.memory is {self.total_bytes}; "
                "raise kafka.buffer.memory or send smaller records"
            )
        with self._lock:
            self._raise_if_closed()
            if not self._waiters and self._used + wanted <= self.total_bytes:
                self._account(wanted)
                return self._hand_out(count, size)
            waiter = _Waiter(wanted)
            self._waiters.append(waiter)
            self._serve()
        return self._wait(waiter, count, timeout_ms, size)

    def _wait(self, waiter: _Waiter, count: int, timeout_ms: float, size: int | None) -> list[Memory]:
        started = self._clock_ms()
        granted = False
        try:
            waiter.event.wait(timeout_ms / 1000)
            with self._lock:
                self._raise_if_closed()
                if waiter.gathered < waiter.size:
                    self._exhausted += 1
                    raise BufferExhaustedError(
                        f"no memory within kafka.max.block.ms = {timeout_ms:.0f} ms: {waiter.size} bytes "
                        f"wanted, {self.total_bytes - self._used + waiter.gathered} of "
                        f"kafka.buffer.memory = {self.total_bytes} free; the brokers take rows more slowly "
                        "than the task makes them, or a broker does not answer"
                    )
                granted = True
                return self._hand_out(count, size)
        finally:
            # Also on KeyboardInterrupt and task kill: what was gathered goes to the next in line.
            with self._lock:
                self._wait_ns += int((self._clock_ms() - started) * 1e6)
                if not granted:
                    if waiter in self._waiters:
                        self._waiters.remove(waiter)
                    self._used -= waiter.gathered
                    self._serve()

    def _account(self, wanted: int) -> None:
        self._used += wanted
        if self._used > self._peak_used:
            self._peak_used = self._used

    def _hand_out(self, count: int, size: int | None) -> list[Memory]:
        """Buffers for memory that is accounted as used already."""
        if size is not None and size != self.poolable_size:
            self._shrink_free(self.total_bytes - self._used)
            return [memoryview(bytearray(size)) for _ in range(count)]
        free = self._free
        if len(free) >= count:
            taken = free[-count:]
            del free[-count:]
            return taken
        taken = free[:]
        free.clear()
        taken += [memoryview(bytearray(self.poolable_size)) for _ in range(count - len(taken))]
        return taken

    def _shrink_free(self, limit: int) -> None:
        """Drops free buffers so that used + free stays within the total."""
        keep = max(limit, 0) // self.poolable_size
        if len(self._free) > keep:
            del self._free[keep:]

    def _serve(self) -> None:
        """Gives what is free to the longest waiter first; the next gets something once that one is whole."""
        while self._waiters:
            waiter = self._waiters[0]
            grant = min(waiter.size - waiter.gathered, self.total_bytes - self._used)
            waiter.gathered += grant
            self._account(grant)
            if waiter.gathered < waiter.size:
                return
            self._waiters.popleft()
            waiter.event.set()

    # -- giving back ------------------------------------------------------------------------------

    def deallocate(self, buffers: Sequence[Memory], size: int | None = None) -> None:
        """Returns buffers of one allocation size. The caller owned them and forgets them."""
        each = size or self.poolable_size
        with self._lock:
            returned = each * len(buffers)
            if returned > self._used:
                raise KafkaSinkError(f"{returned} bytes returned to the pool, but only {self._used} are out")
            self._used -= returned
            if each == self.poolable_size:
                self._free += buffers
            self._serve()
            self._shrink_free(self.total_bytes - self._used)

    # -- memory outside the pool --------------------------------------------------------------------

    def heap_allocate(self, size: int) -> Memory:
        """Memory beyond the pool, for compressed overflow and split batches; counted, bounded by a
        quarter of buffer.memory, and never put into the free list. Raises BufferExhaustedError at it."""
        with self._lock:
            bound = max(self.total_bytes // 4, 1 << 20)
            if self._heap + size > bound:
                raise BufferExhaustedError(
                    f"{size} bytes are needed beyond kafka.buffer.memory = {self.total_bytes}, where "
                    f"{self._heap} of at most {bound} are in use; raise kafka.buffer.memory"
                )
            self._heap += size
            self._peak_heap = max(self._peak_heap, self._heap)
        return memoryview(bytearray(size))

    def heap_deallocate(self, size: int) -> None:
        """Memory from heap_allocate is gone."""
        with self._lock:
            if size > self._heap:
                raise KafkaSinkError(f"{size} heap bytes returned, of which only {self._heap} are out")
            self._heap -= size

    # -- state ------------------------------------------------------------------------------------

    @property
    def queued(self) -> int:
        """Waiting requests."""
        return len(self._waiters)

    def trim_free(self) -> None:
        """Gives free memory back to the system: an idle producer holds none."""
        with self._lock:
            self._free.clear()

    def close(self) -> None:
        """Wakes every waiter with an error; memory in use may still be returned."""
        with self._lock:
            self._closed = True
            self._free.clear()
            for waiter in self._waiters:
                waiter.event.set()

    def _raise_if_closed(self) -> None:
        if self._closed:
            raise KafkaSinkError("the producer was closed while a row waited for memory")

    def metrics(self) -> PoolMetrics:
        """A snapshot."""
        with self._lock:
            free = len(self._free) * self.poolable_size
            return PoolMetrics(
                buffer_total_bytes=self.total_bytes,
                buffer_available_bytes=self.total_bytes - self._used,
                bufferpool_wait_time_total=self._wait_ns,
                buffer_exhausted_total=self._exhausted,
                waiting_threads=len(self._waiters),
                allocated_bytes=self._used + free,
                used_bytes=self._used,
                peak_used_bytes=self._peak_used,
                heap_bytes=self._heap,
                peak_heap_bytes=self._peak_heap,
            )
