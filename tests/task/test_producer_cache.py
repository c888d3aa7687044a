"""Producers that a worker keeps from task to task."""

from __future__ import annotations

from kafka_sink.options import parse
from kafka_sink.task.producer_cache import ProducerCache
from tests.support.forked import in_a_fork

OPTIONS = parse({"kafka.bootstrap.servers": "h:1", "topic": "t"}).options


def test_a_fork_has_producers_of_its_own() -> None:
    """Their lock is that of ``ProcessEntries``."""
    cache = ProducerCache()
    parents = cache.take(OPTIONS.for_tasks())
    cache.put_back(parents)
    assert in_a_fork(lambda: cache.take(OPTIONS.for_tasks()) is not parents)
    assert cache.take(OPTIONS.for_tasks()) is parents
    parents.close()
