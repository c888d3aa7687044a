"""How transactions ended: which parts of a decided batch were committed, and what else is open.

Three answers of Kafka are proof: an EndTxn that succeeds, a progress marker that is visible, and a
description of the transaction right after it was ended. Everything else proves nothing. An error may come
from the memory of a former coordinator, and a missing marker may have expired. What cannot be concluded is
reported as unknown.

The story of a decided batch: the driver sends EndTxn for its parts (``ends_of``). Parts whose EndTxn failed
go to ``judge``, which looks for their progress markers. A pending marker belongs to an open transaction,
which is committed again by way of its current coordinator. If a marker is absent, the driver proves that it
still owns the prefix (``require_owner``), looks again, and then asks for a description of the transaction
(``_without_markers``). If the description proves nothing either, an absent marker means that the part is
lost, but only within an hour of the batch's first transaction, because no marker expires that soon. Later the
part is unknown.

Before this code concludes that rows are missing, or ends a transaction that it did not begin, it proves that
it owns the prefix at that moment. Otherwise a driver that was replaced would abort what its successor has
decided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote

from kafka_sink.errors import TransactionError
from kafka_sink.printable import first_of
from kafka_sink.transactions import operations as ops
from kafka_sink.transactions.decision import Decision, Outcome, Part
from kafka_sink.transactions.operations import Described, OffsetKey, ProducerEpoch, Scope, TransactionSteps

# Returns the time of day in ms. It is called after the brokers have responded, which may take minutes.
Clock = Callable[[], float]
# Progress markers are expected to exist for this long. offsets.retention.minutes is a week by default.
MARKERS_LAST_MS = 3_600_000


def other_driver(scope: Scope, failed: ops.Failed, what: str = "") -> TransactionError:
    """The error for a driver whose driver epoch is no longer valid."""
    return TransactionError(
        f"{what}another driver has taken the transactional ids over ({failed.error}). It completes what was "
        "decided and writes what was not, so let it run, unless two queries or jobs share "
        f"transactional.id.prefix '{scope.prefix}' by mistake"
    )


def require_owner(
    scope: Scope, driver_epoch: ProducerEpoch, *keys: OffsetKey
) -> TransactionSteps[ProducerEpoch]:
    """Return the new driver epoch. Raises TransactionError if another driver has taken over.

    The proof consists of offsets that are recorded under the driver's id and aborted: only the current
    coordinator of the id can do that, and only for its current owner. It also shows that the current
    coordinators of the groups of ``keys`` have been found, because a former one cannot accept offsets. No
    decision may have been made or be under way under the driver epoch: these offsets would become part of it.
    """
    a_key_of = {key.group: key for key in keys or (scope.decision_key(0),)}
    results = yield tuple(
        ops.RecordOffsets(scope.driver_id, driver_epoch, key.group, ((key.partition, ""),))
        for key in a_key_of.values()
    )
    failed = next((result for result in results if isinstance(result, ops.Failed)), None)
    if failed is None:
        # An abort without these offsets would fail while the markers of a decision are being written.
        (ended,) = yield (ops.EndTransaction(scope.driver_id, driver_epoch, commit=False),)
        if not isinstance(ended, ops.Failed):
            return ProducerEpoch(*ended)
        failed = ended
    raise other_driver(scope, failed)


def inspect(
    scope: Scope, driver_epoch: ProducerEpoch, names: Iterable[str], *keys: OffsetKey
) -> TransactionSteps[tuple[ProducerEpoch, Mapping[str, Described]]]:
    """Describe these ids of the prefix's tasks; returns the renewed driver epoch and the descriptions.

    It raises what ``require_owner`` raises, which gets ``keys``. The order makes it safe to end the
    transactions that are found: the driver epoch is proved after they were described, so no later driver's
    tasks had begun by then, and what they begin later has other epochs.
    """
    descriptions = yield from ops.describe(*names, afresh=True)
    if descriptions:
        driver_epoch = yield from require_owner(scope, driver_epoch, *keys)
    return driver_epoch, descriptions


def abort_others(
    descriptions: Mapping[str, Described], scope: Scope, decided: Iterable[Part]
) -> TransactionSteps[int]:
    """Abort what ``inspect`` found open and what was not decided; returns how many transactions were aborted.

    Ids that have no transaction yet are also ended, so that none can begin.
    """
    keep = {(part.id_in(scope), part.producer) for part in decided}
    ends = [
        (name, described)
        for name, described in descriptions.items()
        if described.state in (ops.OPEN, ops.NO_TRANSACTION) and (name, described.producer) not in keep
    ]
    if not ends:
        return 0
    results = yield tuple(
        ops.EndTransaction(name, described.producer, commit=False) for name, described in ends
    )
    return sum(
        described.state == ops.OPEN and not isinstance(result, ops.Failed)
        for (_, described), result in zip(ends, results, strict=True)
    )


def ends_of(scope: Scope, parts: Iterable[Part], *, afresh: bool = False) -> tuple[ops.EndTransaction, ...]:
    """The operations that commit decided transactions."""
    return tuple(
        ops.EndTransaction(part.id_in(scope), part.producer, commit=True, afresh=afresh, of_task=True)
        for part in parts
    )


def failed_of(parts: Iterable[Part], results: Sequence[object]) -> tuple[Part, ...]:
    """The parts whose commit failed, which proves nothing yet. The other parts are committed."""
    return tuple(part for part, result in zip(parts, results, strict=True) if isinstance(result, ops.Failed))


@dataclass(frozen=True, slots=True)
class Judgement:
    """The result of ``judge``: parts that are neither lost nor unknown are committed."""

    driver_epoch: ProducerEpoch
    lost: tuple[Part, ...] = ()
    unknown: tuple[Part, ...] = ()
    aborted: int = 0

    def outcomes(self, decision: Decision) -> Mapping[int, Outcome]:
        """The outcome of each task's part that has no recorded one."""
        tasks = (part.task for part in decision.parts if part.outcome is Outcome.UNRECORDED)
        return {
            **dict.fromkeys(tasks, Outcome.COMMITTED),
            **{part.task: Outcome.UNRECORDED for part in self.unknown},
            **{part.task: Outcome.LOST for part in self.lost},
        }


