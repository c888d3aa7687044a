"""The breaker's messages as JSON bodies. Decoding checks every field.

A target is a broker's id or ``[topic, partition]``. In lists without other facts, partitions of one topic
stand together: ``[topic, partition, partition, ...]``. Times are ages or delays in milliseconds, as clocks
differ.

A report comes from a group: the tasks behind a relay, or one task by itself. Where a relay names ``task``,
its number at the relay follows at the end of the list. It may have these keys:

- ``tasks``: of a relay, how many of its tasks are at work
- ``responses``: ``[broker, age]`` of each broker's last response without an error, and ``task``
- ``rows``: rows sent since the last report
- ``outcomes``: ``[topic, [partition, batches written, batches failed, whether a broker answered so, last
  error], ...]`` of the last seconds, for partitions that fail and for those the coordinator asked about. From
  a relay also how many of its tasks write there, for how many it fails, and how many of the failures count
- ``muted``: ``[target, reason, silence]``, and ``task`` and whether the mute is older than its connection
- ``unmuted``: ``[target, reason]``, and ``task`` unless it had a lease
- ``failed``: ``[target, error]`` of each failed probe
- ``holds``: muted targets that batches wait for; only after a change
- ``wants``: muted partitions that rows could go to; only after a change
- ``resting``: the tasks have ended; their producers wait for the next ones
- ``cluster``: the id of the Kafka cluster that the tasks write to; only after a change

An update from the coordinator may have these:

- ``whole``: whether ``added`` is everything that is muted
- ``added``: ``[target, reason]``
- ``removed``: targets. Rows of the group's first task may go there after ``delay``, those of all its tasks
  after ``max_delay``
- ``leases``: ``[target, duration, whether it is a trial]``, each for one task of the group
- ``asks``: targets. One task reports whether a broker responds, all of them report a partition's outcomes
- ``terms``, with ``whole``: the share of a task's batches in percent that must fail, 0 where outcomes do not
  count, and the milliseconds between two reports
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import groupby, takewhile
from typing import Any, NamedTuple

from kafka_sink.breaker.outcomes import MIN_FAILURES
from kafka_sink.breaker.states import ProbeLease, Target
from kafka_sink.coordinator.transport import message_format as fields
from kafka_sink.coordinator.transport.message_format import count, counts_of, cut, decoding, list_in, ms, text
from kafka_sink.model import TopicPartition

KIND = "breaker"
# The coordinator shares no more mutes than this; tasks keep others to themselves.
MAX_MUTES = 10_000
# Entries of each list of a report, and their bytes of JSON: so a report stays below the bound of a request.
MAX_OUTCOMES = 700
MAX_TARGETS = 700
_LIST_BYTES = 256 * 1024
_NUMBERS_BYTES = 120
MAX_NODES = 10_000
# Of one relay.
MAX_TASKS = 1024
_MAX_CLUSTER_ID = 200
# The coordinator weighs the outcomes of the last seconds. Older ones are left out of a late report.
_MAX_OUTCOME_AGE_MS = 5_000.0


class TaskVotes(NamedTuple):
    """How many tasks write to a partition, for how many it fails, and how many of their failures count."""

    tasks: int
    failing: int
    failures: int


@dataclass(frozen=True, slots=True)
class OutcomeCounts:
    """Outcomes of a partition's batches in the last seconds. ``answered``: a broker responded with the
    error. ``votes``: of the tasks behind a relay, whose counts are added up here."""

    partition: TopicPartition
    written: int
    failed: int
    answered: bool = False
    error: str = ""
    votes: TaskVotes | None = None


@dataclass(frozen=True, slots=True)
class MuteReport:
    """A mute that a task decided. ``silence_ms`` is 0 if a silence was not the reason. ``is_old``: the relay
    met the task later."""

    target: Target
    reason: str
    silence_ms: float = 0.0
    task: int = 0
    is_old: bool = False


class UnmuteReport(NamedTuple):
    """The end of a mute, as a task found it."""

    target: Target
    reason: str
    task: int = 0


class Terms(NamedTuple):
    """By which a relay counts its tasks' votes, and takes a task for silent."""

    failure_perc: int
    report_interval_ms: float


@dataclass(frozen=True, slots=True)
class BreakerReport:
    """A group's report; the module's docstring describes the fields. ``responders``: by broker, the task
    behind the relay that had the response. ``tasks`` is None for a task by itself."""

    responses: Mapping[int, float] = field(default_factory=dict)
    rows: int = 0
    outcomes: tuple[OutcomeCounts, ...] = ()
    muted: tuple[MuteReport, ...] = ()
    unmuted: tuple[UnmuteReport, ...] = ()
    failed: tuple[tuple[Target, str], ...] = ()
    holds: tuple[Target, ...] | None = None
    wants: tuple[Target, ...] | None = None
    is_resting: bool = False
    cluster_id: str | None = None
    responders: Mapping[int, int] = field(default_factory=dict)
    tasks: int | None = None

    @property
    def changes_probes(self) -> bool:
        """Whether it may change which task probes what, or when."""
        changed = self.muted or self.unmuted or self.failed
        return bool(changed) or self.holds is not None or self.wants is not None


