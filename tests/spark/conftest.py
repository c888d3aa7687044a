"""Fixtures that the tests of the sink's Spark side share."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest

from kafka_sink.model import TaskResult
from kafka_sink.task import producer_cache
from tests.support.table_sink import FakeProducer


class WholeProducer(FakeProducer):
    """Has all that a task uses of a producer."""

    activity = None

    def abort(self, cause: Exception) -> None:
        raise cause

    def finish(self, _meanwhile: object = None) -> TaskResult:
        return TaskResult(records=len(self.values))


@pytest.fixture
def producers(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments with which tasks request a producer: each one's coordinator and task."""
    asked: list[dict[str, Any]] = []

    def producer(
        _options: object, _plan: object, coordinator: object, *_: object, **given: object
    ) -> AbstractContextManager[WholeProducer]:
        asked.append({**given, "coordinator": coordinator})
        return nullcontext(WholeProducer())

    monkeypatch.setattr(producer_cache, "task_producer", producer)
    return asked
