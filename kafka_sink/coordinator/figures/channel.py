"""A task's side of the live figures: reports what it did about once a second, and once more at its end."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from kafka_sink import spark_application
from kafka_sink.clock import RANDOM, Clock, monotonic_ms
from kafka_sink.coordinator.figures.messages import (
    KIND,
    FinalFigures,
    TaskFigures,
    TaskIdentity,
    encode_final,
    encode_task,
    joined,
)
from kafka_sink.coordinator.transport.address import CoordinatorAddress
from kafka_sink.coordinator.transport.channel import Channel
from kafka_sink.coordinator.transport.connection import CoordinatorConnection
from kafka_sink.counts import TopicFigures
from kafka_sink.errors import KafkaSinkError

_INTERVAL_MS, _MAX_INTERVAL_MS = 1000.0, 60_000.0
# A task that ends sooner sends its last report only.
_FIRST_MS = 300.0
# Last reports that wait for a connection.
_MAX_ENDED = 16
# Bounds connecting and the reply. The coordinator mostly responds within milliseconds, but on a busy host, or
# while its process is replaced, it takes seconds. Without these figures a job would count as running.
_DRIVER_TIMEOUT_MS = 5000.0
# Instead, for a while after a coordinator did not respond: a frozen one must not hold up each micro-batch.
_SILENT = "the coordinator did not confirm final figures"
_SILENT_S, _SHORT_TIMEOUT_MS = 60.0, 500.0


class FiguresChannel(Channel):
    """``figures`` makes a report of the present task; any thread may call it."""

    kind = KIND

    def __init__(
        self,
        figures: Callable[[TaskIdentity], TaskFigures],
        clock_ms: Clock,
        interval_ms: float = _INTERVAL_MS,
    ) -> None:
        self._figures = figures
        self._clock_ms = clock_ms
        self._interval_ms = interval_ms
        super().__init__()
        self._lock = threading.Lock()  # guards all below
        self._identity: TaskIdentity | None = None
        # When the present task reports, and when those that have ended do: of short tasks that follow one
        # another, one report goes out in an interval.
        self._due_ms = self._end_due_ms = -math.inf
        self._has_reported = False
        self._sent_topics: Mapping[str, TopicFigures] = {}
        # Last reports of tasks that have ended. Those of short tasks that have not reported are joined.
        self._ended: deque[TaskFigures] = deque(maxlen=_MAX_ENDED)
        self._joins = False

    def begin(self, identity: TaskIdentity) -> None:
        """A task starts. It reports soon, so that it is seen, unless it ends before."""
        with self._lock:
            self._identity, self._has_reported, self._sent_topics = identity, False, {}
            self._due_ms = max(self._due_ms, self._clock_ms() + _FIRST_MS)
        self._wake()

    def end(self, last: TaskFigures) -> None:
        """The task has ended; ``last`` has all its totals."""
        with self._lock:
            if self._identity is None:
                return
            self._identity = None
            may_join = not (self._has_reported or last.failed)
            before = self._ended[-1] if self._ended and self._joins and may_join else None
            if before is not None and before.may_be_joined_with(last):
                last = joined(self._ended.pop(), last)
            self._ended.append(last)
            self._joins = may_join
        self._wake()

    @property
    def identity(self) -> TaskIdentity | None:
        """The task that runs. None between tasks."""
        return self._identity

    def next_message(self, now_ms: float) -> Mapping[str, Any] | None:
        with self._lock:
            if self._ended and now_ms >= self._end_due_ms:
                last = self._ended.popleft()
                if not self._ended:
                    self._end_due_ms = now_ms + self._interval_ms
                return encode_task(last)
            identity = self._identity
            if identity is None or now_ms < self._due_ms:
                return None
            self._due_ms, self._has_reported = now_ms + self._interval_ms, True
            sent = self._sent_topics
        # Takes locks of the producer, so not under this one.
        figures = self._figures(identity)
        with self._lock:
            if self._identity is not identity:
                return None
            self._sent_topics = figures.topics
        changed = {name: one for name, one in figures.topics.items() if sent.get(name) != one}
        body = encode_task(figures)
        if len(changed) < len(figures.topics):
            names = set(changed)
            body["topics"] = [one for one in body["topics"] if one[0] in names]
        return body

    def next_message_delay_ms(self, now_ms: float) -> float:
        with self._lock:
            due_ms = math.inf if self._identity is None else self._due_ms
            return max(0.0, min(due_ms, self._end_due_ms if self._ended else math.inf) - now_ms)

    def left_delay_ms(self, now_ms: float) -> float:
        with self._lock:
            return max(0.0, self._end_due_ms - now_ms) if self._ended else math.inf

    def close(self) -> None:
        with self._lock:
            self._end_due_ms = -math.inf

    def on_reply(self, body: Mapping[str, Any], last: bool, now_ms: float) -> None:
        """With many tasks the coordinator asks for fewer reports, from the next one on."""
        interval_ms = body.get("interval", _INTERVAL_MS)
        with self._lock:
            if isinstance(interval_ms, int | float) and _INTERVAL_MS <= interval_ms <= _MAX_INTERVAL_MS:
                self._due_ms += interval_ms - self._interval_ms
                self._interval_ms = interval_ms
            if body.get("skipped"):
                self._sent_topics = {}

    def on_connected(self, now_ms: float) -> None:
        """A new coordinator knows nothing of this task, nor of thousands that connect with it."""
        with self._lock:
            self._sent_topics = {}
            if self._has_reported:
                self._due_ms = now_ms + RANDOM.random() * self._interval_ms


def report_final(address: CoordinatorAddress, final: FinalFigures) -> None:
    """Called on the driver when a write commits or aborts: waits for the confirmation. Raises nothing."""
    was_silent = spark_application.happened_within(_SILENT, _SILENT_S)
    timeout_ms = _SHORT_TIMEOUT_MS if was_silent else _DRIVER_TIMEOUT_MS
    with suppress(OSError):
        try:
            _confirmed(address, timeout_ms, final)
        except (TimeoutError, KafkaSinkError):
            spark_application.remember(_SILENT)


def _confirmed(address: CoordinatorAddress, timeout_ms: float, final: FinalFigures) -> None:
    connection = CoordinatorConnection(address, timeout_ms, monotonic_ms)
    try:
        connection.send(KIND, encode_final(final), monotonic_ms())
        while not connection.is_idle:
            connection.receive(monotonic_ms())
    finally:
        connection.close()
