"""The live figures of one Spark application: sums what tasks and the driver report. No I/O.

Tasks report totals. The difference to the last report is added, so that a lost or repeated report does no
harm. Totals by cluster, topic and broker never shrink: they count what brokers acknowledged, also in attempts
that failed later. When the driver reports a write's final figures, its job shows exactly these, as the
summary does.

Everything is bounded: the numbers of jobs, attempts, topics and brokers that are kept.
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from kafka_sink.coordinator.figures.events import EventLog
from kafka_sink.coordinator.figures.messages import (
    OUTCOMES,
    AboutJob,
    FinalFigures,
    MuteFigures,
    TaskFigures,
    TaskIdentity,
)
from kafka_sink.coordinator.figures.running_tasks import RunningTask, RunningTasks
from kafka_sink.coordinator.metadata.handler import Lookups
from kafka_sink.counts import BrokerFigures, Number, RateWindow, TopicFigures

# Topics and brokers beyond these count under OTHER.
MAX_TOPICS = 200
MAX_BROKERS = 500
OTHER = "(other)"
# Of those that run, and of those that have ended.
_MAX_JOBS = 50
_MAX_TASKS_SHOWN = 100
_MAX_MUTES_SHOWN = 200
_MAX_LETTERS = 100
_MAX_ATTEMPTS = 50_000
_MAX_ENDED_WRITES = 10_000
_SAMPLE_MS = 1000.0
_HISTORY = 300
# Tasks report every second, or less often where there are many: 200 reports a second cost the coordinator's
# process less than a fifth of a core.
_REPORTS_PER_S = 200.0
_MIN_INTERVAL_MS, _MAX_INTERVAL_MS = 1000.0, 30_000.0
# A task is silent, and later no longer shown, after so long, or after so many intervals.
_SILENT_MS, _GONE_MS = 5_000.0, 30_000.0
_SILENT_INTERVALS, _GONE_INTERVALS = 2.5, 6.0
# A batch job without reports for this long has ended without the driver's word. A stream may pause for long.
_LOST_JOB_MS, _LOST_STREAM_MS = 600_000.0, 86_400_000.0


# Returns None once the cluster's handler is gone.
MuteSource = Callable[[], Callable[[float], Iterable[MuteFigures]] | None]


@dataclass(slots=True)
class _Topic:
    totals: TopicFigures = field(default_factory=TopicFigures)
    records: RateWindow = field(default_factory=RateWindow)
    sent_bytes: RateWindow = field(default_factory=RateWindow)


@dataclass(slots=True)
class _Broker:
    address: str = ""
    totals: Counter[str] = field(default_factory=Counter)
    buckets: list[int] = field(default_factory=list)
    max_latency_ms: float = 0.0
    responses: RateWindow = field(default_factory=RateWindow)
    latency_ms: RateWindow = field(default_factory=RateWindow)


@dataclass(slots=True)
class _Write:
    """A write that has not ended: the sums of its attempts, and which of them have ended."""

    job: str
    cluster: str = ""
    began_ms: float = math.inf
    counters: Counter[str] = field(default_factory=Counter)
    topics: dict[str, TopicFigures] = field(default_factory=dict)
    attempts: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    # Transactions of tasks that are done: open until the driver ends the write.
    open_transactions: int = 0
    open_since_ms: float = math.inf


@dataclass(frozen=True, slots=True)
class _LastBatch:
    """The micro-batch that ended last."""

    number: int
    outcome: str
    rows: int
    took_ms: float
    ended_ms: float


@dataclass(slots=True)
class _JobFigures:
    """A batch write, or all micro-batches of a query."""

    cluster: str
    query: str
    started_s: float
    reported_ms: float
    state: str = "running"
    ended_s: float | None = None
    batch: int = -1
    tasks_done: int = 0
    writes: int = 0
    topics: set[str] = field(default_factory=set)
    schemas: tuple[str, ...] = ()
    about: AboutJob | None = None
    # Why it was aborted, or else why a task of it failed.
    cause: str = ""
    # When brokers last acknowledged rows of it.
    acknowledged_ms: float = -math.inf
    last_batch: _LastBatch | None = None
    # What the driver does with a write that is over, and since when.
    ending: tuple[str, float] | None = None
    counters: Counter[str] = field(default_factory=Counter)
    records: RateWindow = field(default_factory=RateWindow)
    sent_bytes: RateWindow = field(default_factory=RateWindow)


class ApplicationFigures:
    """All methods belong to the coordinator's loop. Times are monotonic milliseconds."""

    def __init__(self, wall_s: Callable[[], float] = time.time) -> None:
        self._wall_s = wall_s
        self._started_s = wall_s()
        # Its name, which only tasks know.
        self._application = ""
        self._totals: dict[str, Counter[str]] = {}
        self._topics: dict[tuple[str, str], _Topic] = {}
        self._brokers: dict[tuple[str, int], _Broker] = {}
        self._jobs: OrderedDict[str, _JobFigures] = OrderedDict()
        self._writes: dict[str, _Write] = {}
        # With the highest number of a task that belonged to it.
        self._ended_writes: OrderedDict[str, float] = OrderedDict()
        # Of one that has ended only its number is kept, with its write.
        self._attempts = RunningTasks(_MAX_ATTEMPTS)
        self._lookups: dict[str, Lookups] = {}
        self._mute_sources: dict[str, list[MuteSource]] = {}
        self._transactions: dict[str, Counter[str]] = {}
        # For how long they had been open, added up.
        self._transactions_ms: dict[str, Counter[str]] = {}
        self._sampled_ms = -_SAMPLE_MS
        # What the reports of the last seconds ask for: short tasks come and go between two looks.
        self._pace_ms, self._came_before = _MIN_INTERVAL_MS, 0
        # How many more may be taken at once, as of then.
        self._admitted, self._admitted_ms, self._skipped = _REPORTS_PER_S, -math.inf, 0
        self._records, self._sent_bytes = RateWindow(), RateWindow()
        self._events = EventLog()
        # Dead letters by topic and reason, in each cluster.
        self._letters: dict[str, Counter[tuple[str, str]]] = {}
        # Time, rows and bytes per second, latency.
        self._history: deque[tuple[float, float, float, float | None]] = deque(maxlen=_HISTORY)
        self.reports = 0
        # How often the driver has reported the end of a write. Read from any thread.
        self.writes_ended = 0
        # The port of Spark's own UI on this host, where it is known.
        self.spark_ui: int | None = None
        # What the coordinator says of itself.
        self.coordinator: Callable[[], Mapping[str, Any]] = dict
        # Called when a write has ended, before the driver goes on.
        self.on_end: Callable[[], None] = lambda: None

    def lookups(self, cluster: str) -> Lookups:
        """Where the coordinator counts a cluster's metadata lookups."""
        return self._lookups.setdefault(cluster, Lookups())

    def add_mutes(self, cluster: str, source: MuteSource) -> None:
        """``source`` refers to a function that lists what is muted for all tasks of a cluster."""
        kept = [one for one in self._mute_sources.get(cluster, ()) if one() is not None]
        self._mute_sources[cluster] = [*kept, source]

    @property
    def interval_ms(self) -> float:
        """How often a task is to report."""
        wanted = max(self._pace_ms, len(self._attempts) / _REPORTS_PER_S * 1000)
        return min(max(_MIN_INTERVAL_MS, wanted), _MAX_INTERVAL_MS)

    def takes_report(self, now_ms: float) -> bool:
        """Whether there is room for another report of a task that runs. If not, it comes again an interval
        later, which grows with those that come."""
        refill = _REPORTS_PER_S * (now_ms - self._admitted_ms) / 1000
        self._admitted, self._admitted_ms = min(_REPORTS_PER_S, self._admitted + refill), now_ms
        if self._admitted >= 1:
            self._admitted -= 1
            return True
        self._skipped += 1
        self._pace_ms = max(self._pace_ms, (self._came - self._came_before) / _REPORTS_PER_S * 1000)
        return False

    @property
    def _came(self) -> int:
        return self.reports + self._skipped

    @property
    def _silent_ms(self) -> float:
        return max(_SILENT_MS, _SILENT_INTERVALS * self.interval_ms)

    @property
    def _gone_ms(self) -> float:
        return max(_GONE_MS, _GONE_INTERVALS * self.interval_ms)

    # -- reports ------------------------------------------------------------------------------------

    def report(self, cluster: str, figures: TaskFigures, now_ms: float) -> None:
        """A task's report. It is ignored if the write has ended (the final figures count) or the task has."""
        identity = figures.identity
        self.reports += 1
        self._application = identity.application or self._application
        if identity.task <= self._ended_writes.get(identity.write, -1):
            return
        # A micro-batch that runs again has the name of the failed run.
        self._ended_writes.pop(identity.write, None)
        job = self._job_of(cluster, identity, now_ms)
        write = self._writes.setdefault(identity.write, _Write(identity.query or identity.write, cluster))
        if identity.task in write.done or identity.task in write.failed:
            return
        if identity.task not in write.attempts:
            write.attempts.add(identity.task)
            job.ending = None
        write.began_ms = min(write.began_ms, now_ms - figures.elapsed_ms)
        job.about = identity.about or job.about
        attempt = self._attempts.report(cluster, figures, now_ms)
        self._add_counters(cluster, job, write, attempt)
        self._add_topics(cluster, job, write, attempt)
        self._add_brokers(cluster, attempt)
        self._add_letters(cluster, attempt)
        if figures.done:
            self._attempts.remove(identity.write, identity.task)
            self._end_attempt(job, write, figures, now_ms)

    def _end_attempt(self, job: _JobFigures, write: _Write, last: TaskFigures, now_ms: float) -> None:
        if last.failed:
            write.failed.add(last.identity.task)
            return
        done = {last.identity.task, *last.others} - write.done
        write.done |= done
        write.attempts |= done
        job.tasks_done += len(done)
        if last.transaction_ms >= 0:
            write.open_transactions += len(done)
            write.open_since_ms = min(write.open_since_ms, now_ms - last.transaction_ms)

    def _job_of(self, cluster: str, identity: TaskIdentity, now_ms: float) -> _JobFigures:
        key = identity.query or identity.write
        job = self._jobs.get(key)
        if job is None:
            job = self._jobs[key] = _JobFigures(cluster, identity.query, self._wall_s(), now_ms)
            self._forget_jobs(now_ms)
        if job.state != "running":
            job.state, job.ended_s = "running", None
        job.reported_ms = now_ms
        job.batch = max(job.batch, identity.batch)
        return job

    def _forget_jobs(self, now_ms: float) -> None:
        for key, job in list(self._jobs.items()):
            lost_ms = _LOST_STREAM_MS if job.query else _LOST_JOB_MS
            if job.state == "running" and now_ms - job.reported_ms > lost_ms:
                job.state, job.ended_s = "lost", self._wall_s()
                for name in [name for name, one in self._writes.items() if one.job == key]:
                    self._forget_write(name)
        # Queries that have ended count as running, because the driver does not report their end.
        by_age = sorted(self._jobs, key=lambda key: self._jobs[key].reported_ms)
        running = [key for key in by_age if self._jobs[key].state == "running"]
        ended = [key for key in by_age if self._jobs[key].state != "running"]
        for key in (*running[:-_MAX_JOBS], *ended[:-_MAX_JOBS]):
            del self._jobs[key]

    def _add_counters(self, cluster: str, job: _JobFigures, write: _Write, attempt: RunningTask) -> None:
        totals = self._totals.setdefault(cluster, Counter())
        for name, value in attempt.figures.counters.items():
            added = value - attempt.counters.get(name, 0)
            if added > 0:
                attempt.counters[name] = value
                for sums in (totals, job.counters, write.counters):
                    sums[name] += added  # type: ignore[assignment]  # some are milliseconds
                if name in _ACKNOWLEDGED:
                    job.acknowledged_ms = attempt.reported_ms

    def _add_letters(self, cluster: str, attempt: RunningTask) -> None:
        letters = attempt.figures.letters
        if letters == attempt.letters:
            return
        totals = self._letters.setdefault(cluster, Counter())
        for key, number in letters.items():
            is_kept = key in totals or len(totals) < _MAX_LETTERS
            totals[key if is_kept else (OTHER, key[1])] += max(0, number - attempt.letters.get(key, 0))
        attempt.letters = letters

    def note_failure(self, write: str, cause: str) -> None:
        """A task of a write that goes on has failed."""
        found = self._writes.get(write)
        job = None if found is None else self._jobs.get(found.job)
        if job is not None:
            job.cause = cause
        self._events.note(self._wall_s(), "warn", f"a task failed: {cause}")

    def note_over(self, write: str, now_ms: float, *, aborts: bool) -> None:
        """The driver has begun to commit or abort a write."""
        job = self._jobs.get(self._writes[write].job) if write in self._writes else None
        if job is not None:
            job.ending = ("aborting" if aborts else "committing", now_ms)

    def _add_topics(self, cluster: str, job: _JobFigures, write: _Write, attempt: RunningTask) -> None:
        for name, topic in attempt.figures.topics.items():
            before = attempt.topics.get(name, _NO_ROWS)
            if topic.records <= before.records:
                continue
            attempt.topics[name] = topic
            shown = self._topic(cluster, name)
            added = _missing(topic, before)
            shown.totals = shown.totals.plus(added)
            write.topics[name] = write.topics.get(name, _NO_ROWS).plus(added)
            if len(job.topics) < MAX_TOPICS:
                job.topics.add(name or OTHER)

    def _topic(self, cluster: str, name: str) -> _Topic:
        key = (cluster, name or OTHER)
        found = self._topics.get(key)
        if found is None:
            if len(self._topics) >= MAX_TOPICS:
                key = (cluster, OTHER)
            found = self._topics.setdefault(key, _Topic())
        return found

    def _add_brokers(self, cluster: str, attempt: RunningTask) -> None:
        for node, now in attempt.figures.brokers.items():
            broker = self._brokers.get((cluster, node))
            if broker is None:
                if len(self._brokers) >= MAX_BROKERS:
                    continue
                broker = self._brokers[cluster, node] = _Broker()
            before = attempt.brokers.get(node)
            attempt.brokers[node] = now
            broker.address = now.address or broker.address
            broker.max_latency_ms = max(broker.max_latency_ms, now.max_latency_ms)
            totals, old = broker.totals, before or _NO_REQUESTS
            totals["requests"] += max(0, now.requests - old.requests)
            totals["failures"] += max(0, now.failures - old.failures)
            totals["latency_ms"] += max(0.0, now.latency_ms - old.latency_ms)  # type: ignore[assignment]
            totals["throttle_ms"] += max(0.0, now.throttle_ms - old.throttle_ms)  # type: ignore[assignment]
            if now.latency_buckets != old.latency_buckets:
                added = zip_longest(broker.buckets, now.latency_buckets, old.latency_buckets, fillvalue=0)
                broker.buckets = [held + max(0, count - known) for held, count, known in added]

    def end_write(self, cluster: str, final: FinalFigures, now_ms: float) -> None:
        """The driver has committed or aborted a write. A repeated report changes nothing."""
        if final.last_task <= self._ended_writes.get(final.write, -math.inf):
            return
        write = self._writes.get(final.write) or _Write(final.query or final.write)
        # Where no task has finished, the driver does not know the query.
        query = write.job if write.job != final.write else ""
        job = self._job_of(cluster, TaskIdentity(final.write, 0, query=query, batch=final.batch), now_ms)
        totals = self._totals.setdefault(cluster, Counter())
        for name, value in final.counters.items():
            missing = value - write.counters[name]
            job.counters[name] += missing  # type: ignore[assignment]
            totals[name] += max(0, missing)  # type: ignore[assignment]
        totals["uncommitted"] += max(0, _rows(write.counters) - _rows(final.counters))
        for name, topic in final.topics.items():
            shown = self._topic(cluster, name)
            shown.totals = shown.totals.plus(_missing(topic, write.topics.get(name, _NO_ROWS)))
            if len(job.topics) < MAX_TOPICS:
                job.topics.add(name)
        totals[f"writes_{final.outcome}"] += 1
        self._transactions.setdefault(cluster, Counter()).update(final.transactions)
        self._transactions_ms.setdefault(cluster, Counter()).update(final.transactions_ms)
        job.writes += 1
        job.ending = None
        job.cause = final.cause or (job.cause if final.outcome == "aborted" else "")
        if job.query:
            took_ms = max(0.0, now_ms - write.began_ms)
            job.last_batch = _LastBatch(final.batch, final.outcome, _rows(final.counters), took_ms, now_ms)
        # The last reports of some tasks may come later, or never.
        job.schemas = final.schemas or job.schemas
        job.tasks_done += final.tasks - len(write.done)
        if not job.query:
            job.state, job.ended_s = final.outcome, self._wall_s()
            self._forget_jobs(now_ms)
        last = max([final.last_task, *write.attempts])
        # Of an aborted micro-batch nothing may be known, and its next run has the same name.
        is_final = last < 0 and (final.outcome == "committed" or final.batch < 0)
        self._forget_write(final.write, math.inf if is_final else last)
        self.writes_ended += 1
        self.on_end()

    def _forget_write(self, name: str, last_task: float = math.inf) -> None:
        self._ended_writes[name] = last_task
        while len(self._ended_writes) > _MAX_ENDED_WRITES:
            self._ended_writes.popitem(last=False)
        write = self._writes.pop(name, None)
        for task in write.attempts if write else ():
            self._attempts.remove(name, task)

    # -- rates --------------------------------------------------------------------------------------

    def sample(self, now_ms: float) -> None:
        """Once a second: take the totals from which rates are computed."""
        if now_ms - self._sampled_ms < _SAMPLE_MS * 0.9:
            return
        passed_s = (now_ms - self._sampled_ms) / 1000
        self._sampled_ms = now_ms
        if not self._totals:
            return
        rate, self._came_before = (self._came - self._came_before) / passed_s, self._came
        # Only half of the way at once: tasks learn of it an interval later.
        self._pace_ms = max(_MIN_INTERVAL_MS, self.interval_ms * (1 + rate / _REPORTS_PER_S) / 2)
        self._forget_jobs(now_ms)
        for topic in self._topics.values():
            topic.records.add(now_ms, topic.totals.records)
            topic.sent_bytes.add(now_ms, topic.totals.sent_bytes)
        for job in self._jobs.values():
            job.records.add(now_ms, _rows(job.counters))
            job.sent_bytes.add(now_ms, job.counters["sent_bytes"])
        for broker in self._brokers.values():
            broker.responses.add(now_ms, sum(broker.buckets))
            broker.latency_ms.add(now_ms, broker.totals["latency_ms"])
        self._records.add(now_ms, sum(_rows(one) for one in self._totals.values()))
        self._sent_bytes.add(now_ms, sum(one["sent_bytes"] for one in self._totals.values()))
        self._observe_events(now_ms)
        rates = (self._records.per_second, self._sent_bytes.per_second)
        responses = sum(one.responses.increase for one in self._brokers.values())
        waited_ms = sum(one.latency_ms.increase for one in self._brokers.values())
        latency_ms = round(waited_ms / responses, 1) if responses else None
        self._history.append((round(self._wall_s(), 1), round(rates[0], 1), round(rates[1], 1), latency_ms))

    @property
    def last_sample(self) -> tuple[float, float, float, float | None] | None:
        """Time, rows and bytes per second, latency; None before the first report."""
        return self._history[-1] if self._history else None

    def events_since(self, seen: int) -> list[dict[str, Any]]:
        """Events but the first ``seen``, as far as they are kept, the oldest first."""
        return self._events.since(seen)

    def _observe_events(self, now_ms: float) -> None:
        jobs = {key: (_label(key, job), job.state, job.cause) for key, job in self._jobs.items()}
        letters = int(sum(one["skipped"] for one in self._totals.values()))
        self._events.observe(self._wall_s(), self._mutes(now_ms), jobs, letters)

    def progress(self) -> tuple[int, float] | None:
        """Rows and rows per second of the batch jobs that run. None where none runs."""
        running = [job for job in self._jobs.values() if job.state == "running" and not job.query]
        if not running:
            return None
        rows = sum(_rows(job.counters) for job in running)
        return rows, sum(job.records.per_second for job in running)

    # -- snapshot -----------------------------------------------------------------------------------

    def snapshot(self, now_ms: float) -> dict[str, Any]:
        """Everything that the page and the metrics show, as plain values. Times are seconds."""
        self._attempts.expire(now_ms - self._gone_ms)
        silent_before_ms = now_ms - self._silent_ms
        mutes = self._mutes(now_ms)
        opened = self._open_by_job()
        return {
            "application": self._application,
            "time": self._wall_s(),
            "started": self._started_s,
            "spark_ui": self.spark_ui,
            "rates": {"records": self._records.per_second, "sent_bytes": self._sent_bytes.per_second},
            "history": list(self._history),
            "events": self._events.shown(),
            "clusters": [self._cluster(name, silent_before_ms, now_ms) for name in self._names()],
            "jobs": [self._shown_job(key, job, opened, now_ms) for key, job in reversed(self._jobs.items())],
            "topics": [
                {
                    "cluster": cluster,
                    "topic": name,
                    **topic.totals._asdict(),
                    "records_rate": topic.records.per_second,
                    "sent_bytes_rate": topic.sent_bytes.per_second,
                }
                for (cluster, name), topic in sorted(self._topics.items())
            ],
            "brokers": self._shown_brokers(mutes, now_ms),
            "mutes": [
                {**mute, **self._attempts.waiting.shown(mute["cluster"], mute["target"], now_ms)}
                for mute in mutes[:_MAX_MUTES_SHOWN]
            ],
            "tasks": self._shown_tasks(silent_before_ms, now_ms),
            "tasks_running": self._attempts.shown,
            "reports": self.reports,
            "coordinator": self.coordinator(),
        }

    def _names(self) -> list[str]:
        return sorted({*self._totals, *self._lookups})

    def _cluster(self, name: str, silent_before_ms: float, now_ms: float) -> dict[str, Any]:
        lookups = self._lookups.get(name, Lookups())
        totals = self._totals.get(name, Counter())
        # Of tasks that run, then of those that are done.
        opened, open_since_ms = self._attempts.transactions(name)
        for write in self._writes.values():
            if write.cluster == name and write.open_transactions:
                opened += write.open_transactions
                open_since_ms = min(open_since_ms, write.open_since_ms)
        return {
            "cluster": name,
            "counters": dict(totals),
            "letters": [[*key, number] for key, number in self._letters.get(name, Counter()).most_common()],
            "gauges": self._attempts.gauges(name),
            "states": self._attempts.states(name, silent_before_ms),
            "lookups": {
                "coordinator": lookups.made,
                "tasks": totals["metadata_requests"],
                "avoided": lookups.avoided + totals["metadata_avoided"],
            },
            "transactions": {
                "open": opened,
                "oldest": max(0.0, now_ms - open_since_ms) / 1000,
                **{one: self._transactions.get(name, Counter())[one] for one in TRANSACTION_OUTCOMES},
            },
            "transaction_seconds": {
                one: self._transactions_ms.get(name, Counter())[one] / 1000 for one in TRANSACTION_OUTCOMES
            },
        }

    def _open_by_job(self) -> dict[str, tuple[int, float]]:
        """Of writes whose tasks are done, but for those that run: open transactions, and since when."""
        opened: dict[str, tuple[int, float]] = {}
        for write in self._writes.values():
            if write.open_transactions:
                number, since_ms = opened.get(write.job, (0, math.inf))
                opened[write.job] = number + write.open_transactions, min(since_ms, write.open_since_ms)
        return opened

    def _shown_job(
        self, key: str, job: _JobFigures, opened: Mapping[str, tuple[int, float]], now_ms: float
    ) -> dict[str, Any]:
        tasks = self._attempts.of_job[key]
        number, since_ms = opened.get(key, (0, now_ms))
        state, ending_ms = job.state, 0.0
        if job.ending is not None:
            state, ending_ms = job.ending[0], now_ms - job.ending[1]
        elif job.query and job.state == "running" and not tasks:
            state = "waiting for rows"
        return {
            "job": key,
            "kind": "stream" if job.query else "batch",
            "cluster": job.cluster,
            "query": job.query,
            "batch": job.batch,
            "state": state,
            "name": job.about.name if job.about else "",
            "options": dict(job.about.options) if job.about else None,
            "execution": job.about.execution if job.about else -1,
            "cause": job.cause,
            "ending": ending_ms / 1000,
            "open": number,
            "open_seconds": (now_ms - since_ms) / 1000,
            "acknowledged": _age_s(job.acknowledged_ms, now_ms),
            "last_batch": _shown_batch(job.last_batch, now_ms),
            "started": job.started_s,
            "seconds": (job.ended_s or self._wall_s()) - job.started_s,
            "writes": job.writes,
            "tasks": tasks,
            "tasks_done": job.tasks_done,
            "topics": sorted(job.topics)[:5],
            "topic_count": len(job.topics),
            "schemas": list(job.schemas),
            "counters": dict(job.counters),
            "records_rate": job.records.per_second if job.state == "running" else 0.0,
            "sent_bytes_rate": job.sent_bytes.per_second if job.state == "running" else 0.0,
        }

    def _shown_brokers(self, mutes: list[dict[str, Any]], now_ms: float) -> list[dict[str, Any]]:
        requests = {key: self._attempts.requests(*key) for key in self._brokers}
        muted = {(mute["cluster"], mute["target"]): mute for mute in mutes}
        return [
            {
                "cluster": key[0],
                "broker": key[1],
                "address": broker.address,
                "requests": broker.totals["requests"],
                "failures": broker.totals["failures"],
                "in_flight": requests[key][0],
                "oldest": max(0.0, now_ms - requests[key][1]) / 1000,
                "latency_sum": broker.totals["latency_ms"] / 1000,
                "latency_buckets": list(broker.buckets),
                "latency": _recent_latency_s(broker),
                "latency_max": broker.max_latency_ms / 1000,
                "throttled": broker.totals["throttle_ms"] / 1000,
                "muted": muted.get((key[0], str(key[1])), {}).get("seconds"),
            }
            for key, broker in sorted(self._brokers.items())
        ]

    def _mutes(self, now_ms: float) -> list[dict[str, Any]]:
        """What the coordinator mutes for all, then what tasks mute for themselves. The longest first."""
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for cluster, sources in self._mute_sources.items():
            for muted in filter(None, (source() for source in sources)):
                for mute in muted(now_ms):
                    found[cluster, mute.target] = _mute(cluster, mute, mute.age_ms, shared=True)
        for cluster, target, by_task in self._attempts.muted():
            if (cluster, target) not in found:
                since_ms, reason = min(by_task.values())
                mute = MuteFigures(target, reason, 0.0)
                found[cluster, target] = _mute(cluster, mute, max(0.0, now_ms - since_ms), shared=False)
        return sorted(found.values(), key=lambda mute: -mute["seconds"])

    def _shown_tasks(self, silent_before_ms: float, now_ms: float) -> list[dict[str, Any]]:
        tasks: list[dict[str, Any]] = []
        for one, state in self._attempts.to_look_at(_MAX_TASKS_SHOWN, silent_before_ms):
            figures = one.figures
            tasks.append(
                {
                    "cluster": one.cluster,
                    "job": one.job,
                    "task": figures.identity.task,
                    "partition": figures.identity.partition,
                    "attempt": figures.identity.attempt,
                    "host": figures.identity.host,
                    "state": state,
                    "seconds": (now_ms - one.state_since_ms) / 1000,
                    "elapsed": (figures.elapsed_ms + now_ms - one.reported_ms) / 1000,
                    "records": one.counters.get("records", 0) + one.counters.get("unconfirmed", 0),
                    "buffer_used_bytes": figures.gauges.get("buffer_used_bytes", 0),
                    "buffer_total_bytes": figures.gauges.get("buffer_total_bytes", 0),
                }
            )
        return tasks


