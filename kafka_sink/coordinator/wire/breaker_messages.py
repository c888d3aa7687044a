"""Outcomes, mutes and leases as JSON, and back with everything checked.

A task's report has any of ``answered`` ([broker, milliseconds ago]: its last answer without an error),
``rows`` (how many it has sent since the report before), ``outcomes`` ([topic, partition, batches written,
batches failed, whether a broker refused them, last error] of the last seconds, of partitions that fail it or
that it was asked about), ``muted`` ([target, reason, ms of silence]), ``unmuted`` ([target, reason]),
``failed`` ([target, error] of probes), ``holds`` (muted targets that batches of the task wait for) and
``wants`` (muted partitions that rows of it could go to); these two only where they changed. What is told back
has ``whole`` (whether it is all that is muted), ``added`` ([target, reason]), ``removed`` ([target, ms until
its rows may go there]), ``leases`` ([target, milliseconds, whether it is a trial]) and ``asks`` (targets: of
a broker whether it answers, of a partition its outcomes). A target is a broker's id or [topic, partition].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from kafka_sink.breaker.states import ProbeLease, Target
from kafka_sink.errors import ProtocolError
from kafka_sink.model import TopicPartition
from kafka_sink.options.values import TOPIC_MAX_LENGTH

# What is muted beyond that is each task's own matter.
MAX_MUTES = 5000
# So many of each in one report keep it below the bound of a frame.
MAX_OUTCOMES = 700
MAX_TARGETS = 700
_MAX_NODES = 10_000
_MAX_TEXT = 300
# Outcomes are weighed over the last seconds; what has lain for longer says nothing of those.
_OLD_MS = 5_000.0


@dataclass(frozen=True, slots=True)
class OutcomeCounts:
    """What became of a partition's batches in the last seconds; ``refused``: by an answer of the broker's."""

    partition: TopicPartition
    written: int
    failed: int
    refused: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class MuteReport:
    """A mute that a task decided on; ``silence_ms`` 0 where no silence was the reason."""

    target: Target
    reason: str
    silence_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class BreakerReport:
    """What a task tells."""

    answered: Mapping[int, float] = field(default_factory=dict)
    rows: int = 0
    outcomes: tuple[OutcomeCounts, ...] = ()
    muted: tuple[MuteReport, ...] = ()
    unmuted: tuple[tuple[Target, str], ...] = ()
    failed: tuple[tuple[Target, str], ...] = ()
    holds: tuple[Target, ...] | None = None
    wants: tuple[Target, ...] | None = None

    @property
    def changes_probes(self) -> bool:
        """Whether it may have who is to probe what, or when, come out differently."""
        told = self.muted or self.unmuted or self.failed
        return bool(told) or self.holds is not None or self.wants is not None


def aged(report: BreakerReport, waited_ms: float) -> BreakerReport:
    """A report that is sent so long after it was made, as a task's last one is when the next task begins."""
    return replace(
        report,
        answered={node: ago_ms + waited_ms for node, ago_ms in report.answered.items()},
        outcomes=report.outcomes if waited_ms < _OLD_MS else (),
        muted=tuple(
            replace(one, silence_ms=one.silence_ms + waited_ms) if one.silence_ms else one
            for one in report.muted
        ),
    )


@dataclass(frozen=True, slots=True)
class BreakerUpdate:
    """What a task is told."""

    whole: bool = False
    added: Mapping[Target, str] = field(default_factory=dict)
    removed: Mapping[Target, float] = field(default_factory=dict)
    leases: Mapping[Target, ProbeLease] = field(default_factory=dict)
    asks: tuple[Target, ...] = ()


