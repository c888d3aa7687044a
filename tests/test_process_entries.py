"""Entries that a process keeps and does not share with a forked child."""

from __future__ import annotations

from kafka_sink.process_entries import ProcessEntries
from tests.support.forked import in_a_fork


def test_a_fork_begins_without_entries_and_with_a_lock_of_its_own() -> None:
    kept = ProcessEntries({"a": 1})
    with kept.lock:
        assert in_a_fork(lambda: kept.lock.acquire(timeout=30) and not kept.entries)
    assert kept.entries == {"a": 1}
