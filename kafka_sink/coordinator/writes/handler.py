"""Ends attempts that outlive their write: the coordinator notifies tasks that the write is over. Pure.

The driver reports a write that commits or aborts, before ``save()`` or ``query.stop()`` returns. Some
attempts still run then: superseded speculative copies, tasks of a cancelled job, and tasks of executors that
lost the driver. Nobody waits for their rows, and their executor may take seconds to end them. Spark's UI
reports the end of a write's job, often before the driver does: see running_jobs.

    task -> {"writing": name, "stage": id}     reply {} or {"over": name}; the push {"over": name} may follow
    driver -> {"over": name, "again": false}   reply {}

``again``: a later write may have this name, so it is not remembered. Where the end of a stage's job is the
reason, reply and push name the ``stage``, too: a task that runs the micro-batch again has the same name.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kafka_sink.coordinator.transport import fields
from kafka_sink.coordinator.transport.fields import decoding, whole
from kafka_sink.coordinator.transport.handlers import Handler, Push, Reply, ServerMessage

if TYPE_CHECKING:
    from kafka_sink.coordinator.writes.running_jobs import JobWatch
    from kafka_sink.options import SinkOptions

# Finished writes that are remembered. An attempt that starts later than that is not ended.
_MAX_OVER = 10_000


class WriteHandler(Handler):
    """``jobs``: reports when the job of a stage has ended; it then calls ``wake``."""

    def __init__(self, jobs: JobWatch | None = None, wake: Callable[[], None] = lambda: None) -> None:
        self._jobs = jobs
        self._wake = wake
        # By task, its write and its stage.
        self._writing: dict[int, tuple[str, int | None]] = {}
        # By write, the stages whose jobs are watched, also when its tasks already write for another one.
        self._watched: OrderedDict[str, set[int]] = OrderedDict()
        # Names of writes and numbers of stages.
        self._over: OrderedDict[str | int, None] = OrderedDict()
        # Filled by another thread: append and popleft of a deque are atomic.
        self._ended_stages: deque[int] = deque()

    def on_message(
        self,
        peer: int,
        request: int,
        body: Mapping[str, Any],
        now_ms: float,
    ) -> Sequence[ServerMessage]:
        if "over" in body:
            name = _name_in(body, "over")
            if not body.get("again"):
                self._remember(name)
            self._unwatch(name)
            pushes = [Push(peer, _over(name)) for peer, (write, _) in self._writing.items() if write == name]
            return [Reply(peer, request, {}), *pushes]
        name, stage = _name_in(body, "writing"), _stage_in(body)
        self._writing[peer] = name, stage
        is_over = name in self._over or stage in self._over
        if self._jobs is not None and stage is not None and not is_over:
            self._jobs.watch(stage, self._on_job_end)
            self._watched.setdefault(name, set()).add(stage)
            if len(self._watched) > _MAX_OVER:
                self._watched.popitem(last=False)
        if not is_over:
            return [Reply(peer, request, {})]
        return [Reply(peer, request, _over(name, None if name in self._over else stage))]

    def _unwatch(self, name: str) -> None:
        """The write is over, so the end of its job need not be noticed."""
        for stage in self._watched.pop(name, ()):
            if self._jobs is not None:
                self._jobs.unwatch(stage)

    def _on_job_end(self, stage: int) -> None:
        """Any thread."""
        self._ended_stages.append(stage)
        self._wake()

    def _remember(self, over: str | int) -> None:
        self._over[over] = None
        if len(self._over) > _MAX_OVER:
            self._over.popitem(last=False)

    def on_disconnect(self, peer: int, now_ms: float) -> None:
        self._writing.pop(peer, None)

    def on_time(self, now_ms: float) -> Sequence[ServerMessage]:
        ended = set()
        while self._ended_stages:
            ended.add(self._ended_stages.popleft())
        for stage in ended:
            self._remember(stage)
        if not ended:
            return ()
        return [Push(peer, _over(*write)) for peer, write in self._writing.items() if write[1] in ended]


def _over(name: str, stage: int | None = None) -> dict[str, Any]:
    return {"over": name} if stage is None else {"over": name, "stage": stage}


def _name_in(body: Mapping[str, Any], key: str) -> str:
    with decoding("name of a write"):
        return fields.name(body[key])


def _stage_in(body: Mapping[str, Any]) -> int | None:
    with decoding("number of a stage"):
        return None if body.get("stage") is None else whole(body["stage"])


def write_handler(
    options: SinkOptions,  # noqa: ARG001 - HandlerFactory's signature
    wake: Callable[[], None],
    jobs: JobWatch | None = None,
) -> Handler:
    """The handler of one cluster."""
    return WriteHandler(jobs, wake)
