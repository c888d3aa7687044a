"""What a task waits for at present, and the driver while a write starts or ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from kafka_sink.clock import Clock

# What a task can wait for. WORKING: for nothing.
WORKING = "working"
ROWS = "rows"
MEMORY = "memory"
BROKER = "broker"
METADATA = "metadata"
LIMIT = "limit"
STATES = (WORKING, ROWS, MEMORY, BROKER, METADATA, LIMIT)
# What the driver does with a write.
STARTING, COMMITTING, ABORTING = STEPS = ("starting", "committing", "aborting")


class TaskActivity:
    """The present state of one task, and since when. Replaced as one value, so a reader needs no lock."""

    __slots__ = ("_clock_ms", "_current")

    def __init__(self, clock_ms: Clock) -> None:
        self._clock_ms = clock_ms
        self._current = (WORKING, clock_ms())

    @property
    def current(self) -> tuple[str, float]:
        """One of STATES, and the monotonic milliseconds since when."""
        return self._current

    @contextmanager
    def waiting(self, state: str) -> Iterator[None]:
        """Within the block the task waits for this, and after it for what it waited for before."""
        before = self._current
        self._current = (state, self._clock_ms())
        try:
            yield
        finally:
            self._current = (WORKING, self._clock_ms()) if before[0] == WORKING else before


# -- the driver, which waits in a loop and not in a state --------------------------------------------------

# Called again and again while a thread waits for brokers: with what for, as a function because few waits are
# long, since when, and until when, in monotonic milliseconds.
WaitListener = Callable[[Callable[[], str], float, float], None]

WAIT_LISTENER: ContextVar[WaitListener] = ContextVar("wait_listener", default=lambda *_: None)
