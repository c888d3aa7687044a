"""The sink's own monotonic time, which a test may slow down, or move on at once.

A timeout that a test waits for is short, and also holds for the steps before it, which a busy machine may not
do that quickly. While the sink's time goes slowly, they have twenty times as long.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

from kafka_sink import clock

_SLOWLY = 0.05


class SinkTime:
    """The time that ``clock.monotonic_ms`` returns in this process."""

    def __init__(self, rate: float) -> None:
        # The real time at which this rate began, the sink's time at that moment, and the rate. They are one
        # value, so a thread never reads parts of two.
        self._since = (time.monotonic(), time.monotonic(), rate)

    def now_s(self) -> float:
        began_s, shown_s, rate = self._since
        return shown_s + (time.monotonic() - began_s) * rate

    def go_on(self) -> None:
        """From now on the sink's time goes as fast as real time."""
        self._since = (time.monotonic(), self.now_s(), 1.0)

    def skip(self, milliseconds: float) -> None:
        """Move the sink's time on at once. Threads notice it when they wake up."""
        began_s, shown_s, rate = self._since
        self._since = (began_s, shown_s + milliseconds / 1000, rate)


@contextmanager
def sink_time(rate: float = 1.0) -> Iterator[SinkTime]:
    """Within the block, the sink's time in this process belongs to the test."""
    found = SinkTime(rate)
    with patch.object(clock, "time", SimpleNamespace(monotonic=found.now_s, time=time.time)):
        yield found


@contextmanager
def slow_time() -> Iterator[SinkTime]:
    """Within the block, the sink's time goes slowly until ``go_on``."""
    with sink_time(_SLOWLY) as found:
        yield found


@contextmanager
def slow_until(condition: Callable[[], object]) -> Iterator[None]:
    """Within the block, the sink's time goes slowly until the condition holds."""
    over = threading.Event()

    def watch() -> None:
        try:
            while not (over.wait(0.005) or condition()):
                pass
        finally:
            found.go_on()

    with slow_time() as found:
        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        try:
            yield
        finally:
            over.set()
            watching.join()
