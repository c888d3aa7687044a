"""The memory pool: accounting against a model, first come first served, nothing lost on any way out."""

from __future__ import annotations

import ctypes
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from kafka_sink.errors import (
    BufferExhaustedError,
    BufferOwnershipError,
    ProducerClosedError,
    RecordTooLargeError,
)
from kafka_sink.memory.arena import Chunk, ChunkArena
from kafka_sink.memory.pool import BufferPool, PoolClient, PoolMetrics, WindowedRate
from tests.support.allocators import limit_heap
from tests.support.effort import tries
from tests.support.footprint import held_bytes

LONG_MS = 6e4
JOIN_S = 60.0


def monotonic_ms() -> float:
    return time.monotonic() * 1000


def reserved_bytes(metrics: PoolMetrics) -> int:
    """The bytes that waiting requests have gathered."""
    return metrics.buffer_total_bytes - metrics.buffer_available_bytes - metrics.used_bytes


class WatchedPool(BufferPool):
    """Its arenas are used under its lock only."""

    def __init__(self, total_bytes: int, heap_limit_bytes: int | None = None) -> None:
        super().__init__(total_bytes, clock_ms=monotonic_ms)
        if heap_limit_bytes is not None:
            limit_heap(self, heap_limit_bytes)

    @property
    def is_locked(self) -> bool:
        return self._lock.locked()

    def arena(self, size: int, *, heap: bool = False) -> ChunkArena:
        with self._lock:
            return self._arenas.setdefault((size, heap), GuardedArena(self, size, heap=heap))


class GuardedArena(ChunkArena):
    """Takes no call but under the pool's lock."""

    __slots__ = ("pool",)

    def __init__(self, pool: WatchedPool, size: int, *, heap: bool) -> None:
        super().__init__(size, kept=True, heap=heap)
        self.pool = pool

    def take(self, count: int) -> list[Chunk]:
        assert self.pool.is_locked
        return super().take(count)

    def give(self, chunks: list[Chunk]) -> None:
        assert self.pool.is_locked
        super().give(chunks)

    def discard_free(self, wanted: int | None = None) -> int:
        assert self.pool.is_locked
        return super().discard_free(wanted)


class Request:
    """A blocking take in a thread of its own, which is in line."""

    def __init__(
        self,
        pool: WatchedPool,
        arena: ChunkArena,
        count: int,
        client: PoolClient,
        timeout_ms: float = LONG_MS,
    ) -> None:
        self.arena, self.count, self.client = arena, count, client
        self.need = arena.size * count
        joined = threading.Event()
        self._result: Future[list[Chunk]] = Future()

        def run() -> None:
            try:
                taken = pool.take(arena, count, timeout_ms, client, 0, joined.set)
                self._result.set_result(taken)
            except BaseException as error:  # noqa: BLE001 - whatever it is, result() raises it
                self._result.set_exception(error)

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()
        assert joined.wait(JOIN_S)

    def result(self) -> list[Chunk]:
        return self._result.result(JOIN_S)

    @property
    def done(self) -> bool:
        return self._result.done()


def assert_idle(pool: BufferPool) -> None:
    metrics = pool.metrics()
    assert (metrics.used_bytes, reserved_bytes(metrics), metrics.waiting_threads) == (0, 0, 0)
    assert metrics.buffer_available_bytes == metrics.buffer_total_bytes
    assert (metrics.heap_bytes, metrics.full_strategy_bytes) == (0, 0)


# -- accounting against a model, with blocked requests among the rest ---------------------------------


