"""The messages of the circuit breaker that all tasks of a job share (KIP-693)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import Meta

from kafka_sink.coordinator.schema import Count, Message, Ms, NodeId, Text, Topic, cut
from kafka_sink.model import Target, TopicPartition

# The coordinator shares no more mutes than this. Tasks keep further mutes to themselves.
MAX_MUTES = 10_000
# Targets in one message of a task, which has room for this many of the longest names and reasons.
MAX_TARGETS = 400
# Muted partitions for which one task reports that it has rows. Other tasks report other partitions.
MAX_WAITING = 100

if TYPE_CHECKING:
    WirePartition = TopicPartition
else:

    class WirePartition(TopicPartition):
        """A partition whose fields have the bounds of a message."""

        __slots__ = ()
        topic: Topic
        partition: Count


_Target = Annotated[int, Meta(ge=0, le=2**31 - 1)] | WirePartition
_Targets = Annotated[tuple[_Target, ...], Meta(max_length=MAX_TARGETS)]
_SomeTargets = Annotated[tuple[_Target, ...], Meta(max_length=MAX_WAITING)]
_AllTargets = Annotated[tuple[_Target, ...], Meta(max_length=MAX_MUTES)]


class Reasoned(NamedTuple):
    target: _Target
    reason: Text


class OwnMute(NamedTuple):
    """A target that the task muted. ``silence_ms``: how long a broker has been silent, else 0."""

    target: _Target
    reason: Text
    silence_ms: Ms


class PartitionOutcome(NamedTuple):
    """How many batches of the last ten seconds were written to a partition, and how many failed.

    ``answered``: True if a broker responded with ``error``, which is the last error.
    """

    partition: WirePartition
    written: Count
    failed: Count
    answered: bool
    error: Text


class Outcomes(Message, frozen=True):
    """The outcomes of partitions that fail or are watched. ``rows``: rows sent since the producer began,
    without those that were reported before the task connected again."""

    rows: Count
    partitions: Annotated[tuple[PartitionOutcome, ...], Meta(max_length=MAX_TARGETS)]


class MuteChanges(Message, frozen=True):
    """The targets that the task muted and unmuted on its own evidence, and its probes that failed.

    ``unused``: probes for which the task has no rows, so that another task may make them.
    """

    muted: Annotated[tuple[OwnMute, ...], Meta(max_length=MAX_TARGETS)] = ()
    unmuted: _Targets = ()
    failed: _Targets = ()
    unused: _Targets = ()


class Answer(Message, frozen=True):
    """The answer to a Question: the broker's last response came this long ago."""

    broker: NodeId
    age_ms: Ms


class Waiting(Message, frozen=True):
    """Some of the muted partitions that batches wait for, and of those that rows could go to."""

    waited_for: _SomeTargets
    acceptable: _SomeTargets


class Mutes(Message, frozen=True):
    """Changes of the shared mutes. ``whole``: ``added`` is everything that is muted.

    ``tasks``: the number of tasks, which resume sending to the ``removed`` targets one after the other.
    """

    whole: bool
    added: Annotated[tuple[Reasoned, ...], Meta(max_length=MAX_MUTES)]
    removed: _AllTargets
    tasks: Count


class Watch(Message, frozen=True):
    """Asks the task to report the outcomes of these partitions now."""

    partitions: Annotated[tuple[WirePartition, ...], Meta(max_length=MAX_MUTES)]


class Question(Message, frozen=True):
    """Asks whether the broker has responded within this time, or responds now."""

    broker: NodeId
    within_ms: Ms


class Probe(Message, frozen=True):
    """Permits the task to probe each of these targets once within mute.retry.interval.

    ``new_rows``: no batch waits for these partitions, so new rows may go there until one batch is sent.
    """

    targets: _AllTargets
    new_rows: bool


def reasoned(reasons: Iterable[tuple[Target, str]]) -> tuple[Reasoned, ...]:
    return tuple(Reasoned(target, cut(reason)) for target, reason in reasons)