def aged(report: BreakerReport, waited_ms: float) -> BreakerReport:
    """A report that is sent ``waited_ms`` after it was made: a task's last one goes out when the next
    begins."""
    return replace(
        report,
        responses={node: ago_ms + waited_ms for node, ago_ms in report.responses.items()},
        outcomes=report.outcomes if waited_ms < _MAX_OUTCOME_AGE_MS else (),
        muted=tuple(
            replace(one, silence_ms=one.silence_ms + waited_ms) if one.silence_ms else one
            for one in report.muted
        ),
    )


@dataclass(frozen=True, slots=True)
class BreakerUpdate:
    """The coordinator's message to a group, or a relay's to a task; the module's docstring describes the
    fields."""

    whole: bool = False
    added: Mapping[Target, str] = field(default_factory=dict)
    removed: tuple[Target, ...] = ()
    delay_ms: float = 0.0
    leases: Mapping[Target, ProbeLease] = field(default_factory=dict)
    asks: tuple[Target, ...] = ()
    terms: Terms | None = None
    max_delay_ms: float = math.inf


class Room:
    """What a list of a report still has room for."""

    def __init__(self) -> None:
        self._entries, self._bytes = MAX_TARGETS, _LIST_BYTES

    def takes(self, target: Target, text: str = "") -> bool:
        """Whether one more entry fits."""
        self._entries -= 1
        self._bytes -= size_of(target, text)
        return self._entries >= 0 and self._bytes >= 0


def size_of(target: Target, text: str) -> int:
    """The most bytes of JSON that a target takes in a list, with a text and numbers."""
    topic = "" if isinstance(target, int) else target.topic
    return len(json.dumps(topic)) + len(json.dumps(cut(text))) + _NUMBERS_BYTES


def how_many_fit(entries: Iterable[tuple[Target, str]]) -> int:
    """How many of the first entries a list of a report has room for."""
    room = Room()
    return sum(1 for _ in takewhile(lambda entry: room.takes(*entry), entries))


def that_fit(targets: Sequence[Target]) -> Sequence[Target]:
    """The first targets for which a list of a report has room."""
    return targets[: how_many_fit((one, "") for one in targets)]


def encode_report(report: BreakerReport) -> dict[str, Any]:
    """A report as a JSON body. The caller has seen that its lists have room for their entries."""
    body: dict[str, Any] = {
        "responses": [
            [node, ago_ms, report.responders[node]] if node in report.responders else [node, ago_ms]
            for node, ago_ms in report.responses.items()
        ],
        "rows": report.rows,
        "outcomes": _encode_outcomes(report.outcomes),
        "muted": [
            [
                _encode(one.target),
                cut(one.reason),
                one.silence_ms,
                *([one.task, one.is_old] if one.task else []),
            ]
            for one in report.muted
        ],
        "unmuted": [
            [_encode(one.target), cut(one.reason), *([one.task] if one.task else [])]
            for one in report.unmuted
        ],
        "failed": [[_encode(target), cut(error)] for target, error in report.failed],
    }
    present = {name: value for name, value in body.items() if value}
    if report.is_resting:
        present["resting"] = True
    for name, targets in (("holds", report.holds), ("wants", report.wants)):
        if targets is not None:
            present[name] = _encode_all(targets)
    if report.cluster_id is not None:
        present["cluster"] = report.cluster_id
    if report.tasks is not None:
        present["tasks"] = report.tasks
    return present


def cluster_id_in(body: Mapping[str, Any]) -> str | None:
    """The cluster that a report names, None where it names none. Raises ProtocolError."""
    if body.get("cluster") is None:
        return None
    with decoding("breaker report"):
        return fields.name(body["cluster"], _MAX_CLUSTER_ID)


def decode_report(body: Mapping[str, Any]) -> BreakerReport:
    """A report from its JSON body. Raises ProtocolError."""
    with decoding("breaker report"):
        responses = list_in(body, "responses", MAX_NODES)
        return BreakerReport(
            {count(node): ms(ago_ms) for node, ago_ms, *_ in responses},
            count(body.get("rows", 0)),
            _outcomes(list_in(body, "outcomes", MAX_OUTCOMES)),
            tuple(_mute(*one) for one in list_in(body, "muted", MAX_TARGETS)),
            tuple(_unmute(*one) for one in list_in(body, "unmuted", MAX_TARGETS)),
            tuple((_target(target), text(why)) for target, why in list_in(body, "failed", MAX_TARGETS)),
            _targets(body, "holds"),
            _targets(body, "wants"),
            bool(body.get("resting")),
            cluster_id_in(body),
            {node: count(task) for node, _, task in (one for one in responses if len(one) > 2)},
            None if body.get("tasks") is None else _tasks(body["tasks"]),
        )


