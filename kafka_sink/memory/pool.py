"""``buffer.memory``: reused memory, granted in the order of requests (as Kafka's BufferPool, KAFKA-20576).

Chunks of a few sizes are kept for reuse. A buffer of any other size is counted as well, but is unmapped when
it is returned. Memory is allocated on demand. At every moment outside the lock:

    used + free = allocated <= total        used: lent out; free: kept for reuse
    used + reserved <= total                reserved: gathered for waiting requests, not lent yet
    a request waits  =>  used + reserved = total, or it has gathered all it needs and waits for the heap

So no request overtakes another one.

Heap memory is counted separately and never enters the pool. It holds what a codec needs in addition to a
buffer of `full`, compressed data that is larger than estimated, and what the pieces of a split batch need
beyond the batch's own memory. Compressed data and pieces cannot wait, so they may exceed the heap's limit.
Until the heap is within its limit again, all requests wait, even if the pool has free memory.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kafka_sink.clock import Clock
from kafka_sink.errors import BufferExhaustedError, ProducerClosedError, RecordTooLargeError
from kafka_sink.memory.arena import Chunk, ChunkArena

# The defaults of metrics.num.samples and metrics.sample.window.ms.
_SAMPLES = 2
_WINDOW_MS = 30_000.0


class WindowedRate:
    """Kafka's Rate: the sum recorded in the last two windows of 30 s, per second. As in Kafka, the sum is
    divided by at least one window's length, so that the first event is no spike."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []  # (start in ms, sum), oldest first

    def record(self, value: float, now_ms: float) -> None:
        samples = self._samples
        if samples and now_ms - samples[-1][0] < _WINDOW_MS:
            start, total = samples[-1]
            samples[-1] = (start, total + value)
        else:
            samples.append((now_ms, value))
            del samples[:-_SAMPLES]

    def per_second(self, now_ms: float) -> float:
        """The rate at ``now_ms``. Does not change anything."""
        alive = [sample for sample in self._samples if now_ms - sample[0] < _SAMPLES * _WINDOW_MS]
        if not alive:
            return 0.0
        elapsed_ms = max(now_ms - alive[0][0], (_SAMPLES - 1) * _WINDOW_MS)
        return sum(total for _, total in alive) / elapsed_ms * 1000


@dataclass(frozen=True, slots=True)
class PoolMetrics:
    """A snapshot of a pool, in bytes, nanoseconds and counts.

    ``used_bytes`` are lent out. ``allocated_bytes`` are the used bytes and the free memory that is kept for
    reuse. ``buffer_available_bytes`` is the total without used bytes and without the bytes that waiting
    requests have gathered. ``heap_*`` is not part of any of these. ``full_strategy_*`` is what `full` would
    hold.
    """

    buffer_total_bytes: int
    buffer_available_bytes: int
    bufferpool_wait_time_ns_total: int
    bufferpool_wait_ratio: float
    buffer_exhausted_total: int
    buffer_exhausted_rate: float
    waiting_threads: int
    allocated_bytes: int
    max_allocated_bytes: int
    used_bytes: int
    max_used_bytes: int
    heap_bytes: int
    max_heap_bytes: int
    heap_total_bytes: int
    full_strategy_bytes: int
    max_full_strategy_bytes: int


# The heap's limit is buffer.memory divided by this, but at least the minimum; see admit_heap.
_HEAP_SHARE = 4
_MIN_HEAP_BYTES = 1 << 20
# How often a waiting request checks that its task is still running.
_WATCH_MS = 100.0


@dataclass(slots=True, eq=False)
class PoolClient:
    """A producer that uses a pool. Closing it ends the waits of this producer only. The pool's lock guards
    ``closed``: otherwise a request could join the queue just after the close, and time out."""

    closed: bool = False