def judge(
    scope: Scope, driver_epoch: ProducerEpoch, decision: Decision, failed: tuple[Part, ...], clock_ms: Clock
) -> TransactionSteps[Judgement]:
    """Find out what became of decided parts whose commit failed. Raises TransactionError for a former owner.

    A progress marker that stays pending is in an open transaction. That transaction is committed again by way
    of a coordinator that is looked up again, because the one that answered is no longer in charge.
    """
    aborted = 0
    is_proven = False
    while failed:
        pending, absent = yield from _markers_of(scope, decision, failed)
        if pending:
            results = yield ends_of(scope, pending, afresh=True)
            again = failed_of(pending, results)
            failed = tuple(part for part in failed if part in again or part in absent)
            # The pending marker may also be another attempt's: both attempts write it to the same place.
            (names,) = yield (ops.ListOpen(scope.prefix),)
            driver_epoch, left = yield from inspect(scope, driver_epoch, names)
            aborted += yield from abort_others(left, scope, decision.parts)
        elif not absent:
            break
        elif not is_proven:
            keys = (decision.marker_key(scope, part) for part in absent)
            driver_epoch = yield from require_owner(scope, driver_epoch, *keys)
            is_proven, failed = True, absent
        else:
            lost, unknown = yield from _without_markers(scope, decision, absent, clock_ms)
            return Judgement(driver_epoch, lost, unknown, aborted)
    return Judgement(driver_epoch, aborted=aborted)


def _markers_of(
    scope: Scope, decision: Decision, parts: Iterable[Part]
) -> TransactionSteps[tuple[tuple[Part, ...], tuple[Part, ...]]]:
    """Return the parts whose progress markers are pending, and the parts that have no marker."""
    keys = {part: decision.marker_key(scope, part) for part in parts}
    markers = yield from ops.fetch_stable_offsets(*keys.values())
    pending = tuple(part for part, key in keys.items() if key in markers and markers[key] is None)
    absent = tuple(
        part
        for part, key in keys.items()
        if part not in pending and markers.get(key) != decision.batch.progress_marker(part)
    )
    return pending, absent


def are_visible(scope: Scope, decision: Decision, parts: tuple[Part, ...]) -> TransactionSteps[bool]:
    """Whether the progress markers of all these parts, which are committed, are visible at this moment."""
    return not parts or not any((yield from _markers_of(scope, decision, parts)))


def _without_markers(
    scope: Scope, decision: Decision, parts: tuple[Part, ...], clock_ms: Clock
) -> TransactionSteps[tuple[tuple[Part, ...], tuple[Part, ...]]]:
    """Return which of these parts without a progress marker were aborted, and whose outcome is unknown."""
    descriptions = yield from ops.describe(*(part.id_in(scope) for part in parts), afresh=True)
    markers_last = decision.began_ms >= 0 and abs(clock_ms() - decision.began_ms) < MARKERS_LAST_MS
    lost, unknown = [], []
    for part in parts:
        outcome = outcome_of(part, descriptions.get(part.id_in(scope)))
        if outcome is Outcome.LOST or (outcome is Outcome.UNRECORDED and markers_last):
            lost.append(part)
        elif outcome is Outcome.UNRECORDED:
            unknown.append(part)
    return tuple(lost), tuple(unknown)


def outcome_of(part: Part, described: Described | None) -> Outcome:
    """What a description proves about a part.

    The first end of a transaction raises the epoch by one, and the description shows how it ended until the
    id is taken over again. With protocol 1 a commit leaves the epoch as it is.
    """
    behind = None if described is None else ops.epochs_behind(part.producer, described.producer)
    if described is None or behind not in (0, 1):
        return Outcome.UNRECORDED
    if described.state in ops.COMMITTED:
        return Outcome.COMMITTED
    return Outcome.LOST if behind and described.state in ops.ABORTED else Outcome.UNRECORDED