class PoolMachine(RuleBasedStateMachine):
    """Every operation in any order. Requests that must wait do so in threads; which of them are served, and
    when, is determined, because the thread that returns memory hands it on under the pool's lock."""

    TOTAL = 1000
    SIZES = (7, 64, 100)
    lent = Bundle("lent")

    def __init__(self) -> None:
        super().__init__()
        self.pool = WatchedPool(self.TOTAL, heap_limit_bytes=500)
        self.arenas = {size: self.pool.arena(size) for size in self.SIZES}
        self.clients = [PoolClient() for _ in range(2)]
        self.used = 0
        self.peak = 0
        self.heap = 0
        self.full = 0
        self.line: list[Request] = []
        self.stamps: dict[Chunk, bytes] = {}
        self.stamp = 0

    # The model: a request waits behind all others, and the first gathers whatever is there.

    def available(self) -> int:
        return 0 if self.line else self.TOTAL - self.used

    def gathered(self) -> int:
        return self.TOTAL - self.used if self.line else 0

    def took(self, arena: ChunkArena, chunks: list[Chunk]) -> tuple[ChunkArena, list[Chunk]]:
        for chunk in chunks:
            assert chunk not in self.stamps
            assert len(chunk.view) == arena.size
            self.stamp += 1
            self.stamps[chunk] = (self.stamp.to_bytes(4, "big") * 250)[: arena.size]
            chunk.view[:] = self.stamps[chunk]
        return arena, chunks

    def account(self, need: int) -> None:
        self.used += need
        self.peak = max(self.peak, self.used)

    def serve(self) -> list[tuple[ChunkArena, list[Chunk]]]:
        served = []
        while self.line and self.line[0].need <= self.TOTAL - self.used:
            request = self.line.pop(0)
            self.account(request.need)
            served.append(self.took(request.arena, request.result()))
        for request in self.line:
            assert not request.done
        return served

    @rule(target=lent, size=st.sampled_from(SIZES), count=st.integers(1, 6), full=st.integers(0, 9))
    def try_take(self, size: int, count: int, full: int) -> object:
        arena = self.arenas[size]
        chunks = self.pool.try_take(arena, count, full)
        assert (chunks is not None) == (size * count <= self.available())
        if chunks is None:
            return multiple()
        assert len(chunks) == count
        self.account(size * count)
        self.full += full
        return (*self.took(arena, chunks), full)

    @rule(target=lent, size=st.integers(1, 700))
    def try_take_unpooled(self, size: int) -> object:
        arena = ChunkArena(size, kept=False)
        chunks = self.pool.try_take(arena, 1)
        assert (chunks is not None) == (size <= self.available())
        if chunks is None:
            return multiple()
        self.account(size)
        return (*self.took(arena, chunks), 0)

    @rule(target=lent, size=st.sampled_from(SIZES), count=st.integers(1, 10), client=st.integers(0, 1))
    def take(self, size: int, count: int, client: int) -> object:
        arena = self.arenas[size]
        if self.clients[client].closed:
            with pytest.raises(ProducerClosedError):
                self.pool.take(arena, count, LONG_MS, self.clients[client])
            return multiple()
        if size * count <= self.available():
            self.account(size * count)
            chunks = self.pool.take(arena, count, LONG_MS, self.clients[client])
            return (*self.took(arena, chunks), 0)
        self.line.append(Request(self.pool, arena, count, self.clients[client]))
        return multiple()

    @rule(target=lent, size=st.sampled_from(SIZES), count=st.integers(1, 3))
    def take_heap(self, size: int, count: int) -> object:
        arena = self.pool.arena(size, heap=True)
        chunks = self.pool.try_take_heap(arena, count)
        assert (chunks is None) == (self.heap + size * count > 500)
        if chunks is None:
            return multiple()
        self.heap += size * count
        return (*self.took(arena, chunks), 0)

    @rule(target=lent, taken=consumes(lent), keep=st.integers(0, 6))
    def give(self, taken: tuple[ChunkArena, list[Chunk], int], keep: int) -> object:
        arena, chunks, full = taken
        back, kept = chunks[keep:], chunks[:keep]
        for chunk in back:
            assert bytes(chunk.view) == self.stamps.pop(chunk)
        self.pool.give(arena, back, 0 if kept else full)
        if not kept:
            self.full -= full
        if arena.heap:
            self.heap -= len(back) * arena.size
        else:
            self.used -= len(back) * arena.size
        served = self.serve()
        held = [(*one, 0) for one in served]
        if kept:
            held.append((arena, kept, full))
        if back and self.stamps.keys().isdisjoint(back):
            # (A chunk with a new owner looks the same as one of its former owner; the buffer's flag differs.)
            for _ in range(2):
                with pytest.raises(BufferOwnershipError):
                    self.pool.give(arena, [*kept, *back], full)
        return multiple(*held)

    @rule(taken=lent)
    def give_wrongly(self, taken: tuple[ChunkArena, list[Chunk], int]) -> None:
        arena, chunks, full = taken
        for wrong_arena, wrong in ((arena, [*chunks, chunks[0]]), (ChunkArena(3, kept=True), chunks)):
            with pytest.raises(BufferOwnershipError):
                self.pool.give(wrong_arena, wrong, full)

    @rule()
    def trim_free(self) -> None:
        self.pool.trim_free()
        metrics = self.pool.metrics()
        assert metrics.allocated_bytes == metrics.used_bytes

    @precondition(lambda self: self.line)
    @rule(target=lent, client=st.integers(0, 1))
    def close_client(self, client: int) -> object:
        closed = self.clients[client]
        self.pool.close_client(closed)
        for request in [request for request in self.line if request.client is closed]:
            self.line.remove(request)
            with pytest.raises(ProducerClosedError):
                request.result()
        self.clients[client] = PoolClient()
        return multiple(*((*one, 0) for one in self.serve()))

    @invariant()
    def accounts_agree(self) -> None:
        metrics = self.pool.metrics()
        assert metrics.used_bytes == self.used
        assert metrics.max_used_bytes == self.peak
        assert reserved_bytes(metrics) == self.gathered()
        assert metrics.buffer_available_bytes == self.available()
        assert metrics.waiting_threads == self.pool.queued == len(self.line)
        assert metrics.heap_bytes == self.heap
        assert metrics.full_strategy_bytes == self.full
        assert metrics.allocated_bytes <= metrics.max_allocated_bytes <= self.TOTAL
        assert metrics.allocated_bytes - metrics.used_bytes == sum(
            len(arena.free) * size for size, arena in self.arenas.items()
        )

    @invariant()
    def nobody_wrote_into_lent_memory(self) -> None:
        for chunk, stamp in self.stamps.items():
            assert bytes(chunk.view) == stamp
            assert chunk.slab[chunk.start : chunk.start + len(stamp)] == stamp

    def teardown(self) -> None:
        for client in self.clients:
            self.pool.close_client(client)
        for request in self.line:
            request.thread.join(JOIN_S)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=tries(100), stateful_step_count=40, deadline=None)


