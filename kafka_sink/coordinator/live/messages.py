"""What tasks and the driver report about a write, as JSON bodies. Decoding checks every field.

A task reports about once a second, under its own name, because several tasks may share a connection. Counts
are totals since the task began, so a lost report does no harm. ``topics`` has those that changed since the
last report; the last report of a task (``done``) has all.

The driver reports a write's ``final`` figures when it commits or aborts. They replace what tasks reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice, zip_longest
from typing import Any

from kafka_sink.activity import STATES
from kafka_sink.coordinator.transport import message_format as fields
from kafka_sink.coordinator.transport.message_format import (
    amount,
    count,
    counts_of,
    cut,
    decoding,
    list_of,
    text,
    whole,
)
from kafka_sink.counts import GAUGES, NAMES, BrokerFigures, Number, TopicFigures
from kafka_sink.printable import printable

KIND = "figures"
# A task names this many topics. Rows of its other topics count under no name.
MAX_TOPICS = 100
MAX_BROKERS = 200
MAX_MUTES = 20
# Tasks whose figures one report joins.
MAX_OTHERS = 1_000
# The driver's report names all topics of a write up to this number.
MAX_FINAL_TOPICS = 5_000
_MAX_BUCKETS = 32
# Of key and value; each names a few subjects.
_MAX_SCHEMAS = 2
# Partitions that a mute names, dead letters by topic and reason, options that a job names.
MAX_PARTITIONS, MAX_LETTERS, _MAX_OPTIONS = 5, 20, 60
# How a write ends.
OUTCOMES = ("committed", "aborted")
# Characters of the cause of an abort.
_MAX_CAUSE = 1000


@dataclass(frozen=True, slots=True)
class AboutJob:
    """What one task of a job, that of partition 0, says about the job. ``options``: those that differ from
    their defaults, never a secret. ``execution``: Spark's SQL execution, -1 where there is none.
    """

    name: str = ""
    execution: int = -1
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TaskIdentity:
    """The attempt that reports. ``task``: Spark's taskAttemptId, unique in an application.

    ``write`` names the Spark write, ``query`` and ``batch`` the micro-batch where there is one.
    """

    write: str
    task: int
    partition: int = 0
    attempt: int = 0
    host: str = ""
    query: str = ""
    batch: int = -1
    application: str = ""
    about: AboutJob | None = None


@dataclass(frozen=True, slots=True)
class MuteFigures:
    """A muted broker's id or partition's name, the reason, and for how long.

    ``rows`` of the task wait for it, in ``partitions``, of which the first are named. ``left_ms``: until the
    first of them reach delivery.timeout.ms; negative where none waits.
    """

    target: str
    reason: str
    age_ms: float
    rows: int = 0
    left_ms: float = -1.0
    partitions: int = 0
    named: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskFigures:
    """A task's report. ``state`` is one of counts.STATES, entered ``state_ms`` ago.

    ``others``: numbers of tasks of the same write that ran before in the same worker, are done as well, and
    have not reported; their figures are included.
    """

    identity: TaskIdentity
    elapsed_ms: float = 0.0
    state: str = STATES[0]
    state_ms: float = 0.0
    counters: Mapping[str, Number] = field(default_factory=dict)
    gauges: Mapping[str, Number] = field(default_factory=dict)
    topics: Mapping[str, TopicFigures] = field(default_factory=dict)
    brokers: Mapping[int, BrokerFigures] = field(default_factory=dict)
    mutes: tuple[MuteFigures, ...] = ()
    # Dead letters by topic and reason, as totals.
    letters: Mapping[tuple[str, str], int] = field(default_factory=dict)
    transaction_ms: float = -1.0
    done: bool = False
    failed: bool = False
    others: tuple[int, ...] = ()

    def may_be_joined_with(self, last: TaskFigures) -> bool:
        """Whether a report has room for both."""
        return self.identity.write == last.identity.write and len(self.others) < MAX_OTHERS


def joined(before: TaskFigures, last: TaskFigures) -> TaskFigures:
    """One report of a task that is done and of earlier ones, of which nothing has been reported."""
    counters, letters = Counter(before.counters), Counter(before.letters)
    counters.update(last.counters)
    letters.update(last.letters)
    topics, brokers = dict(before.topics), dict(before.brokers)
    for name, topic in last.topics.items():
        topics[name] = topics.get(name, TopicFigures()).plus(topic)
    for node, broker in last.brokers.items():
        earlier = brokers.get(node)
        brokers[node] = broker if earlier is None else _added(earlier, broker)
    identity = replace(last.identity, about=last.identity.about or before.identity.about)
    return replace(
        last,
        identity=identity,
        counters=counters,
        topics=dict(islice(topics.items(), MAX_TOPICS)),
        brokers=dict(islice(brokers.items(), MAX_BROKERS)),
        letters=dict(letters.most_common(MAX_LETTERS)),
        transaction_ms=max(before.transaction_ms, last.transaction_ms),
        others=(*before.others, before.identity.task),
    )


def _added(before: BrokerFigures, last: BrokerFigures) -> BrokerFigures:
    buckets = zip_longest(before.latency_buckets, last.latency_buckets, fillvalue=0)
    return last._replace(
        requests=before.requests + last.requests,
        failures=before.failures + last.failures,
        latency_ms=before.latency_ms + last.latency_ms,
        max_latency_ms=max(before.max_latency_ms, last.max_latency_ms),
        latency_buckets=tuple(a + b for a, b in buckets),
        throttle_ms=before.throttle_ms + last.throttle_ms,
    )


@dataclass(frozen=True, slots=True)
class FinalFigures:
    """A write's figures as its summary has them. ``outcome``: one of OUTCOMES.

    ``topics`` are all topics of the write, unless there are too many; then it is empty. ``transactions``
    counts what the driver did with the write's transactions, by outcome; ``transactions_ms`` is for how long
    they had been open, added up. ``last_task`` is the highest
    number of its tasks; -1 if unknown. Tasks with higher ones belong to another run of the micro-batch.
    ``schemas``: by which schemas of a registry keys and values were encoded. ``cause``: of an abort.
    """

    write: str
    outcome: str
    query: str = ""
    batch: int = -1
    tasks: int = 0
    counters: Mapping[str, Number] = field(default_factory=dict)
    topics: Mapping[str, TopicFigures] = field(default_factory=dict)
    transactions: Mapping[str, int] = field(default_factory=dict)
    transactions_ms: Mapping[str, int] = field(default_factory=dict)
    last_task: int = -1
    schemas: tuple[str, ...] = ()
    cause: str = ""


def encode_task(figures: TaskFigures) -> dict[str, Any]:
    """A task's report as a JSON body. The caller observes the bounds above."""
    identity, about = figures.identity, figures.identity.about
    body = {} if about is None else {"about": [about.name, about.execution, dict(about.options)]}
    return {
        **body,
        "task": [
            identity.write,
            identity.task,
            identity.partition,
            identity.attempt,
            cut(identity.host),
            identity.query,
            identity.batch,
            cut(identity.application),
        ],
        "elapsed": round(figures.elapsed_ms),
        "state": [figures.state, round(figures.state_ms)],
        "counters": _rounded(figures.counters),
        "gauges": _rounded(figures.gauges),
        "topics": _encode_topics(figures.topics),
        "brokers": [
            [
                node,
                cut(one.address),
                one.requests,
                one.failures,
                one.in_flight,
                round(one.latency_ms, 1),
                round(one.max_latency_ms, 1),
                list(one.latency_buckets),
                round(one.throttle_ms, 1),
                round(one.oldest_ms),
            ]
            for node, one in figures.brokers.items()
        ],
        "mutes": [
            [
                cut(one.target),
                cut(one.reason),
                round(one.age_ms),
                one.rows,
                round(one.left_ms),
                one.partitions,
                list(one.named),
            ]
            for one in figures.mutes
        ],
        "letters": [[topic, cut(why), number] for (topic, why), number in figures.letters.items()],
        "transaction": round(figures.transaction_ms),
        "end": 2 if figures.failed else int(figures.done),
        **({"others": list(figures.others)} if figures.others else {}),
    }