# Counters of rows that brokers have.
_ACKNOWLEDGED = ("records", "unconfirmed")
# What the driver reports about transactions.
TRANSACTION_OUTCOMES = (*OUTCOMES, "recovered")


def _mute(cluster: str, mute: MuteFigures, age_ms: float, *, shared: bool) -> dict[str, Any]:
    return {
        "cluster": cluster,
        "target": mute.target,
        "kind": "broker" if mute.target.lstrip("-").isdigit() else "partition",
        "reason": mute.reason,
        "seconds": age_ms / 1000,
        "shared": shared,
    }


def _rows(counters: Mapping[str, Number]) -> int:
    return int(sum(counters.get(name, 0) for name in _ACKNOWLEDGED))


def _label(key: str, job: _JobFigures) -> str:
    name = (job.about.name if job.about else "") or (job.query or key)[:8]
    return f"{'query' if job.query else 'write'} {name}"


def _age_s(since_ms: float, now_ms: float) -> float | None:
    return (now_ms - since_ms) / 1000 if since_ms > -math.inf else None


def _shown_batch(batch: _LastBatch | None, now_ms: float) -> dict[str, Any] | None:
    if batch is None:
        return None
    return {
        "batch": batch.number,
        "outcome": batch.outcome,
        "rows": batch.rows,
        "seconds": batch.took_ms / 1000,
        "age": _age_s(batch.ended_ms, now_ms),
    }


def _recent_latency_s(broker: _Broker) -> float | None:
    responses = broker.responses.increase
    return broker.latency_ms.increase / responses / 1000 if responses else None


_NO_ROWS = TopicFigures()
_NO_REQUESTS = BrokerFigures()


def _missing(now: TopicFigures, before: TopicFigures) -> TopicFigures:
    return TopicFigures(
        *[value - known if value > known else 0 for value, known in zip(now, before, strict=True)]
    )
