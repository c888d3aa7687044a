"""A wake-up ends the wait that is under way or the next one, once."""

from __future__ import annotations

import selectors

from kafka_sink.wakeup import WakeUp


def test_any_number_of_wake_ups_is_one_event() -> None:
    wake_up = WakeUp()
    with selectors.DefaultSelector() as selector:
        selector.register(wake_up, selectors.EVENT_READ)
        assert selector.select(0) == []
        for _ in range(3):
            wake_up.wake()
        assert [key.fileobj for key, _ in selector.select(0)] == [wake_up]
        wake_up.clear()
        wake_up.clear()
        assert selector.select(0) == []
    wake_up.close()


def test_a_late_wake_up_is_ignored() -> None:
    """Catches: an error of a task that wakes a client which has just been closed."""
    wake_up = WakeUp()
    wake_up.close()
    wake_up.wake()
    wake_up.close()
