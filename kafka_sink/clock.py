"""Clocks, chance, growing waits, what a task waits for, and the times whose order matters.

Code that decides by time takes a ``Clock``: tests can set it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

# Milliseconds since any fixed moment, never going back.
Clock = Callable[[], float]

# Of the system, which has no state. Python's own generator is the user's, who may have seeded it, and one of
# ours would give all forks the same numbers.
RANDOM: Final = random.SystemRandom()


def monotonic_ms() -> float:
    """For waits, deadlines and ages within one process."""
    return time.monotonic() * 1000


def wall_ms() -> float:
    """Milliseconds since 1970, to compare with other processes' or Kafka's times. May be set back."""
    return time.time() * 1000


# -- growing waits between attempts -------------------------------------------------------------------------


_JITTER = 0.2
# A base of 1 ms is 12 days by then; more doublings would only make numbers too large for a float.
_MAX_DOUBLINGS = 30


class ExponentialBackoff:
    """``base_ms`` doubled after each attempt up to ``max_ms``, with 20 % of jitter either way (KIP-580).

    A ``max_ms`` below ``base_ms`` counts as ``base_ms``. ``random`` returns values in [0, 1).
    """

    def __init__(self, base_ms: float, max_ms: float, random: Callable[[], float]) -> None:
        self._base_ms = base_ms
        self._max_ms = max(max_ms, base_ms)
        self._random = random

    def delay_ms(self, attempts: int) -> float:
        """The wait after ``attempts`` attempts; the first is about ``base_ms``."""
        doublings = min(max(attempts - 1, 0), _MAX_DOUBLINGS)
        delay_ms = min(self._base_ms * (1 << doublings), self._max_ms)
        return delay_ms * (1 - _JITTER + 2 * _JITTER * self._random())


# -- what a task waits for, and the driver while a write starts or ends -------------------------------------

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
    """``current``: one of STATES, and since when, in monotonic milliseconds. Replaced as one value, so a
    reader needs no lock."""

    __slots__ = ("_clock_ms", "current")

    def __init__(self, clock_ms: Clock) -> None:
        self._clock_ms = clock_ms
        self.current = (WORKING, clock_ms())

    @contextmanager
    def waiting(self, state: str) -> Iterator[None]:
        """Within the block the task waits for this, and after it for what it waited for before."""
        before = self.current
        self.current = (state, self._clock_ms())
        try:
            yield
        finally:
            self.current = (WORKING, self._clock_ms()) if before[0] == WORKING else before


# -- waits of the driver -------------------------------------------------------------------------------------

# Called repeatedly while a thread waits for brokers. It gets a function that says what for (only a long wait
# needs the text), since when, and until when, in monotonic milliseconds.
WaitListener = Callable[[Callable[[], str], float, float], None]

WAIT_LISTENER: ContextVar[WaitListener] = ContextVar("wait_listener", default=lambda *_: None)


# Times whose order matters across modules, in milliseconds. A test checks the order. A time that no other
# module depends on stays where it is used.
# -- metadata by way of the coordinator: each waits a little longer than the one it waits for ----------------

# The coordinator asks another task to fetch metadata when one has been silent for so long.
FETCH_SILENCE_MS = 1000.0
# A task does not ask brokers while the coordinator may be about to bring the topic. The time begins again
# when a second task is asked. Shorter than COORDINATOR_SILENCE_MS: no task waits for a coordinator that has
# stopped responding.
COORDINATOR_WAIT_MS = 1100.0
# A task takes a coordinator that does not answer a sign of life for gone. A driver that stalls for seconds
# must not lose all its tasks at once.
COORDINATOR_SILENCE_MS = 6000.0

# After this time every broker knows a new topic, and one that is unknown is missing.
TOPIC_PROPAGATION_MS = 5000.0
# A stream looks its topics up again after this time. A query restarted in the same application thus notices
# if its topic is gone, and few micro-batches pay for the look-up.
TOPIC_RECHECK_S = 60.0
# Bounds the connecting of a planning client. Its caller bounds requests.
CONNECT_BOUND_MS = 9_000.0

# -- the circuit breaker ---------------------------------------------------------------------------------

# A silent broker is muted only when it is still silent after responses in the socket have been read. Far
# below any sensible slow.request.min.ms.
CONFIRM_SILENCE_MS = 50.0
# Outcomes count in the present window and in the one before it, and so for five to ten seconds.
OUTCOME_WINDOW_MS = 5_000.0
# The coordinator sends mutes that follow one another closely in one message. Below the default of
# coordinator.report.interval.ms, so that gathering adds little to it.
GATHER_MUTES_MS = 50.0
# The sender looks at waiting batches at least this often.
MAX_POLL_MS = 1000.0
# Batches count as waiting for this long after the sender last saw them: longer than it takes to look again.
WAITED_FOR_MS = 1500.0


# -- topics that are not authorized ------------------------------------------------------------------------

# Brokers reject topics (TOPIC_AUTHORIZATION_FAILED) while they load their ACLs. No row is skipped for it
# before it has lasted for this long.
UNAUTHORIZED_TOPIC_MS = 5000.0