@dataclass(slots=True, eq=False)
class _Waiter:
    """A waiting request. It has gathered ``gathered`` of ``need`` bytes, and is granted when it has all of
    them and the heap is within its limit.

    ``turn`` is a lock that the pool releases at that moment, or when the client is closed; the waiting thread
    blocks on it. The pool's lock guards all other fields.
    """

    need: int
    client: PoolClient
    gathered: int = 0
    is_granted: bool = False
    turn: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.turn.acquire()


class BufferPool:
    """The pool that the producers of a worker process share. Thread-safe. Sizes are in bytes.

    Producers get chunks of their own sizes through ``arena``. A request is granted completely or not at all,
    and ``try_take`` never takes what a waiting request needs. ``full_bytes`` arguments are what the `full`
    strategy would hold for the same data; only the metrics use them. ``open_batches`` is the number of
    batches of all producers that hold memory. Code that reads it without the lock gets a hint.
    """

    def __init__(self, total_bytes: int, *, clock_ms: Clock) -> None:
        self.total_bytes = total_bytes
        self.least_heap_limit = max(total_bytes // _HEAP_SHARE, _MIN_HEAP_BYTES)
        self.heap_limit_bytes = self.least_heap_limit
        self._clock_ms = clock_ms
        # Guards everything below, and all arenas. The task's thread takes memory and the sender's thread
        # returns it; without the lock they could lend one chunk twice, or lose a waiting request's wake-up.
        self._lock = threading.Lock()
        # The arenas whose chunks are kept for reuse, by the size of a chunk and whether it is heap memory.
        self._arenas: dict[tuple[int, bool], ChunkArena] = {}
        self._heap_needs: dict[PoolClient, int] = {}
        self._waiters: deque[_Waiter] = deque()
        self._used = 0
        self._grantable = total_bytes  # without the bytes that waiting requests have gathered
        self._allocated = 0
        self._heap = 0
        self._full = 0
        self.open_batches = 0
        self._heap_total = 0
        self._peak_used = self._peak_allocated = self._peak_heap = self._peak_full = 0
        self._wait_ns = 0
        self._exhausted = 0
        self._wait_rate = WindowedRate()
        self._exhausted_rate = WindowedRate()

    def admit_heap(self, client: PoolClient, need_bytes: int) -> None:
        """Raise the heap's limit to what ``client`` may need, but never above ``total_bytes``. This lasts
        until ``withdraw_heap`` or ``close_client``. Does nothing for a closed client."""
        with self._lock:
            if not client.closed:
                self._heap_needs[client] = min(need_bytes, self.total_bytes)
                self._limit_heap()
                self._serve()

    def withdraw_heap(self, client: PoolClient) -> None:
        """Lower the heap's limit to what the other clients need. All requests wait while the heap holds more
        than that."""
        with self._lock:
            self._withdraw_heap(client)

    def _withdraw_heap(self, client: PoolClient) -> None:
        if self._heap_needs.pop(client, None) is not None:
            self._limit_heap()

    def _limit_heap(self) -> None:
        self.heap_limit_bytes = max(self.least_heap_limit, *self._heap_needs.values(), 0)

    def arena(self, size: int, *, heap: bool = False) -> ChunkArena:
        """The arena for chunks of this size, which are kept for reuse: the pool's or, with ``heap``, those
        outside the pool."""
        with self._lock:
            arena = self._arenas.get((size, heap))
            if arena is None:
                arena = self._arenas[size, heap] = ChunkArena(size, kept=True, heap=heap)
            return arena

    def try_take(
        self, arena: ChunkArena, count: int, full_bytes: int = 0, *, new_batches: int = 0
    ) -> list[Chunk] | None:
        """Take ``count`` chunks; None if the pool has too little now or a request waits. Never blocks.

        ``new_batches`` is how many new batches the chunks are for; 0 if they are for a batch that grows.
        While the heap exceeds its limit, no batch is opened.

        Raises MemoryError or OSError, changing nothing, if the system has no memory; so do the other methods.
        """
        need = count * arena.size
        with self._lock:
            # This also keeps it from overtaking: what a request waits for is used or reserved.
            if self._used + need > self._grantable or (new_batches and self._heap > self.heap_limit_bytes):
                return None
            return self._lend(arena, count, full_bytes, new_batches)

    def take(
        self,
        arena: ChunkArena,
        count: int,
        timeout_ms: float,
        client: PoolClient,
        full_bytes: int = 0,
        watch: Callable[[], None] | None = None,
    ) -> list[Chunk]:
        """Take ``count`` chunks for a new batch, waiting in the queue for at most ``timeout_ms``.

        The timeout is what is left of max.block.ms. ``watch`` is called without the lock when the request is
        in the queue, and every 100 ms while it waits; if it raises, the wait ends.

        Raises RecordTooLargeError at once if the pool can never have that much, BufferExhaustedError after
        the timeout, and ProducerClosedError if the client is closed. Nothing stays reserved after an error,
        or after a signal or a task kill has interrupted the wait.
        """
        need = count * arena.size
        if need > self.total_bytes:
            raise RecordTooLargeError(
                f"{need} bytes of memory are needed at once ({count} x {arena.size}), but "
                f"kafka.buffer.memory is {self.total_bytes}; raise kafka.buffer.memory, or write smaller "
                "rows or a smaller kafka.batch.size"
            )
        with self._lock:
            if client.closed:
                raise ProducerClosedError("the producer is closed and opens no more batches")
            if self._used + need <= self._grantable and not self.overdrawn:
                return self._lend(arena, count, full_bytes, 1)
        waiter = _Waiter(need, client)
        started_ms = self._clock_ms()
        chunks = None
        try:
            ahead = self._queue_up(waiter)
            _await(waiter.turn, min(max(timeout_ms, 0.0) / 1000, threading.TIMEOUT_MAX), watch)
            with self._lock:
                if client.closed:
                    raise ProducerClosedError("the producer was closed while a row waited for memory")
                # Decide by the flag and not by acquire's result: memory may come just after the timeout.
                if not waiter.is_granted:
                    raise self._exhaustion(waiter, started_ms, timeout_ms, ahead)
                self._ungather(waiter)
                chunks = self._lend(arena, count, full_bytes, 1)
            return chunks
        finally:
            # This also runs after KeyboardInterrupt and a task kill: the next request gets the memory.
            with self._lock:
                now_ms = self._clock_ms()
                waited_ns = max(0, int((now_ms - started_ms) * 1e6))
                self._wait_ns += waited_ns
                self._wait_rate.record(waited_ns, now_ms)
                if chunks is None:
                    self._withdraw(waiter)
                    self._serve()

    def try_take_heap(self, arena: ChunkArena, count: int) -> list[Chunk] | None:
        """Take ``count`` chunks from a heap arena, outside the pool; None above the heap's limit."""
        with self._lock:
            if self._heap + count * arena.size > self.heap_limit_bytes:
                return None
            return self._lend_heap(arena, count, 0)

    def take_heap(self, arena: ChunkArena, count: int, full_bytes: int = 0) -> list[Chunk]:
        """Like ``try_take_heap``, but even beyond the limit, for encoded rows that cannot wait. While the
        limit is exceeded, new requests wait."""
        with self._lock:
            return self._lend_heap(arena, count, full_bytes)

    def _lend_heap(self, arena: ChunkArena, count: int, full_bytes: int) -> list[Chunk]:
        need = count * arena.size
        chunks = arena.take(count)
        self._heap += need
        self._heap_total += need
        self._full += full_bytes
        self._peak_heap = max(self._peak_heap, self._heap)
        self._peak_full = max(self._peak_full, self._full)
        return chunks

    def _lend(self, arena: ChunkArena, count: int, full_bytes: int, new_batches: int) -> list[Chunk]:
        need = count * arena.size
        fresh = count - len(arena.free)
        if fresh > 0:
            self._make_room(arena, fresh * arena.size)
        chunks = arena.take(count)
        if fresh > 0:
            self._allocated += fresh * arena.size
            if self._allocated > self._peak_allocated:
                self._peak_allocated = self._allocated
        used = self._used = self._used + need
        if used > self._peak_used:
            self._peak_used = used
        full = self._full = self._full + full_bytes
        if full > self._peak_full:
            self._peak_full = full
        self.open_batches += new_batches
        return chunks

    def _make_room(self, arena: ChunkArena, fresh_bytes: int) -> None:
        """Drop free chunks of other sizes, so that ``arena`` can allocate these bytes within the total."""
        excess = self._allocated + fresh_bytes - self.total_bytes
        for other in self._arenas.values():
            if excess > 0 and other is not arena and not other.heap:
                dropped = other.discard_free(-(-excess // other.size)) * other.size
                self._allocated -= dropped
                excess -= dropped

    def _queue_up(self, waiter: _Waiter) -> int:
        with self._lock:
            ahead = len(self._waiters)
            self._waiters.append(waiter)
            self._serve()
            return ahead

    def _serve(self) -> None:
        """Reserve available memory for the oldest request, and once that has all it needs, for the next one.
        Requests that have all they need are granted in turn once the heap is within its limit."""
        waiters = self._waiters
        for waiter in waiters:
            grant = min(waiter.need - waiter.gathered, self._grantable - self._used)
            waiter.gathered += grant
            self._grantable -= grant
            if waiter.gathered < waiter.need:
                break
        while waiters and waiters[0].gathered == waiters[0].need and not self.overdrawn:
            granted = waiters.popleft()
            granted.is_granted = True
            granted.turn.release()

    def _ungather(self, waiter: _Waiter) -> None:
        self._grantable += waiter.gathered
        waiter.gathered = 0

    def _withdraw(self, waiter: _Waiter) -> None:
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        self._ungather(waiter)

    def _exhaustion(
        self, waiter: _Waiter, started_ms: float, timeout_ms: float, ahead: int
    ) -> BufferExhaustedError:
        now_ms = self._clock_ms()
        self._exhausted += 1
        self._exhausted_rate.record(1, now_ms)
        free = self._grantable - self._used + waiter.gathered
        overdraft = ""
        if self.overdrawn:
            overdraft = (
                f", but compressed data larger than estimated and pieces of batches that brokers rejected "
                f"(MESSAGE_TOO_LARGE) hold {self._heap} bytes outside of it, more than the limit of "
                f"{self.heap_limit_bytes}"
            )
        return BufferExhaustedError(
            f"no memory for a record batch within kafka.max.block.ms: waited {now_ms - started_ms:.0f} of "
            f"{timeout_ms:.0f} ms for {waiter.need} bytes after {ahead} earlier requests "
            f"({waiter.gathered} bytes reserved so far); {free} of kafka.buffer.memory = {self.total_bytes} "
            f"bytes are free{overdraft}. The brokers accept rows more slowly than the task makes them, or do "
            "not respond: check the brokers, or raise kafka.max.block.ms"
        )

    def give(self, arena: ChunkArena, chunks: list[Chunk], full_bytes: int = 0) -> None:
        """Return chunks of a batch that keeps other chunks, or may grow again. See ``give_all``."""
        self.give_all([(arena, chunks, full_bytes)], ended=0)

    def give_all(self, lent: Sequence[LentChunks], *, ended: int | None = None) -> None:
        """Return chunks of batches. The request that has waited longest gets them first.

        Chunks of one arena are returned in one step. ``ended`` is how many batches hold no chunks after this
        call; by default, all batches of ``lent``. Raises BufferOwnershipError if a chunk is not lent. The
        chunk's arena is then unchanged.
        """
        arenas: dict[ChunkArena, list[Chunk]] = {}
        full_bytes = 0
        for arena, chunks, full in lent:
            full_bytes += full
            gathered = arenas.setdefault(arena, chunks)
            if gathered is not chunks:
                gathered += chunks
        with self._lock:
            for arena, chunks in arenas.items():
                returned = len(chunks) * arena.size
                arena.give(chunks)
                if arena.heap:
                    self._heap -= returned
                else:
                    self._used -= returned
                    if not arena.kept:
                        self._allocated -= returned
            self.open_batches -= len(lent) if ended is None else ended
            self._full -= full_bytes
            if self._waiters:
                self._serve()

    def restart_maxima(self) -> None:
        """Reset the peaks to the current values, when a new task begins."""
        with self._lock:
            self._peak_used, self._peak_allocated = self._used, self._allocated
            self._peak_heap, self._peak_full = self._heap, self._full

    def trim_free(self) -> None:
        """Return free memory to the system, so that an idle producer holds no memory."""
        with self._lock:
            for arena in self._arenas.values():
                freed = arena.discard_free() * arena.size
                self._allocated -= 0 if arena.heap else freed

    def close_client(self, client: PoolClient) -> None:
        """End a producer's waits with ProducerClosedError. Their memory goes to other producers. The heap's
        limit is lowered as in ``withdraw_heap``."""
        with self._lock:
            client.closed = True
            self._withdraw_heap(client)
            for waiter in [waiter for waiter in self._waiters if waiter.client is client]:
                self._withdraw(waiter)
                waiter.turn.release()
            self._serve()

    @property
    def queued(self) -> int:
        """The number of waiting requests of all producers. Read without the lock, so it is a hint."""
        return len(self._waiters)

    @property
    def overdrawn(self) -> bool:
        """Whether more heap memory is in use than its limit. Read without the lock, so it is a hint."""
        return self._heap > self.heap_limit_bytes

    @property
    def heap_room(self) -> int:
        """The bytes left up to the heap's limit. Read without the lock, so it is a hint."""
        return max(0, self.heap_limit_bytes - self._heap)

    @property
    def available_bytes(self) -> int:
        """The bytes that a request could get now. Read without the lock, so it is a hint."""
        return self._grantable - self._used

    def metrics(self, now_ms: float | None = None) -> PoolMetrics:
        """A consistent snapshot. The rates are those at ``now_ms``."""
        now_ms = self._clock_ms() if now_ms is None else now_ms
        with self._lock:
            return PoolMetrics(
                buffer_total_bytes=self.total_bytes,
                buffer_available_bytes=self._grantable - self._used,
                bufferpool_wait_time_ns_total=self._wait_ns,
                bufferpool_wait_ratio=self._wait_rate.per_second(now_ms) / 1e9,
                buffer_exhausted_total=self._exhausted,
                buffer_exhausted_rate=self._exhausted_rate.per_second(now_ms),
                waiting_threads=len(self._waiters),
                allocated_bytes=self._allocated,
                max_allocated_bytes=self._peak_allocated,
                used_bytes=self._used,
                max_used_bytes=self._peak_used,
                heap_bytes=self._heap,
                max_heap_bytes=self._peak_heap,
                heap_total_bytes=self._heap_total,
                full_strategy_bytes=self._full,
                max_full_strategy_bytes=self._peak_full,
            )


# Chunks that a batch returns: their arena, the chunks, and what `full` would hold for them.
LentChunks = tuple[ChunkArena, list[Chunk], int]


def _await(turn: threading.Lock, timeout_s: float, watch: Callable[[], None] | None) -> None:
    if watch is None:
        turn.acquire(timeout=timeout_s)
        return
    deadline_s = time.monotonic() + timeout_s
    while True:
        watch()
        left_s = max(0.0, deadline_s - time.monotonic())
        if turn.acquire(timeout=min(left_s, _WATCH_MS / 1000)) or left_s <= _WATCH_MS / 1000:
            return
