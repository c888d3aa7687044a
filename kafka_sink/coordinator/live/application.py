"""The metrics of one Spark application: sums of the reports of tasks and of the driver. No I/O.

Tasks report totals. The difference to the last report is added, so that a lost or repeated report does no
harm. Totals by cluster, topic and broker never shrink: they count the rows that brokers acknowledged, even in
attempts that failed later. When a write has ended, its job shows the driver's sums. All of it is bounded.
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any

from msgspec.structs import asdict, replace

from kafka_sink.clock import STARTING
from kafka_sink.coordinator.live import running_tasks
from kafka_sink.coordinator.live.messages import (
    MIN_INTERVAL_MS,
    OUTCOMES,
    AboutJob,
    DriverWaits,
    ReportEvery,
    TaskIdentity,
    TaskReport,
    WriteEnded,
)
from kafka_sink.coordinator.live.running_tasks import RunningTask, RunningTasks
from kafka_sink.coordinator.schema import Outbox, Service, ServiceScope, receives
from kafka_sink.counts import GAUGES, NAMES, Number, RateWindow, TopicMetrics
from kafka_sink.printable import printable

# Topics, clusters and dead letters beyond these numbers count under OTHER. Further brokers are not counted.
MAX_TOPICS, MAX_BROKERS, _MAX_CLUSTERS, _MAX_DEAD_LETTERS = 200, 500, 100, 100
OTHER = "(other)"
# ``_MAX_WRITES`` bounds the writes that have not ended.
_MAX_JOBS, _MAX_WRITES, _MAX_ENDED_WRITES = 100, 5_000, 10_000
_MAX_TASKS_SHOWN, _MAX_MUTES_SHOWN = 100, 200
MAX_EVENTS, _MAX_EVENT_TEXT = 50, 400
_HISTORY = 300
# Tasks report every second, or less often if there are many: 200 reports a second take less than 0.2 cores.
_REPORTS_PER_S = 200.0
_LONGEST_INTERVAL_MS = 30_000.0
# A task gets a new interval if it differs by at least this share from its present one.
_NEWS = 0.1
# How long, or for how many intervals, a silent task has not reported, and one that is no longer shown.
_SILENT_MS, _GONE_MS = 5_000.0, 30_000.0
_SILENT_INTERVALS, _GONE_INTERVALS = 2.5, 6.0
# A write that nothing has been reported about for this long has ended without a report of the driver. Its
# transactions have also ended: by default, brokers allow no longer ones (transaction.max.timeout.ms).
_LOST_MS = 900_000.0
_LEVELS = {"committed": "good", "aborted": "bad", "lost": "warn"}
# The counters of rows that brokers have.
_ACKNOWLEDGED = ("records", "unconfirmed")


@dataclass(slots=True)
class _Cluster:
    counters: Counter[str] = field(default_factory=Counter)
    # Rows by topic and reason.
    dead_letters: Counter[tuple[str, str]] = field(default_factory=Counter)


@dataclass(slots=True)
class _Topic:
    """The sums of a topic. ``totals``: in the order of TopicMetrics."""

    totals: list[Number] = field(default_factory=lambda: [0] * 4)
    records: RateWindow = field(default_factory=RateWindow)


@dataclass(slots=True)
class _Broker:
    """The sums of a broker.

    ``totals``: requests, failures, latency and throttling in milliseconds, and then the latency's buckets.
    """

    address: str = ""
    totals: list[Number] = field(default_factory=lambda: [0] * 4)
    responses: RateWindow = field(default_factory=RateWindow)
    latency_ms: RateWindow = field(default_factory=RateWindow)


@dataclass(slots=True)
class _Write:
    """A write that has not ended: the sums of its attempts.

    ``ended``: its tasks that have ended. ``open_transactions``: theirs, which the driver has yet to end.
    """

    job: str
    cluster: str = ""
    counters: Counter[str] = field(default_factory=Counter)
    topics: dict[str, list[Number]] = field(default_factory=dict)
    last_task: int = -1
    ended: set[int] = field(default_factory=set)
    done: int = 0
    open_transactions: int = 0
    open_since_ms: float = math.inf


@dataclass(slots=True)
class _Job:
    """A batch write, or all micro-batches of a query. ``state``: "running", or how the last write ended."""

    cluster: str
    query: str
    started_s: float
    reported_ms: float
    state: str = "running"
    ended_s: float | None = None
    batch: int = -1
    tasks_done: int = 0
    topics: set[str] = field(default_factory=set)
    about: AboutJob | None = None
    # Why it was aborted, or otherwise why one of its tasks failed.
    cause: str = ""
    # The name of its writes, without the micro-batch.
    write: str = ""
    # When brokers last acknowledged rows of this job.
    acknowledged_ms: float = -math.inf
    counters: Counter[str] = field(default_factory=Counter)
    records: RateWindow = field(default_factory=RateWindow)
    sent_bytes: RateWindow = field(default_factory=RateWindow)


class ApplicationMetrics:
    """Collects reports and makes snapshots of them. It belongs to the coordinator's loop.

    Times are monotonic milliseconds.
    """

    def __init__(self, wall_s: Callable[[], float] = time.time) -> None:
        self._wall_s = wall_s
        self._started_s = wall_s()
        # The application's name, which only tasks report.
        self._application = ""
        self._clusters: dict[str, _Cluster] = {}
        self._topics: dict[tuple[str, str], _Topic] = {}
        self._brokers: dict[tuple[str, int], _Broker] = {}
        self._jobs: OrderedDict[str, _Job] = OrderedDict()
        self.writes: OrderedDict[str, _Write] = OrderedDict()
        # The writes that have ended, each with the highest number of a task that belonged to it.
        self._ended_writes: OrderedDict[str, float] = OrderedDict()
        self.running = RunningTasks()
        # What the driver waits for, and when it reported that, by the driver's name of the write.
        self._driver: dict[str, tuple[DriverWaits, float]] = {}
        self.interval_ms = MIN_INTERVAL_MS
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        # The muted targets, and since when.
        self._muted: dict[str, float] = {}
        # The time, rows per second, and the latency in milliseconds.
        self._history: deque[tuple[float, float, float | None]] = deque(maxlen=_HISTORY)
        self.reports = 0
        # Returns the coordinator's own metrics.
        self.coordinator: Callable[[], Mapping[str, Any]] = dict

    def on_report(self, report: TaskReport, now_ms: float) -> None:
        """Add a task's report. It is ignored if the task or the write has ended."""
        identity = report.identity
        self.reports += 1
        self._application = identity.application or self._application
        if identity.task <= self._ended_writes.get(identity.write, -1):
            return
        # A micro-batch that runs again has the name of the failed run.
        self._ended_writes.pop(identity.write, None)
        name, cluster = self._cluster_of(report.cluster)
        job = self._job_of(name, identity, now_ms)
        write = self.writes.setdefault(identity.write, _Write(identity.job, name))
        self.writes.move_to_end(identity.write)
        if len(self.writes) > _MAX_WRITES:
            self._forget_write(next(iter(self.writes)), math.inf)
        if identity.task in write.ended:
            return
        write.last_task = max(write.last_task, identity.task)
        attempt = self.running.on_report(name, report, now_ms)
        self._add_counters(attempt, report, (cluster.counters, job.counters, write.counters), job)
        self._add_topics(attempt, report, write, job)
        self._add_brokers(attempt, report)
        self._add_dead_letters(attempt, report, cluster)
        if not report.done:
            return
        self.running.remove(attempt.key)
        if self.running.capacity:
            write.ended.add(identity.task)
            self.running.entries += 1
        if not report.failed:
            write.done += 1
            job.tasks_done += 1
            if attempt.transaction_since_ms is not None:
                write.open_transactions += 1
                write.open_since_ms = min(write.open_since_ms, attempt.transaction_since_ms)

    def _cluster_of(self, name: str) -> tuple[str, _Cluster]:
        if name not in self._clusters and len(self._clusters) >= _MAX_CLUSTERS:
            name = OTHER
        return name, self._clusters.setdefault(name, _Cluster())

    def _job_of(self, cluster: str, identity: TaskIdentity, now_ms: float) -> _Job:
        jobs = self._jobs
        job = jobs.get(identity.job)
        if job is None:
            if len(jobs) >= _MAX_JOBS:
                del jobs[min(jobs, key=lambda one: (jobs[one].state == "running", jobs[one].reported_ms))]
            job = jobs[identity.job] = _Job(cluster, identity.query, self._wall_s(), now_ms)
        job.state, job.ended_s = "running", None
        job.write = identity.write.partition("/")[0]
        job.reported_ms = now_ms
        job.batch = max(job.batch, identity.batch)
        job.about = identity.about or job.about
        return job

    def _end_job(self, key: str, job: _Job, state: str) -> None:
        job.state, job.ended_s = state, self._wall_s()
        if job.query and state == "committed":
            return
        label = f"{'query' if job.query else 'write'} {(job.about and job.about.name) or key[:8]}"
        why = f": {job.cause}" if job.cause and state != "committed" else ""
        self._add_event(_LEVELS[state], f"{label} {state}{why}")

    def _add_counters(
        self, attempt: RunningTask, report: TaskReport, sums: Iterable[Counter[str]], job: _Job
    ) -> None:
        now = [report.counters.get(name, 0) for name in NAMES]
        for name, added in zip(NAMES, self.running.grow(attempt, None, now), strict=False):
            if added:
                for counters in sums:
                    counters[name] += added  # type: ignore[assignment]  # some are milliseconds
                if name in _ACKNOWLEDGED:
                    job.acknowledged_ms = attempt.reported_ms

    def _add_topics(self, attempt: RunningTask, report: TaskReport, write: _Write, job: _Job) -> None:
        for name, now in report.topics.items():
            if name not in write.topics and not self.running.capacity:
                continue
            added = self.running.grow(attempt, name, now)
            if added:
                self._add_to_topic(attempt.cluster, job, name, added)
                self.running.entries += name not in write.topics
                write.topics[name] = _sum(write.topics.get(name, ()), added)

    def _add_to_topic(self, cluster: str, job: _Job, name: str, added: Iterable[Number]) -> None:
        key = (cluster, name or OTHER)
        if key not in self._topics and len(self._topics) >= MAX_TOPICS:
            key = (cluster, OTHER)
        shown = self._topics.setdefault(key, _Topic())
        shown.totals = _sum(shown.totals, added)
        if len(job.topics) < MAX_TOPICS:
            job.topics.add(name or OTHER)

    def _add_brokers(self, attempt: RunningTask, report: TaskReport) -> None:
        for node, now in report.brokers.items():
            key = attempt.cluster, node
            if key in self._brokers or len(self._brokers) < MAX_BROKERS:
                broker = self._brokers.setdefault(key, _Broker())
                broker.address = now.address or broker.address
                totals = (now.requests, now.failures, now.latency_ms, now.throttle_ms, *now.latency_buckets)
                broker.totals = _sum(broker.totals, self.running.grow(attempt, node, totals))

    def _add_dead_letters(self, attempt: RunningTask, report: TaskReport, cluster: _Cluster) -> None:
        kept = cluster.dead_letters
        for topic, reason, rows in report.dead_letters:
            key = topic, reason
            added = sum(self.running.grow(attempt, key, (rows,)))
            if added:
                kept[key if key in kept or len(kept) < _MAX_DEAD_LETTERS else (OTHER, "")] += int(added)

    def on_attempt_failed(self, write: str, cause: str) -> None:
        """A task of a write that continues has failed."""
        if write in self.writes and (job := self._jobs.get(self.writes[write].job)):
            job.cause = cause
        self._add_event("warn", f"a task failed: {cause}")

    def on_driver_waits(self, waits: DriverWaits, now_ms: float) -> None:
        """Record that the driver started or stopped waiting for brokers."""
        self._driver.pop(waits.write, None)
        if waits.awaited:
            # If the write starts no task, this is the first report about its cluster.
            name, _ = self._cluster_of(waits.cluster)
            self._driver[waits.write] = replace(waits, cluster=name), now_ms
            if len(self._driver) > _MAX_JOBS:
                del self._driver[next(iter(self._driver))]
        key = self._key_of(waits.write)
        job = self._jobs.get(key)
        if job is not None:
            job.reported_ms = now_ms
        if waits.cause and waits.step == STARTING:
            # The write has not begun, so it will not be reported as aborted.
            if job is not None:
                job.cause = waits.cause
                self._end_job(key, job, "aborted")
            else:
                self._add_event("bad", f"a write could not start: {waits.cause}")

    def _key_of(self, write: str) -> str:
        """The key of the job with this write, given the driver's name of it; "" if it is unknown."""
        return next((key for key, job in self._jobs.items() if write in (key, job.write)), "")

    def on_write_ended(self, ended: WriteEnded, now_ms: float) -> None:
        """The driver has committed or aborted a write. A repeated report changes nothing."""
        if ended.last_task <= self._ended_writes.get(ended.write, -math.inf):
            return
        name, cluster = self._cluster_of(ended.cluster)
        write = self.writes.get(ended.write) or _Write(ended.query or ended.write)
        # If no task has finished, the driver does not know the query.
        query = write.job if write.job != ended.write else ""
        job = self._job_of(name, TaskIdentity(ended.write, 0, query=query, batch=ended.batch), now_ms)
        # The driver's sums replace those of the tasks, but no total shrinks.
        for counter in ended.counters.keys() & set(NAMES):
            missing = ended.counters[counter] - write.counters[counter]
            job.counters[counter] += missing  # type: ignore[assignment]
            cluster.counters[counter] += max(0, missing)  # type: ignore[assignment]
        cluster.counters["uncommitted"] += max(0, _rows(write.counters) - _rows(ended.counters))
        for topic, sums in ended.topics.items():
            pairs = zip_longest(sums, write.topics.get(topic, ()), fillvalue=0)
            self._add_to_topic(name, job, topic, [max(0, now - old) for now, old in pairs])
        cluster.counters[f"writes_{ended.outcome}"] += 1
        for outcome in OUTCOMES:
            cluster.counters[f"transactions_{outcome}"] += ended.transactions.get(outcome, 0)
        job.cause = ended.cause or (job.cause if ended.outcome == "aborted" else "")
        # The last reports of some tasks may arrive later, or never.
        job.tasks_done += ended.tasks - write.done
        self._end_job(query or ended.write, job, ended.outcome)
        last_task = max(ended.last_task, write.last_task)
        # The tasks of an aborted micro-batch may be unknown, and its next run has the same name.
        is_final = last_task < 0 and (ended.outcome == "committed" or ended.batch < 0)
        self._forget_write(ended.write, math.inf if is_final else last_task)

    def _forget_write(self, name: str, last_task: float) -> None:
        self._ended_writes[name] = last_task
        if len(self._ended_writes) > _MAX_ENDED_WRITES:
            self._ended_writes.popitem(last=False)
        write = self.writes.pop(name, None)
        if write is not None:
            self.running.entries -= len(write.topics) + len(write.ended)
        self.running.remove_write(name)

    def sample(self, now_ms: float) -> None:
        """Once a second: forget lost writes, sample the totals for rates, and record what is muted."""
        if not self._clusters:
            return
        for name, write in list(self.writes.items()):
            job = self._jobs.get(write.job)
            # The job may have been dropped in favour of other jobs while its tasks continue.
            if job is not None and now_ms - job.reported_ms > _LOST_MS:
                # A micro-batch that runs again has the same name.
                self._forget_write(name, write.last_task if job.query else math.inf)
                if job.state == "running":
                    self._end_job(write.job, job, "lost")
        for topic in self._topics.values():
            topic.records.add(now_ms, topic.totals[0])
        for job in self._jobs.values():
            job.records.add(now_ms, _rows(job.counters))
            job.sent_bytes.add(now_ms, job.counters["sent_bytes"])
        for broker in self._brokers.values():
            broker.responses.add(now_ms, sum(broker.totals[4:]))
            broker.latency_ms.add(now_ms, broker.totals[2])
        self._add_mute_events(running_tasks.muted(self._present_tasks(now_ms), now_ms))
        latency_s = _recent_latency_s(self._brokers.values())
        latency_ms = None if latency_s is None else round(latency_s * 1000, 1)
        rate = sum(job.records.per_second for job in self._jobs.values())
        self._history.append((round(self._wall_s(), 1), round(rate, 1), latency_ms))

    def _add_mute_events(self, mutes: Iterable[Mapping[str, Any]]) -> None:
        now_s = self._wall_s()
        present = {f"{mute['kind']} {mute['target']}": mute for mute in mutes}
        for name, mute in present.items():
            if name not in self._muted:
                self._muted[name] = now_s - mute["seconds"]
                self._add_event("bad", f"{name} muted: {mute['reason']}", self._muted[name])
        for name in self._muted.keys() - present.keys():
            self._add_event("good", f"{name} unmuted after {now_s - self._muted.pop(name):.0f} s")

    def _add_event(self, level: str, text: str, time_s: float | None = None) -> None:
        """Add an event, which happened now unless a time is given. ``level``: good, warn or bad."""
        at_s = self._wall_s() if time_s is None else time_s
        self._events.appendleft({"time": at_s, "level": level, "text": printable(text, _MAX_EVENT_TEXT)})

    def _silent_before_ms(self, now_ms: float) -> float:
        return now_ms - max(_SILENT_MS, _SILENT_INTERVALS * self.interval_ms)

    def _present_tasks(self, now_ms: float) -> list[RunningTask]:
        """The tasks that have reported recently enough to be shown."""
        gone_before_ms = now_ms - max(_GONE_MS, _GONE_INTERVALS * self.interval_ms)
        return [task for task in self.running if task.reported_ms >= gone_before_ms]

    def snapshot(self, now_ms: float) -> dict[str, Any]:
        """Everything that the page and the metrics show, as plain values. Times are seconds."""
        tasks = self._present_tasks(now_ms)
        mutes = running_tasks.muted(tasks, now_ms)
        driver, opened = self._shown_driver(now_ms), self._open_transactions()
        running = Counter(task.identity.job for task in tasks)
        return {
            "application": self._application,
            "time": self._wall_s(),
            "started": self._started_s,
            "history": list(self._history),
            "events": list(self._events),
            "clusters": [
                {
                    "cluster": name,
                    "counters": dict(cluster.counters),
                    "dead_letters": [[*key, number] for key, number in cluster.dead_letters.most_common()],
                    **self._shown_running([task for task in tasks if task.cluster == name], now_ms),
                    "muted": Counter(mute["kind"] for mute in mutes if mute["cluster"] == name),
                    "driver": {
                        wait["step"]: wait["seconds"] for wait in reversed(driver) if wait["cluster"] == name
                    },
                    "transactions": _shown_open(
                        [transactions for key, transactions in opened.items() if key[0] == name], now_ms
                    ),
                }
                for name, cluster in sorted(self._clusters.items())
            ],
            "jobs": [
                self._shown_job(key, job, running[key], opened.get((job.cluster, key)), now_ms)
                for key, job in reversed(self._jobs.items())
            ],
            "topics": [
                {"cluster": cluster, "topic": name, "records_rate": topic.records.per_second}
                | dict(zip(TopicMetrics._fields, topic.totals, strict=True))
                for (cluster, name), topic in sorted(self._topics.items())
            ],
            "brokers": self._shown_brokers(tasks, mutes, now_ms),
            "driver": driver,
            "mutes": mutes[:_MAX_MUTES_SHOWN],
            "tasks": self._shown_tasks(tasks, now_ms),
            "tasks_running": len(tasks),
            "reports": self.reports,
            "coordinator": self.coordinator(),
        }

    def _shown_running(self, tasks: Sequence[RunningTask], now_ms: float) -> dict[str, Any]:
        sums = map(sum, zip(*(task.gauges for task in tasks), strict=True))
        return {
            "gauges": {name: value for name, value in zip(GAUGES, sums, strict=False) if value},
            "states": Counter(self._state_of(task, now_ms) for task in tasks),
        }

    def _state_of(self, task: RunningTask, now_ms: float) -> str:
        return "silent" if task.reported_ms < self._silent_before_ms(now_ms) else task.state

    def _open_transactions(self) -> dict[tuple[str, str], tuple[int, float]]:
        """The number of open transactions by cluster and job, and the start of the oldest.

        Covers running tasks, including silent ones, and ended tasks whose write has not ended.
        """
        opened: dict[tuple[str, str], tuple[int, float]] = {}
        running = ((task.cluster, task.identity.job, 1, task.transaction_since_ms) for task in self.running)
        done = (
            (write.cluster, write.job, write.open_transactions, write.open_since_ms)
            for write in self.writes.values()
        )
        for cluster, job, number, since_ms in chain(running, done):
            if number and since_ms is not None:
                before, first_ms = opened.get((cluster, job), (0, math.inf))
                opened[cluster, job] = before + number, min(first_ms, since_ms)
        return opened

    def _shown_driver(self, now_ms: float) -> list[dict[str, Any]]:
        """What the driver waits for, the longest wait first. A wait without a recent report has ended."""
        shown = []
        for waits, at_ms in self._driver.values():
            key, age_ms = self._key_of(waits.write), now_ms - at_ms
            if age_ms <= _SILENT_MS:
                seconds, left = (waits.age_ms + age_ms) / 1000, max(0.0, waits.left_ms - age_ms) / 1000
                shown.append({**asdict(waits), "job": key, "seconds": seconds, "left": left})
        return sorted(shown, key=lambda one: -one["seconds"])

    def _shown_job(
        self, key: str, job: _Job, tasks: int, opened: tuple[int, float] | None, now_ms: float
    ) -> dict[str, Any]:
        state, since_ms = job.state, job.acknowledged_ms
        if job.query and not tasks and state in ("running", "committed"):
            state = "waiting for rows"
        return {
            "job": key,
            "query": job.query,
            "batch": job.batch,
            "state": state,
            "name": job.about.name if job.about else "",
            "options": job.about.options if job.about else None,
            "cause": job.cause,
            **_shown_open([opened] if opened else [], now_ms),
            "acknowledged": None if since_ms == -math.inf else (now_ms - since_ms) / 1000,
            # The time since a task, or a driver that waits for brokers, reported anything.
            "quiet": (now_ms - job.reported_ms) / 1000,
            "ended": None if job.ended_s is None else self._wall_s() - job.ended_s,
            "started": job.started_s,
            "seconds": (job.ended_s or self._wall_s()) - job.started_s,
            "tasks": tasks,
            "tasks_done": job.tasks_done,
            "topics": sorted(job.topics)[:5],
            "topic_count": len(job.topics),
            "counters": dict(job.counters),
            "records_rate": job.records.per_second,
            "sent_bytes_rate": job.sent_bytes.per_second,
        }

    def _shown_brokers(
        self, tasks: Iterable[RunningTask], mutes: Iterable[Mapping[str, Any]], now_ms: float
    ) -> list[dict[str, Any]]:
        muted = {(mute["cluster"], mute["target"]): mute["seconds"] for mute in mutes}
        waited_for = running_tasks.requests(tasks)
        shown = []
        for key, broker in sorted(self._brokers.items()):
            in_flight, since_ms = waited_for.get(key, (0, math.inf))
            requests, failures, latency_ms, throttle_ms, *buckets = broker.totals
            shown.append(
                {
                    "cluster": key[0],
                    "broker": key[1],
                    "address": broker.address,
                    "requests": requests,
                    "failures": failures,
                    "in_flight": in_flight,
                    "oldest": max(0.0, now_ms - since_ms) / 1000,
                    "latency_sum": latency_ms / 1000,
                    "latency_buckets": buckets,
                    "latency": _recent_latency_s([broker]),
                    "throttled": throttle_ms / 1000,
                    "muted": muted.get((key[0], str(key[1]))),
                }
            )
        return shown

    def _shown_tasks(self, tasks: Iterable[RunningTask], now_ms: float) -> list[dict[str, Any]]:
        return [
            {
                "job": task.identity.job,
                "task": task.identity.task,
                "partition": task.identity.partition,
                "attempt": task.identity.attempt,
                "host": task.identity.host,
                "state": self._state_of(task, now_ms),
                "seconds": (now_ms - task.state_since_ms) / 1000,
                "elapsed": (task.elapsed_ms + now_ms - task.reported_ms) / 1000,
                "records": _rows(dict(zip(NAMES, task.totals.get(None, ()), strict=False))),
                **dict(zip(GAUGES, task.gauges, strict=True)),
            }
            for task in running_tasks.longest_waits(tasks, _MAX_TASKS_SHOWN, self._silent_before_ms(now_ms))
        ]