# -- the line -----------------------------------------------------------------------------------------


def test_a_timeout_gives_back_what_was_gathered_and_serves_the_next() -> None:
    pool = WatchedPool(1000)
    arena, client = pool.arena(100), PoolClient()
    held = pool.take(arena, 7, 0, client)
    impatient = Request(pool, arena, 10, client, timeout_ms=50)
    patient = Request(pool, arena, 3, client)
    with pytest.raises(BufferExhaustedError) as caught:
        impatient.result()
    for fact in ("kafka.max.block.ms", "kafka.buffer.memory = 1000", "of 50 ms", "1000 bytes", "300"):
        assert fact in str(caught.value)
    assert len(patient.result()) == 3
    pool.give(arena, [*held, *patient.result()])
    assert_idle(pool)
    metrics = pool.metrics()
    assert metrics.buffer_exhausted_total == 1
    assert metrics.buffer_exhausted_rate > 0
    assert metrics.bufferpool_wait_time_ns_total >= 50e6
    assert metrics.bufferpool_wait_ratio >= 50 / 30_000 * 0.99


def test_waiting_request_reserves_memory_even_while_the_heap_exceeds_its_limit() -> None:
    """Catches: a batch that grew took the memory of a request that had only to wait for the heap."""
    pool = WatchedPool(256, heap_limit_bytes=10)
    arena, heap = pool.arena(64), pool.arena(64, heap=True)
    beyond = pool.take_heap(heap, 1)
    first = Request(pool, arena, 2, PoolClient())
    second = Request(pool, arena, 1, PoolClient())
    assert pool.try_take(arena, 2) is None
    grown = pool.try_take(arena, 1)
    assert grown is not None
    assert reserved_bytes(pool.metrics()) == 192
    assert [first.done, second.done] == [False, False]
    pool.give(heap, beyond)
    for chunks in (first.result(), second.result(), grown):
        pool.give(arena, chunks)
    assert reserved_bytes(pool.metrics()) == 0