def encode_update(update: BreakerUpdate) -> dict[str, Any]:
    """An update as a JSON body."""
    body: dict[str, Any] = {
        "whole": update.whole,
        "added": [[_encode(target), cut(reason)] for target, reason in update.added.items()],
        "removed": _encode_all(update.removed),
        "delay": update.delay_ms,
        "max_delay": 0.0 if math.isinf(update.max_delay_ms) else update.max_delay_ms,
        "leases": [[_encode(target), one.left_ms, one.trial] for target, one in update.leases.items()],
        "asks": _encode_all(update.asks),
        "terms": update.terms,
    }
    return {name: value for name, value in body.items() if value or name == "whole"}


def decode_update(body: Mapping[str, Any], max_length: int) -> BreakerUpdate:
    """An update of at most ``max_length`` mutes from its JSON body. Raises ProtocolError."""
    with decoding("breaker update"):
        return BreakerUpdate(
            bool(body["whole"]),
            {_target(target): text(reason) for target, reason in list_in(body, "added", max_length)},
            _all_targets(list_in(body, "removed", max_length), max_length),
            ms(body.get("delay", 0.0)),
            {
                _target(target): ProbeLease(ms(left_ms), bool(trial))
                for target, left_ms, trial in list_in(body, "leases", max_length)
            },
            _all_targets(list_in(body, "asks", max_length), max_length),
            _terms(*body["terms"]) if "terms" in body else None,
            ms(body["max_delay"]) if "max_delay" in body else math.inf,
        )


def _encode(target: Target) -> Any:
    return target if isinstance(target, int) else [target.topic, target.partition]


def _target(value: Any) -> Target:
    return _partition(value) if isinstance(value, list) else count(value)


def _mute(target: Any, reason: Any, silence_ms: Any, task: Any = 0, is_old: Any = False) -> MuteReport:
    return MuteReport(_target(target), text(reason), ms(silence_ms), count(task), bool(is_old))


def _unmute(target: Any, reason: Any, task: Any = 0) -> UnmuteReport:
    return UnmuteReport(_target(target), text(reason), count(task))


def _terms(failure_perc: Any, report_interval_ms: Any) -> Terms:
    return Terms(count(failure_perc), ms(report_interval_ms))


def _tasks(value: Any) -> int:
    if count(value) > MAX_TASKS:
        raise ValueError("too many tasks")
    return int(value)


def _partition(value: Any) -> TopicPartition:
    topic, partition = value
    return _shared(fields.topic(topic), count(partition))


@lru_cache(2 * MAX_MUTES)
def _shared(topic: str, partition: int) -> TopicPartition:
    """One object for all thousands of tasks that name the partition, which would take memory for each."""
    return TopicPartition(topic, partition)


def _targets(body: Mapping[str, Any], name: str) -> tuple[Target, ...] | None:
    return _all_targets(list_in(body, name, MAX_TARGETS), MAX_TARGETS) if name in body else None


def _encode_all(targets: Iterable[Target]) -> list[Any]:
    encoded: list[Any] = []
    for topic, same in groupby(targets, key=lambda one: None if isinstance(one, int) else one.topic):
        if topic is None:
            encoded += same
        else:
            encoded.append([topic, *(one.partition for one in same if isinstance(one, TopicPartition))])
    return encoded


def _all_targets(values: list[Any], max_length: int) -> tuple[Target, ...]:
    found: list[Target] = []
    for value in values:
        if not isinstance(value, list):
            found.append(count(value))
            continue
        topic, *partitions = value
        # Thousands of tasks may name hundreds of partitions at once, hence no call for each.
        if any(type(one) is not int or one < 0 for one in partitions):
            raise ValueError("not a partition")
        name = fields.topic(topic)
        found += [_shared(name, one) for one in partitions]
    if len(found) > max_length:
        raise ValueError("too many targets")
    return tuple(found)


def _encode_outcomes(outcomes: Iterable[OutcomeCounts]) -> list[Any]:
    return [
        [
            topic,
            *(
                [
                    one.partition.partition,
                    one.written,
                    one.failed,
                    one.answered,
                    cut(one.error),
                    *(one.votes or ()),
                ]
                for one in same
            ),
        ]
        for topic, same in groupby(outcomes, key=lambda one: one.partition.topic)
    ]


def _votes(tasks: Any, failing: Any, failures: Any) -> TaskVotes:
    if not count(failing) <= _tasks(tasks):
        raise ValueError("more tasks fail than vote")
    return TaskVotes(tasks, failing, min(count(failures), MIN_FAILURES * failing))


def _outcomes(values: list[Any]) -> tuple[OutcomeCounts, ...]:
    found: list[OutcomeCounts] = []
    for topic, *rows in values:
        name = fields.topic(topic)
        for partition, written, failed, answered, error, *votes in rows:
            partition, written, failed = counts_of([partition, written, failed])
            counted = _votes(*votes) if votes else None
            where = _shared(name, partition)
            found.append(OutcomeCounts(where, written, failed, bool(answered), text(error), counted))
    if len(found) > MAX_OUTCOMES:
        raise ValueError("too many outcomes")
    return tuple(found)
