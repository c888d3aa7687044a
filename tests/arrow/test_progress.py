"""The line of the terminal: one for all writes, and none is left."""

from __future__ import annotations

import os
import pty
import sys

import pytest

from kafka_sink.arrow.write import ProgressLine, is_wanted
from tests.support.scripted_cluster import until


def test_the_line_shows_all_writes_and_goes_with_the_last() -> None:
    shown: list[str] = []
    line = ProgressLine(shown.append, interval_s=0.01)
    with line.shown(lambda: 1000):
        with line.shown(lambda: 234):
            until(lambda: any("Kafka: 1,234 rows, " in text for text in shown), "both are shown")
        # What has ended still counts.
        until(lambda: "Kafka: 1,234 rows, " in shown[-1], "the other one goes on")
    assert shown[-1] == "\r\x1b[2K"
    count = len(shown)
    with line.shown(lambda: 7):
        until(lambda: "Kafka: 7 rows, " in shown[-1], "the next write begins at nothing")
    assert count < len(shown)


def test_a_short_write_shows_nothing() -> None:
    shown: list[str] = []
    with ProgressLine(shown.append, interval_s=3600).shown(lambda: 7):
        pass
    assert shown == []


def test_only_a_terminal_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_wanted()
    # A terminal that controls another session.
    leader, follower = pty.openpty()
    with os.fdopen(leader, "r+b", buffering=0), os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        assert not is_wanted()