def test_memory_that_comes_with_the_timeout_is_taken() -> None:
    """Granted after the wait has timed out, before the waiter has looked."""
    pool = WatchedPool(1000)
    arena, client = pool.arena(100), PoolClient()
    held = pool.take(arena, 10, 0, client)
    with patch("kafka_sink.memory.pool._await", side_effect=lambda *_: pool.give(arena, held)):
        assert len(pool.take(arena, 4, 0, client)) == 4
    assert pool.metrics().used_bytes == 400
    assert pool.metrics().buffer_exhausted_total == 0


def test_waiting_client_checks_at_once_and_repeatedly_whether_to_go_on() -> None:
    pool = WatchedPool(1000)
    arena, client = pool.arena(100), PoolClient()
    held = pool.take(arena, 7, 0, client)
    looks: list[int] = []

    def lost() -> None:
        assert not pool.is_locked
        looks.append(pool.queued)
        if len(looks) == 3:
            raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        pool.take(arena, 4, LONG_MS, client, 0, lost)
    assert looks == [1, 1, 1]
    with pytest.raises(BufferExhaustedError, match=r"waited .* of 20 ms"):
        pool.take(arena, 4, 20, client, 0, lambda: looks.append(pool.queued))
    assert len(looks) > 3, "it looked in this wait, too"
    # Memory that comes while it looks is taken.
    assert len(pool.take(arena, 4, LONG_MS, client, 0, lambda: pool.give(arena, [held.pop()]))) == 4
    assert pool.metrics().waiting_threads == 0


def test_request_larger_than_the_pool_fails_at_once_with_sizes_and_options() -> None:
    pool = WatchedPool(1000)
    arena = pool.arena(100)
    with pytest.raises(RecordTooLargeError) as caught:
        pool.take(arena, 11, LONG_MS, PoolClient())
    for fact in ("1100 bytes", "kafka.buffer.memory is 1000", "kafka.batch.size"):
        assert fact in str(caught.value)
    assert pool.try_take(arena, 11) is None
    assert_idle(pool)


# -- interruptions ------------------------------------------------------------------------------------


@pytest.fixture
def interrupting_signal() -> Iterator[signal.Signals]:
    """Interrupts the main thread when it first arrives; further ones do nothing."""
    arrived: list[int] = []

    def interrupt(number: int, _frame: object) -> None:
        arrived.append(number)
        if len(arrived) == 1:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGUSR1, interrupt)
    yield signal.SIGUSR1
    signal.signal(signal.SIGUSR1, before)


def test_an_interrupt_while_waiting_gives_everything_back(interrupting_signal: signal.Signals) -> None:
    pool = WatchedPool(1000)
    arena, client = pool.arena(100), PoolClient()
    held = pool.take(arena, 7, 0, client)
    main = threading.get_ident()

    def interrupt_once_it_waits() -> None:
        assert joined.wait(JOIN_S)
        behind.append(Request(pool, arena, 3, client))
        # Again until it works: a signal just before the wait begins would be seen only after it.
        while not interrupted.wait(0.01):
            signal.pthread_kill(main, interrupting_signal)

    joined, interrupted = threading.Event(), threading.Event()
    behind: list[Request] = []
    helper = threading.Thread(target=interrupt_once_it_waits)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        pool.take(arena, 9, LONG_MS, client, 0, joined.set)
    interrupted.set()
    helper.join(JOIN_S)
    assert len(behind[0].result()) == 3
    pool.give(arena, [*held, *behind[0].result()])
    assert_idle(pool)


def test_a_task_killed_as_its_memory_arrives_gives_it_back() -> None:
    pool = WatchedPool(1000)
    arena, client = pool.arena(100), PoolClient()
    held = pool.take(arena, 7, 0, client)
    killed = Request(pool, arena, 9, client)
    ident = ctypes.c_ulong(killed.thread.ident or 0)
    # Delivered when the wait's acquire returns, which is when the memory is there.
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit)) == 1
    pool.give(arena, held)
    with pytest.raises(SystemExit):
        killed.result()
    killed.thread.join(JOIN_S)
    assert_idle(pool)


