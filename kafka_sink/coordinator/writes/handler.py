"""Ends attempts that outlive their write: the coordinator notifies tasks that the write is over. Pure.

The driver reports a write that commits or aborts, before ``save()`` or ``query.stop()`` returns. Some
attempts still run then: superseded speculative copies, tasks of a cancelled job, and tasks of executors that
lost the driver. Nobody waits for their rows, and their executor may take seconds to end them. Spark's UI
reports the end of a write's job, often before the driver does: see running_jobs.

Where the driver reports nothing, and Spark's SQL execution of a write in transactions has failed, nobody
commits them: Spark was interrupted before it could call ``abort``. They are ended once.

    task -> {"writing": name, "stage": id}     reply {} or {"over": name}; the push {"over": name} may follow
            "transactions": {...}              of a write in transactions, the fields of WriteTransactions
    task -> {"failed": name, "cause": text}    reply {}
    driver -> {"over": name, "again": false}   reply {} or {"cause": text}, of the last task that failed
              "aborts": false                  whether the driver aborts the write

``again``: a later write may have this name, so it is not remembered. Where the end of a stage's job is the
reason, reply and push name the ``stage``, too: a task that runs the micro-batch again has the same name.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kafka_sink.coordinator.transport import message_format as fields
from kafka_sink.coordinator.transport.handlers import Handler, Push, Reply, ServerMessage, TaskId
from kafka_sink.coordinator.transport.message_format import count, decoding, int32, whole
from kafka_sink.coordinator.writes.channel import MAX_CAUSE
from kafka_sink.coordinator.writes.running_jobs import UnfinishedWrites
from kafka_sink.model import WriteTransactions
from kafka_sink.printable import printable

if TYPE_CHECKING:
    from kafka_sink.coordinator.writes.running_jobs import JobWatch
    from kafka_sink.options import SinkOptions

# Finished writes that are remembered. An attempt that starts later than that is not ended.
MAX_OVER = 10_000
# Stages of one write that are watched.
MAX_STAGES = 1000
# Of Kafka's strings. Names are kept of so many writes with transactions.
_MAX_PREFIX, MAX_OPEN = 32_767, 1000
# Failed writes whose end the driver has not reported yet.
MAX_FAILED = 100


class WriteListener(Protocol):
    """The live view."""

    def note_failure(self, write: str, cause: str) -> None:
        """A task of the write has failed."""

    def note_over(self, write: str, now_ms: float, *, aborts: bool) -> None:
        """The driver has begun to commit or abort the write."""


class WriteHandler(Handler):
    """``jobs``: reports when the job of a stage has ended; it then calls ``wake``.

    ``end``: called with the transactions that nobody commits; it does not block. ``listener``: hears of
    failed tasks, and that the driver ends a write.
    """

    def __init__(
        self,
        jobs: JobWatch | None = None,
        wake: Callable[[], None] = lambda: None,
        end: Callable[[WriteTransactions], None] = lambda _: None,
        listener: WriteListener | None = None,
    ) -> None:
        self._listener = listener
        self._jobs = jobs
        self._wake = wake
        self._end = end
        # By task, its write and its stage.
        self._writing: dict[TaskId, tuple[str, int | None]] = {}
        # By write, the stages whose jobs are watched, also when its tasks already write for another one.
        self._watched: OrderedDict[str, set[int]] = OrderedDict()
        # By watched stage, what the driver has not reported the end of.
        self._open: OrderedDict[int, WriteTransactions] = OrderedDict()
        # Names of writes and numbers of stages.
        self._over: OrderedDict[str | int, None] = OrderedDict()
        # By write, why its last failed attempt failed.
        self._causes: OrderedDict[str, str] = OrderedDict()
        # Filled by another thread: append and popleft of a deque are atomic.
        self._ended_stages: deque[int] = deque()
        self._failed_stages: deque[int] = deque()

    def on_message(
        self,
        task: TaskId,
        request: int,
        body: Mapping[str, Any],
        now_ms: float,
    ) -> Sequence[ServerMessage]:
        if "over" in body:
            name = _name_in(body, "over")
            if not body.get("again"):
                self._remember(name)
            self._unwatch(name)
            if self._listener is not None:
                self._listener.note_over(name, now_ms, aborts=bool(body.get("aborts")))
            cause = self._causes.pop(name, "")
            pushes = [Push(task, _over(name)) for task, (write, _) in self._writing.items() if write == name]
            return [Reply(task, request, {"cause": cause} if cause else {}), *pushes]
        if "failed" in body:
            self._note_failure(_name_in(body, "failed"), _cause_in(body))
            return [Reply(task, request, {})]
        name, stage, transactions = _name_in(body, "writing"), _stage_in(body), _transactions_in(body)
        self._writing[task] = name, stage
        is_over = name in self._over or stage in self._over
        if self._jobs is not None and stage is not None and not is_over:
            self._watch(self._jobs, name, stage, transactions)
        if not is_over:
            return [Reply(task, request, {})]
        return [Reply(task, request, _over(name, None if name in self._over else stage))]

    def _watch(self, jobs: JobWatch, name: str, stage: int, transactions: WriteTransactions | None) -> None:
        stages = self._watched.setdefault(name, set())
        if stage not in stages and len(stages) >= MAX_STAGES:
            return
        stages.add(stage)
        jobs.watch(stage, self._on_job_end)
        if len(self._watched) > MAX_OVER:
            self._watched.popitem(last=False)
        if transactions is not None and stage not in self._open:
            self._open[stage] = transactions
            jobs.watch_execution(stage, transactions.execution, self._on_failure)
            if len(self._open) > MAX_OPEN:
                jobs.unwatch(self._open.popitem(last=False)[0])

    def _unwatch(self, name: str) -> None:
        """The write is over, so the end of its job need not be noticed."""
        for stage in self._watched.pop(name, ()):
            self._open.pop(stage, None)
            if self._jobs is not None:
                self._jobs.unwatch(stage)

    def _note_failure(self, name: str, cause: str) -> None:
        if self._listener is not None:
            self._listener.note_failure(name, cause)
        self._causes[name] = cause
        self._causes.move_to_end(name)
        if len(self._causes) > MAX_FAILED:
            self._causes.popitem(last=False)

    def _on_job_end(self, stage: int) -> None:
        """Any thread."""
        self._ended_stages.append(stage)
        self._wake()

    def _on_failure(self, stage: int) -> None:
        """Any thread."""
        self._failed_stages.append(stage)
        self._wake()

    def _remember(self, over: str | int) -> None:
        self._over[over] = None
        if len(self._over) > MAX_OVER:
            self._over.popitem(last=False)

    def on_disconnect(self, task: TaskId, now_ms: float) -> None:
        self._writing.pop(task, None)

    def on_time(self, now_ms: float) -> Sequence[ServerMessage]:
        ended = set()
        while self._ended_stages:
            ended.add(self._ended_stages.popleft())
        while self._failed_stages:
            stage = self._failed_stages.popleft()
            ended.add(stage)
            transactions = self._open.pop(stage, None)
            if transactions is not None:
                self._end(transactions)
        for stage in ended:
            self._remember(stage)
        if not ended:
            return ()
        return [Push(task, _over(*write)) for task, write in self._writing.items() if write[1] in ended]


def _over(name: str, stage: int | None = None) -> dict[str, Any]:
    return {"over": name} if stage is None else {"over": name, "stage": stage}


def _name_in(body: Mapping[str, Any], key: str) -> str:
    with decoding("name of a write"):
        return fields.name(body[key])


def _cause_in(body: Mapping[str, Any]) -> str:
    with decoding("cause of a failure"):
        if not isinstance(body["cause"], str):
            raise ValueError("not a text")
        return printable(body["cause"], MAX_CAUSE)


def _stage_in(body: Mapping[str, Any]) -> int | None:
    with decoding("number of a stage"):
        return None if body.get("stage") is None else whole(body["stage"])


def _transactions_in(body: Mapping[str, Any]) -> WriteTransactions | None:
    given = body.get("transactions")
    if given is None:
        return None
    with decoding("transactions of a write"):
        return WriteTransactions(
            count(given["execution"]),
            fields.name(given["prefix"], _MAX_PREFIX),
            fields.topic(given["topic"]),
            _positive(given["partitions"]),
            count(given["producer_id"]),
            int32(given["epoch"]),
        )


def _positive(value: Any) -> int:
    if int32(value) < 1:
        raise ValueError("not a number of partitions")
    return int(value)


def write_handler(
    options: SinkOptions,
    wake: Callable[[], None],
    jobs: JobWatch | None = None,
    listener: WriteListener | None = None,
) -> WriteHandler:
    return WriteHandler(jobs, wake, UnfinishedWrites(options).end, listener)