def uncommitted(scope: Scope, decision: Decision) -> TransactionSteps[tuple[Part, ...]]:
    """The parts that readers do not see at this moment, for the command line. It waits for nothing."""
    parts = tuple(part for part in decision.parts if part.outcome is not Outcome.COMMITTED)
    keys = tuple(decision.marker_key(scope, part) for part in parts)
    seen: Mapping[OffsetKey, str] = {}
    if keys:
        (seen,) = yield (ops.FetchOffsets((), keys),)
    markers = set(seen.values())
    absent = tuple(part for part in parts if decision.batch.progress_marker(part) not in markers)
    descriptions = yield from ops.describe(*(part.id_in(scope) for part in absent))
    return tuple(
        part
        for part in absent
        if outcome_of(part, descriptions.get(part.id_in(scope))) is not Outcome.COMMITTED
    )


def not_visible(
    scope: Scope, decision: Decision, seen: Mapping[OffsetKey, str]
) -> TransactionSteps[tuple[Part, ...]]:
    """The parts without a recorded outcome whose progress marker is not visible at this moment.

    They may be committed all the same. ``seen`` contains the offsets of the first group of markers.
    """
    parts = tuple(part for part in decision.parts if part.outcome is Outcome.UNRECORDED)
    groups = {decision.marker_key(scope, part).group for part in parts} - {scope.marker_key(0).group}
    markers = set(seen.values())
    if groups:
        markers |= set((yield from ops.fetch_offsets(*sorted(groups))).values())
    return tuple(part for part in parts if decision.batch.progress_marker(part) not in markers)


def incomplete(scope: Scope, decision: Decision, tasks: Iterable[int]) -> str:
    """The message for a batch of which readers see a part."""
    lost = sorted(tasks)
    if decision.batch.is_named:
        todo = (
            "Run the job again: with the same tasks it writes just these rows. If it cannot have the same "
            f"tasks, {_command('rewrite', scope)} lets the next run write the whole batch, and readers see "
            "the other rows twice; abandon instead leaves the missing rows out"
        )
    else:
        todo = (
            "The job has no txnAppId, so no run writes just these rows: started again, it writes all rows, "
            f"and readers see the others twice. {_command('abandon', scope)} leaves the missing rows out, so "
            "that other jobs with the same transactional.id.prefix can write"
        )
    return (
        f"{decision.batch} was decided, but the transactions of {named(lost)} ({_rows(decision, lost)}) were "
        "ended before they could be committed: no driver completed the batch within "
        f"kafka.transaction.timeout.ms. {todo}. See 'A batch is incomplete' in docs/exactly-once.md"
    )


def unfinished(scope: Scope, decision: Decision, error: Exception) -> str:
    """The message if a driver did not learn what became of a decision or of its transactions."""
    if decision.batch.is_named:
        then = f"The next run of it, or {_command('complete', scope)}, completes what was decided"
    else:
        then = (
            f"{_command('complete', scope)}, or the next job with the same transactional.id.prefix if you "
            "set one, completes what was decided. The job has no txnAppId: started again, it writes all rows "
            "once more"
        )
    return (
        f"{decision.batch} may be committed in part: {error}. If it was decided, readers of committed rows "
        "see a part or all of it by now, and if not, nothing. "
        f"{then}. That must happen within kafka.transaction.timeout.ms of the first row: later, the missing "
        "rows stay missing until they are written again"
    )


def unknowable(scope: Scope, decision: Decision, tasks: Iterable[int]) -> str:
    """The message for a batch of which Kafka no longer has any record whether readers see it."""
    unknown = sorted(tasks)
    return (
        f"{decision.batch} was decided, but it can no longer be known whether the transactions of "
        f"{named(unknown)} ({_rows(decision, unknown)}) were committed: brokers have deleted the record of "
        "it after offsets.retention.minutes or transactional.id.expiration.ms. Rows may be missing or not. "
        "Read the topic with isolation.level=read_committed. If the rows are there, "
        f"{_command('abandon', scope)} takes the batch for written. Only if they are not, "
        f"{_command('rewrite', scope)} lets the next run write the whole batch: readers then see "
        "twice the rows that they see now. See 'A batch is incomplete' in docs/exactly-once.md"
    )


def _rows(decision: Decision, tasks: Iterable[int]) -> str:
    some = sum(decision.digest_of(task).rows for task in tasks)
    return f"{some} rows of {sum(part.digest.rows for part in decision.parts)}"


def _command(action: str, scope: Scope) -> str:
    return (
        f"'kafka-chunked-transactions {action} --bootstrap-servers ... --prefix {quote(scope.prefix)} "
        f"--topic {quote(scope.topic)}'"
    )


def named(tasks: Sequence[int]) -> str:
    return f"task{'s' if len(tasks) > 1 else ''} {first_of(tasks)}"
