"""A task's side of the live figures: reports what it did about once a second, and once more at its end."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from kafka_sink import application_markers
from kafka_sink.clock import Clock, monotonic_ms
from kafka_sink.coordinator.figures.messages import (
    KIND,
    FinalFigures,
    TaskFigures,
    TaskIdentity,
    TopicFigures,
    encode_final,
    encode_task,
)
from kafka_sink.coordinator.transport.address import CoordinatorAddress
from kafka_sink.coordinator.transport.channel import Channel
from kafka_sink.coordinator.transport.connection import CoordinatorConnection
from kafka_sink.errors import KafkaSinkError

_INTERVAL_MS, _MAX_INTERVAL_MS = 1000.0, 60_000.0
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
        self._sent_ms = -math.inf
        self._sent_topics: Mapping[str, TopicFigures] = {}
        # Last reports of tasks that have ended: the next task may begin before they are sent.
        self._ended: deque[dict[str, Any]] = deque(maxlen=_MAX_ENDED)

    def begin(self, identity: TaskIdentity) -> None:
        """A task starts. Its first report is sent at once, so that the task is seen."""
        with self._lock:
            self._identity, self._sent_ms, self._sent_topics = identity, -math.inf, {}
        self._wake()

    def end(self, last: TaskFigures) -> None:
        """The task has ended; ``last`` has all its totals."""
        with self._lock:
            if self._identity is None:
                return
            self._identity = None
            self._ended.append(encode_task(last))
        self._wake()

    @property
    def identity(self) -> TaskIdentity | None:
        """The task that runs. None between tasks."""
        return self._identity

    def next_message(self, now_ms: float) -> Mapping[str, Any] | None:
        with self._lock:
            if self._ended:
                return self._ended.popleft()
            identity = self._identity
            if identity is None or now_ms < self._sent_ms + self._interval_ms:
                return None
            self._sent_ms = now_ms
            sent = self._sent_topics
        # Takes locks of the producer, so not under this one.
        figures = self._figures(identity)
        with self._lock:
            if self._identity is not identity:
                return self._ended.popleft() if self._ended else None
            self._sent_topics = figures.topics
        changed = {name: one for name, one in figures.topics.items() if sent.get(name) != one}
        body = encode_task(figures)
        if len(changed) < len(figures.topics):
            names = set(changed)
            body["topics"] = [one for one in body["topics"] if one[0] in names]
        return body

    def next_message_delay_ms(self, now_ms: float) -> float:
        with self._lock:
            if self._ended:
                return 0.0
            if self._identity is None:
                return math.inf
            return max(0.0, self._sent_ms + self._interval_ms - now_ms)

    def on_reply(self, body: Mapping[str, Any], last: bool, now_ms: float) -> None:
        """With many tasks the coordinator asks for fewer reports."""
        interval_ms = body.get("interval", _INTERVAL_MS)
        if isinstance(interval_ms, int | float) and _INTERVAL_MS <= interval_ms <= _MAX_INTERVAL_MS:
            self._interval_ms = interval_ms

    def on_connected(self, now_ms: float) -> None:
        """A new coordinator knows nothing of this task."""
        with self._lock:
            self._sent_ms, self._sent_topics = -math.inf, {}


def report_final(address: CoordinatorAddress, final: FinalFigures) -> None:
    """Called on the driver when a write commits or aborts: waits for the confirmation. Raises nothing."""
    was_silent = application_markers.happened_within(_SILENT, _SILENT_S)
    timeout_ms = _SHORT_TIMEOUT_MS if was_silent else _DRIVER_TIMEOUT_MS
    with suppress(OSError):
        try:
            _confirmed(address, timeout_ms, final)
        except (TimeoutError, KafkaSinkError):
            application_markers.remember(_SILENT)


def _confirmed(address: CoordinatorAddress, timeout_ms: float, final: FinalFigures) -> None:
    connection = CoordinatorConnection(address, timeout_ms, monotonic_ms)
    try:
        connection.send(KIND, encode_final(final), monotonic_ms())
        while not connection.is_idle:
            connection.receive(monotonic_ms())
    finally:
        connection.close()