def test_no_memory_from_the_system_changes_nothing() -> None:
    pool = WatchedPool(1000)
    arena, client = pool.arena(100), PoolClient()
    attempts: list[Callable[[], object]] = [
        lambda: pool.try_take(arena, 3, 5),
        lambda: pool.take(arena, 3, 0, client, 5),
        lambda: pool.take_heap(ChunkArena(9, kept=False, heap=True), 1, 5),
    ]
    for attempt in attempts:
        with patch("mmap.mmap", side_effect=MemoryError), pytest.raises(MemoryError):
            attempt()
        assert_idle(pool)
        assert pool.metrics().allocated_bytes == 0


# -- contention ---------------------------------------------------------------------------------------


def test_accounts_hold_at_every_moment_under_contention() -> None:
    pool = WatchedPool(64 * 40)
    sizes = [pool.arena(64), pool.arena(16), pool.arena(24)]
    client = PoolClient()
    stop = threading.Event()
    timeouts = [0] * 6

    def work(number: int) -> None:
        random_ = random.Random(number)
        stamp = bytes([number + 1])
        held: list[tuple[ChunkArena, list[Chunk]]] = []
        for _ in range(400):
            arena = random_.choice(sizes)
            count = random_.randint(1, 12)
            taken = pool.try_take(arena, count)
            if taken is None:
                # Like the accumulator: nothing of its own is held while it blocks, save now and then.
                while held and random_.random() < 0.9:
                    give_back(*held.pop(), stamp)
                try:
                    taken = pool.take(arena, count, random_.choice([0.0, 0.5, 5.0]), client)
                except BufferExhaustedError:
                    timeouts[number] += 1
                    continue
            for chunk in taken:
                chunk.view[:] = stamp * arena.size
            held.append((arena, taken))
            if random_.random() < 0.02:
                pool.trim_free()
        for one in held:
            give_back(*one, stamp)

    def give_back(arena: ChunkArena, chunks: list[Chunk], stamp: bytes) -> None:
        for chunk in chunks:
            assert bytes(chunk.view) == stamp * arena.size
        pool.give(arena, chunks)

    def watch() -> None:
        while not stop.is_set():
            metrics = pool.metrics()
            assert metrics.used_bytes <= metrics.allocated_bytes <= pool.total_bytes
            assert metrics.used_bytes + reserved_bytes(metrics) <= pool.total_bytes
            if metrics.waiting_threads:
                assert metrics.buffer_available_bytes == 0

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    with ThreadPoolExecutor(7) as threads:
        watcher = threads.submit(watch)
        try:
            for worker in [threads.submit(work, number) for number in range(6)]:
                worker.result(JOIN_S)
        finally:
            stop.set()
            sys.setswitchinterval(interval)
        watcher.result(JOIN_S)
    assert pool.metrics().buffer_exhausted_total == sum(timeouts)
    assert pool.metrics().bufferpool_wait_time_ns_total > 0
    assert_idle(pool)


# -- metrics ------------------------------------------------------------------------------------------


def test_a_rate_covers_two_windows_of_thirty_seconds() -> None:
    rate = WindowedRate()
    assert rate.per_second(5_000) == 0
    rate.record(60, 10_000)
    # Not yet a full window: divided by one all the same.
    assert rate.per_second(11_000) == pytest.approx(2)
    assert rate.per_second(55_000) == pytest.approx(60 / 45)
    rate.record(30, 45_000)
    assert rate.per_second(50_000) == pytest.approx(90 / 40)
    # The first window is over after sixty seconds, the second after its own.
    assert rate.per_second(71_000) == pytest.approx(1)
    assert rate.per_second(106_000) == 0
    held = []
    for start in range(200_000, 900_000, 100_000):
        for now_ms in range(start, start + 100_000, 10_000):
            rate.record(1, now_ms)
        held.append(held_bytes(rate))
    assert held[-1] < 2 * held[0], "what is over is dropped"
