"""Clocks, random numbers, backoff, what a task waits for, and the durations whose order matters.

Code that decides by time is given a ``Clock``, so that tests can set the time.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

# Milliseconds since any fixed moment, never going back.
Clock = Callable[[], float]

# The operating system's random source. It has no state, so forked processes cannot share it. Python's default
# generator belongs to the user, who may have seeded it.
RANDOM: Final = random.SystemRandom()


def monotonic_ms() -> float:
    """The time for waits, deadlines and ages within one process."""
    return time.monotonic() * 1000


def wall_ms() -> float:
    """Milliseconds since 1970, to compare with other processes' or Kafka's times. They may jump back."""
    return time.time() * 1000


# -- growing waits between attempts -------------------------------------------------------------------------


_JITTER = 0.2
# With a base of 1 ms the wait has reached 12 days by then. More doublings would overflow a float.
_MAX_DOUBLINGS = 30


class ExponentialBackoff:
    """A wait of ``base_ms`` that doubles after each attempt up to ``max_ms``, with 20 % of jitter (KIP-580).

    A ``max_ms`` below ``base_ms`` counts as ``base_ms``. ``random`` returns values in [0, 1).
    """

    def __init__(self, base_ms: float, max_ms: float, random: Callable[[], float]) -> None:
        self._base_ms = base_ms
        self._max_ms = max(max_ms, base_ms)
        self._random = random

    def delay_ms(self, attempts: int) -> float:
        """Return how long to wait after this many attempts; the first wait is about ``base_ms``."""
        doublings = min(max(attempts - 1, 0), _MAX_DOUBLINGS)
        delay_ms = min(self._base_ms * (1 << doublings), self._max_ms)
        return delay_ms * (1 - _JITTER + 2 * _JITTER * self._random())


# -- what a task waits for, and what the driver does while a write starts or ends ---------------------------

# The states of a task. In WORKING it does not wait; each other state is named for what the task waits for.
WORKING = "working"
ROWS = "rows"
MEMORY = "memory"
BROKER = "broker"
METADATA = "metadata"
LIMIT = "limit"
STATES = (WORKING, ROWS, MEMORY, BROKER, METADATA, LIMIT)
# The steps in which the driver of a write may wait for brokers.
STARTING, COMMITTING, ABORTING = STEPS = ("starting", "committing", "aborting")


# A wait of a task or of the driver is logged once it has taken this long.
WAIT_LOGGED_MS = 3000.0
# A task that waits for the same thing again and again logs that once in this time.
WAIT_LOGGED_AGAIN_MS = 60_000.0


class TaskActivity:
    """What a task waits for at the moment.

    ``current`` is one of STATES and the time at which it began, in monotonic milliseconds. The task's thread
    replaces it as one value, so that other threads may read it without a lock and never see half a change.
    """

    __slots__ = ("_clock_ms", "_describe", "_logged_ms", "current")

    def __init__(self, clock_ms: Clock) -> None:
        self._clock_ms = clock_ms
        self.current = (WORKING, clock_ms())
        self._describe: Callable[[], str] | None = None
        # When a long wait for each state was last returned by ``long_wait``.
        self._logged_ms: dict[str, float] = {}

    @contextmanager
    def waiting(self, state: str, describe: Callable[[], str] | None = None) -> Iterator[None]:
        """Within the block the task waits for ``state``; after it, the previous state applies again.

        ``describe`` returns what the wait is for, for the log. Without it the wait is not logged.
        """
        before, described = self.current, self._describe
        self.current, self._describe = (state, self._clock_ms()), describe
        try:
            yield
        finally:
            self.current = (WORKING, self._clock_ms()) if before[0] == WORKING else before
            self._describe = described

    def long_wait(self) -> str | None:
        """What the task waits for and how long it has waited, if that is WAIT_LOGGED_MS or more, at most once
        in WAIT_LOGGED_AGAIN_MS for each state. Only the task's thread calls this."""
        state, since_ms = self.current
        if self._describe is None:
            return None
        now_ms = self._clock_ms()
        next_ms = self._logged_ms.get(state, -math.inf) + WAIT_LOGGED_AGAIN_MS
        if now_ms - since_ms < WAIT_LOGGED_MS or now_ms < next_ms:
            return None
        self._logged_ms[state] = now_ms
        return f"{self._describe()}; the task has waited for {(now_ms - since_ms) / 1000:.0f} s"


# -- waits of the driver -------------------------------------------------------------------------------------

# A function that is called repeatedly while a thread waits for brokers. Its arguments are a function that
# returns what the wait is for (a text that only a long wait needs), the start of the wait and its deadline,
# both in monotonic milliseconds.
WaitListener = Callable[[Callable[[], str], float, float], None]

WAIT_LISTENER: ContextVar[WaitListener] = ContextVar("wait_listener", default=lambda *_: None)


# Durations in milliseconds whose order matters across modules. A test checks the order. A duration on which
# no other module depends is defined where it is used.
# -- metadata through the coordinator: each wait is a little longer than the wait it depends on -------------

# If a task that was asked to fetch metadata has been silent for this long, the coordinator asks another task.
FETCH_SILENCE_MS = 1000.0
# While the coordinator may be about to deliver a topic's metadata, a task does not ask brokers for this long.
# The wait starts again when a second task is asked to fetch it. It is shorter than COORDINATOR_SILENCE_MS, so
# that no task waits for a coordinator that has stopped responding.
COORDINATOR_WAIT_MS = 1100.0
# A task regards a coordinator that has not answered a sign of life for this long as lost. It is this long
# because a driver that stalls for seconds must not lose all its tasks at once.
COORDINATOR_SILENCE_MS = 6000.0

# After this time every broker knows a new topic, so a topic that is still unknown does not exist.
TOPIC_PROPAGATION_MS = 5000.0
# A stream looks up its topics again after this time. A query that is restarted in the same application thus
# notices that its topic was deleted, and few micro-batches pay for the lookup.
TOPIC_RECHECK_S = 60.0
# How long a planning client may take to connect. Its caller sets the deadline of requests.
CONNECT_BOUND_MS = 9_000.0

# -- the circuit breaker ---------------------------------------------------------------------------------

# A silent broker is muted only if it is still silent this long after the responses in the socket were read.
# This is far below any sensible slow.request.min.ms.
CONFIRM_SILENCE_MS = 50.0
# Outcomes count in the window in which they happen and in the next one, and so for five to ten seconds.
OUTCOME_WINDOW_MS = 5_000.0
# A task reports its outcomes to the coordinator at most once in this time.
REPORT_OUTCOMES_MS = 500.0
# The coordinator gathers mutes that follow each other within this time into one message. It is less than
# REPORT_OUTCOMES_MS, so that gathering adds little to that delay.
GATHER_MUTES_MS = 50.0
# The sender looks at waiting batches at least this often.
MAX_POLL_MS = 1000.0
# A batch counts as waiting for this long after the sender last saw it: longer than until its next look.
WAITED_FOR_MS = 1500.0


# -- topics that are not authorized ------------------------------------------------------------------------

# Brokers reject topics (TOPIC_AUTHORIZATION_FAILED) while they load their ACLs. No row is skipped because of
# this error before it has lasted for this long.
UNAUTHORIZED_TOPIC_MS = 5000.0