def encode_report(report: BreakerReport) -> dict[str, Any]:
    """A body; the caller keeps to MAX_OUTCOMES and MAX_TARGETS."""
    body: dict[str, Any] = {
        "answered": [[node, ago_ms] for node, ago_ms in report.answered.items()],
        "rows": report.rows,
        "outcomes": [
            [*one.partition, one.written, one.failed, one.refused, _cut(one.error)] for one in report.outcomes
        ],
        "muted": [[_encode(one.target), _cut(one.reason), one.silence_ms] for one in report.muted],
        "unmuted": [[_encode(target), _cut(reason)] for target, reason in report.unmuted],
        "failed": [[_encode(target), _cut(error)] for target, error in report.failed],
    }
    told = {name: value for name, value in body.items() if value}
    for name, targets in (("holds", report.holds), ("wants", report.wants)):
        if targets is not None:
            told[name] = [_encode(target) for target in targets]
    return told


def decode_report(body: Mapping[str, Any]) -> BreakerReport:
    """Raises ProtocolError."""
    try:
        return BreakerReport(
            {_count(node): _ms(ago_ms) for node, ago_ms in _list(body, "answered", _MAX_NODES)},
            _count(body.get("rows", 0)),
            tuple(
                OutcomeCounts(
                    _partition([topic, partition]),
                    _count(written),
                    _count(failed),
                    bool(refused),
                    _text(error),
                )
                for topic, partition, written, failed, refused, error in _list(body, "outcomes", MAX_OUTCOMES)
            ),
            tuple(
                MuteReport(_target(target), _text(reason), _ms(silence_ms))
                for target, reason, silence_ms in _list(body, "muted", MAX_TARGETS)
            ),
            tuple((_target(target), _text(why)) for target, why in _list(body, "unmuted", MAX_TARGETS)),
            tuple((_target(target), _text(why)) for target, why in _list(body, "failed", MAX_TARGETS)),
            _targets(body, "holds"),
            _targets(body, "wants"),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"a report on outcomes that is none ({type(error).__name__})") from None


def encode_update(news: BreakerUpdate) -> dict[str, Any]:
    """A body."""
    body: dict[str, Any] = {
        "whole": news.whole,
        "added": [[_encode(target), _cut(reason)] for target, reason in news.added.items()],
        "removed": [[_encode(target), delay_ms] for target, delay_ms in news.removed.items()],
        "leases": [[_encode(target), one.left_ms, one.trial] for target, one in news.leases.items()],
        "asks": [_encode(target) for target in news.asks],
    }
    return {name: value for name, value in body.items() if value or name == "whole"}


def decode_update(body: Mapping[str, Any], max_length: int) -> BreakerUpdate:
    """``max_length`` mutes are taken. Raises ProtocolError."""
    try:
        return BreakerUpdate(
            bool(body["whole"]),
            {_target(target): _text(reason) for target, reason in _list(body, "added", max_length)},
            {_target(target): _ms(delay_ms) for target, delay_ms in _list(body, "removed", max_length)},
            {
                _target(target): ProbeLease(_ms(left_ms), bool(trial))
                for target, left_ms, trial in _list(body, "leases", max_length)
            },
            tuple(_target(target) for target in _list(body, "asks", max_length)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"a message of mutes that is none ({type(error).__name__})") from None


def _encode(target: Target) -> Any:
    return target if isinstance(target, int) else [target.topic, target.partition]


def _target(value: Any) -> Target:
    return _partition(value) if isinstance(value, list) else _count(value)


def _partition(value: Any) -> TopicPartition:
    topic, partition = value
    if not isinstance(topic, str) or len(topic) > TOPIC_MAX_LENGTH:
        raise ValueError("a topic that is none")
    return TopicPartition(topic, _count(partition))


def _targets(body: Mapping[str, Any], name: str) -> tuple[Target, ...] | None:
    return tuple(_target(one) for one in _list(body, name, MAX_TARGETS)) if name in body else None


def _list(body: Mapping[str, Any], name: str, max_length: int) -> list[Any]:
    found = body.get(name, [])
    if not isinstance(found, list) or len(found) > max_length:
        raise ValueError("a list that is none, or too long")
    return found


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError("a number that is none")
    return value


def _ms(value: Any) -> float:
    # Infinities and NaN are no times either.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise ValueError("a time that is none")
    return float(value)


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise ValueError("a text that is none, or too long")
    return value


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."