def decode_task(body: Mapping[str, Any]) -> TaskFigures:
    """A task's report from its JSON body. Raises ProtocolError."""
    with decoding("figures of a task"):
        write, task, partition, attempt, host, query, batch, application = body["task"]
        state, state_ms = body["state"]
        if state not in STATES:
            raise ValueError("unknown state")
        end = count(body["end"])
        return TaskFigures(
            TaskIdentity(
                text(write),
                count(task),
                count(partition),
                count(attempt),
                text(host),
                text(query),
                whole(batch),
                text(application),
                _decode_about(body.get("about")),
            ),
            float(count(body["elapsed"])),
            state,
            float(count(state_ms)),
            _numbers(body["counters"], NAMES),
            _numbers(body["gauges"], GAUGES),
            _decode_topics(body["topics"], MAX_TOPICS),
            dict(_decode_broker(one) for one in list_of(body["brokers"], MAX_BROKERS)),
            tuple(_decode_mute(one) for one in list_of(body["mutes"], MAX_MUTES)),
            {
                (fields.topic(topic), text(why)): count(number)
                for topic, why, number in list_of(body["letters"], MAX_LETTERS)
            },
            float(whole(body["transaction"])),
            end > 0,
            end == 2,
            tuple(counts_of(list_of(body.get("others", []), MAX_OTHERS))),
        )


