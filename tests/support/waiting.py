"""Waiting for real threads, processes and brokers: for a condition, and never for a time alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def until(
    condition: Callable[[], Found | None],
    what: str | Callable[[], object] = "it",
    within_s: float = 60.0,
    poll_s: float = 0.005,
) -> Found:
    """The first true value of ``condition``; fails the test with ``what`` if none comes in time."""
    found = within(condition, within_s, poll_s)
    if not found:
        said = what() if callable(what) else what
        raise AssertionError(f"did not happen within {within_s:.0f} s: {said}")
    return found


def within(condition: Callable[[], Found], within_s: float, poll_s: float = 0.005) -> Found:
    """The first true value of ``condition``, or its last value when the time is over."""
    deadline = time.monotonic() + within_s
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(poll_s)
    return found


def repeat_until(
    condition: Callable[[], object],
    act: Callable[[], object],
    what: str = "it",
    within_s: float = 60.0,
    pause_s: float = 0.005,
) -> None:
    """Acts again and again, at least ``pause_s`` apart, while ``condition`` does not hold."""

    def is_so() -> bool:
        found = bool(condition())
        if not found:
            act()
        return found

    until(is_so, what, within_s, pause_s)


def throughout(condition: Callable[[], object], for_s: float, what: str = "it") -> None:
    """Fails the test once ``condition`` does not hold at some moment of ``for_s`` seconds."""
    deadline = time.monotonic() + for_s
    while True:
        assert condition(), f"did not last: {what}"
        left = deadline - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, 0.02))


def retry(call: Callable[[], Found], on: type[Exception], within_s: float = 60.0) -> Found:
    """The result of the first call that does not raise ``on``; if the time is up, the error is raised."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            return call()
        except on:
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.05)