def _shown_open(opened: Iterable[tuple[int, float]], now_ms: float) -> dict[str, Any]:
    numbers, since_ms = zip(*opened, (0, now_ms), strict=True)
    return {"open": sum(numbers), "oldest": max(0.0, now_ms - min(since_ms)) / 1000}


def _rows(counters: Mapping[str, Number]) -> int:
    return int(sum(counters.get(name, 0) for name in _ACKNOWLEDGED))


def _recent_latency_s(brokers: Collection[_Broker]) -> float | None:
    responses = sum(broker.responses.increase for broker in brokers)
    return sum(broker.latency_ms.increase for broker in brokers) / responses / 1000 if responses else None


def _sum(totals: Iterable[Number], added: Iterable[Number]) -> list[Number]:
    return [have + more for have, more in zip_longest(totals, added, fillvalue=0)]


class ReportService(Service):
    """Takes the reports of tasks and of the driver, and tells each task how often it should report."""

    scope = ServiceScope.APPLICATION

    def __init__(self, out: Outbox, metrics: ApplicationMetrics) -> None:
        super().__init__(out)
        self._metrics = metrics
        self.intervals_ms: dict[int, float] = {}
        # When the reports taken so far would have arrived at the highest rate.
        self._due_ms = -math.inf

    @receives(TaskReport)
    def on_task_report(self, peer: int, message: TaskReport, now_ms: float) -> None:
        # After a stall thousands of reports arrive together. The next one of a task contains the same totals.
        is_taken = message.done or self._admits(now_ms)
        if is_taken:
            self._metrics.on_report(message, now_ms)
        known_ms = self.intervals_ms.setdefault(peer, MIN_INTERVAL_MS)
        self._set_interval()
        interval_ms = self._metrics.interval_ms
        if not is_taken or abs(interval_ms - known_ms) > _NEWS * known_ms:
            self.intervals_ms[peer] = interval_ms
            self.out.send(peer, ReportEvery(interval_ms))

    def _set_interval(self) -> None:
        """Choose the interval. A worker sends about one report in each, even if its tasks are shorter."""
        wanted_ms = len(self.intervals_ms) / _REPORTS_PER_S * 1000
        self._metrics.interval_ms = min(max(MIN_INTERVAL_MS, wanted_ms), _LONGEST_INTERVAL_MS)

    def _admits(self, now_ms: float) -> bool:
        """Whether to take a report: at most _REPORTS_PER_S in a second, which may arrive at once."""
        if self._due_ms > now_ms:
            return False
        each_ms = 1000 / _REPORTS_PER_S
        self._due_ms = max(self._due_ms, now_ms - 1000.0 + each_ms) + each_ms
        return True

    @receives(WriteEnded)
    def on_write_ended(self, peer: int, message: WriteEnded, now_ms: float) -> None:
        self._metrics.on_write_ended(message, now_ms)

    @receives(DriverWaits)
    def on_driver_waits(self, peer: int, message: DriverWaits, now_ms: float) -> None:
        self._metrics.on_driver_waits(message, now_ms)

    def on_gone(self, peer: int, now_ms: float) -> None:
        self.intervals_ms.pop(peer, None)
        self._set_interval()