def _decode_about(value: Any) -> AboutJob | None:
    if value is None:
        return None
    name, execution, options = value
    if not isinstance(options, dict) or len(options) > _MAX_OPTIONS:
        raise ValueError("not options by name, or too many")
    return AboutJob(text(name), whole(execution), {text(one): text(given) for one, given in options.items()})


def about_job(name: str, execution: int, options: Mapping[str, str]) -> AboutJob:
    """Within the bounds of a message."""
    shown = list(options.items())[:_MAX_OPTIONS]
    return AboutJob(cut(name), execution, {cut(one): cut(given) for one, given in shown})


def _decode_mute(value: Any) -> MuteFigures:
    target, reason, age_ms, rows, left_ms, partitions, named = value
    return MuteFigures(
        text(target),
        text(reason),
        float(count(age_ms)),
        count(rows),
        float(whole(left_ms)),
        count(partitions),
        tuple(text(one) for one in list_of(named, MAX_PARTITIONS)),
    )


def _decode_broker(value: Any) -> tuple[int, BrokerFigures]:
    node, address, requests, failures, in_flight, latency, max_latency, buckets, throttle, oldest = value
    requests, failures, in_flight = counts_of([requests, failures, in_flight])
    return whole(node), BrokerFigures(
        text(address),
        requests,
        failures,
        in_flight,
        float(amount(latency)),
        float(amount(max_latency)),
        tuple(counts_of(list_of(buckets, _MAX_BUCKETS))),
        float(amount(throttle)),
        float(amount(oldest)),
    )


def encode_final(figures: FinalFigures) -> dict[str, Any]:
    """The driver's report as a JSON body."""
    topics = figures.topics if len(figures.topics) <= MAX_FINAL_TOPICS else {}
    return {
        "final": [
            figures.write,
            figures.outcome,
            figures.query,
            figures.batch,
            figures.tasks,
            figures.last_task,
        ],
        "counters": _rounded(figures.counters),
        "topics": _encode_topics(topics),
        "transactions": dict(figures.transactions),
        "transactions_ms": dict(figures.transactions_ms),
        "schemas": [cut(one) for one in figures.schemas[:_MAX_SCHEMAS]],
        "cause": printable(figures.cause, _MAX_CAUSE),
    }


def decode_final(body: Mapping[str, Any]) -> FinalFigures:
    """The driver's report from its JSON body. Raises ProtocolError."""
    with decoding("final figures of a write"):
        write, outcome, query, batch, tasks, last_task = body["final"]
        if outcome not in OUTCOMES:
            raise ValueError("unknown outcome")
        return FinalFigures(
            text(write),
            outcome,
            text(query),
            whole(batch),
            count(tasks),
            _numbers(body["counters"], NAMES),
            _decode_topics(body["topics"], MAX_FINAL_TOPICS),
            _counts(body["transactions"]),
            _counts(body["transactions_ms"]),
            whole(last_task),
            tuple(text(one) for one in list_of(body["schemas"], _MAX_SCHEMAS)),
            text(body["cause"], _MAX_CAUSE),
        )


def _counts(value: Any) -> dict[str, int]:
    if not isinstance(value, dict):
        raise ValueError("not counts by name")
    return {text(name): count(one) for name, one in list(value.items())[:_MAX_BUCKETS]}


def _encode_topics(topics: Mapping[str, TopicFigures]) -> list[list[Any]]:
    return [[name, one.records, one.sent_bytes, one.raw_bytes, one.batches] for name, one in topics.items()]


def _decode_topics(value: Any, max_length: int) -> dict[str, TopicFigures]:
    found = {}
    for name, records, sent, raw, batches in list_of(value, max_length):
        found[fields.topic(name)] = TopicFigures(*counts_of([records, sent, raw, batches]))
    return found


def _rounded(values: Mapping[str, Number]) -> dict[str, Number]:
    # Zeros are left out: most counters of a healthy task are zero.
    return {name: round(value, 1) for name, value in values.items() if value}


def _numbers(value: Any, names: Iterable[str]) -> dict[str, Number]:
    """Unknown names are skipped: the other end may be of a newer version."""
    if not isinstance(value, dict):
        raise TypeError("not an object")
    return {name: amount(value[name]) for name in names if name in value}
