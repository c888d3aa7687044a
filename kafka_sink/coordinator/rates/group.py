"""Asks the coordinator for the rows of all tasks of an executor at once, and splits what it grants. No
I/O."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from kafka_sink.coordinator.rates.messages import KIND, Ask, RateRequest, decode_request, encode_request
from kafka_sink.coordinator.transport.group import Group, ToTask
from kafka_sink.coordinator.transport.message_format import capped
from kafka_sink.errors import ProtocolError

_MAX_JOBS = 10_000


class RateGroup(Group):
    """Tasks that wait, by job, in the order in which they asked."""

    kind = KIND

    def __init__(self) -> None:
        super().__init__()
        self._waiting: dict[str, OrderedDict[int, Ask]] = {}
        self._requests: dict[str, RateRequest] = {}
        self._job_of: dict[int, str] = {}
        # Jobs of which the coordinator does not know how many rows wait.
        self._news: dict[str, None] = {}
        # The one that it is being told of.
        self._told: str | None = None

    def on_task(self, task: int, request: int, body: Mapping[str, Any], now_ms: float) -> bool:
        asked = decode_request(body)
        if not asked.ask.rows:
            raise ProtocolError("a task asks for no rows")
        if self._job_of.get(task) != asked.key:
            self.on_task_left(task, now_ms)
            if asked.key not in self._waiting and len(self._waiting) >= _MAX_JOBS:
                raise ProtocolError("too many jobs")
        self._waiting.setdefault(asked.key, OrderedDict())[task] = asked.ask
        self._requests[asked.key] = asked
        self._job_of[task] = asked.key
        self._news[asked.key] = None
        self.outgoing.append(ToTask(task, request, {}))
        return True

    def on_task_left(self, task: int, now_ms: float) -> None:
        key = self._job_of.pop(task, None)
        if key is not None:
            del self._waiting[key][task]
            self._news[key] = None

    def due_ms(self, now_ms: float) -> float:
        return -math.inf if self._news else math.inf

    def next_message(self, now_ms: float) -> Mapping[str, Any] | None:
        if not self._news:
            return None
        key = next(iter(self._news))
        del self._news[key]
        self._told = key
        asks = self._waiting[key].values()
        rows, size = capped(sum(one.rows for one in asks)), capped(sum(one.bytes for one in asks))
        total = Ask(rows, size, len(asks))
        found = self._requests[key]._replace(ask=total)
        if not asks:
            del self._waiting[key], self._requests[key]
        return encode_request(found)

    def on_reply(self, body: Mapping[str, Any], took_ms: float, now_ms: float) -> None:
        self._told = None

    def on_push(self, body: Mapping[str, Any], now_ms: float) -> None:
        key, granted = body.get("job"), body.get("rows")
        if not isinstance(key, str) or not isinstance(granted, int) or granted < 1:
            raise ProtocolError("a grant without rows or job")
        waiting = self._waiting.get(key)
        if not waiting:
            return
        # What all get in proportion adds up to the grant, whatever is rounded.
        total = sum(one.rows for one in waiting.values())
        before = given = 0
        for task, ask in list(waiting.items()):
            before += ask.rows
            # Rounded up: the task that has waited longest gets what cannot be split.
            rows = min(-(-before * granted // total), before) - given
            given += rows
            if rows:
                del waiting[task], self._job_of[task]
                self.outgoing.append(ToTask(task, None, {"rows": rows, "job": key}))
        # The coordinator takes for served all that it knows of.
        if waiting or self._told == key:
            self._news[key] = None
        else:
            del self._waiting[key], self._requests[key]
            self._news.pop(key, None)
