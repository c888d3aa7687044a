"""What became of transactions: which of a decided batch were committed, and what is left open beside them.

Kafka tells it in three ways. Proof is an EndTxn that succeeds, a progress marker that is visible, and a
description of the transaction right after it was ended. Everything else may be a former coordinator's
memory, or a proof that has expired, and no conclusion is drawn from it: what cannot be known is said to be
unknown. Whoever concludes that rows are missing, or ends what others have open, owns the prefix at that
moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from shlex import quote

from kafka_sink.errors import TransactionError
from kafka_sink.printable import first_of
from kafka_sink.transactions.decision import Decision, Outcome, Part
from kafka_sink.transactions.operations import (
    ABORTED,
    COMMITTED,
    NO_TRANSACTION,
    OPEN,
    Described,
    EndTransaction,
    Failed,
    FetchOffsets,
    ListOpen,
    OffsetKey,
    ProducerEpoch,
    RecordOffsets,
    Scope,
    Steps,
    describe,
    epochs_behind,
    fetch_offsets,
    fetch_stable_offsets,
)

# The time of day in milliseconds. It is read after the brokers have responded, which may take minutes.
Clock = Callable[[], float]
# For how long progress markers are taken to be there. offsets.retention.minutes is a week by default.
MARKERS_LAST_MS = 3_600_000


def other_driver(scope: Scope, failed: Failed, what: str = "") -> TransactionError:
    """For a driver whose driver epoch does not hold any more."""
    return TransactionError(
        f"{what}another driver has taken the transactional ids over ({failed.error}). It completes what was "
        "decided and writes what was not, so leave it alone, unless two queries or jobs share "
        f"transactional.id.prefix '{scope.prefix}' by mistake"
    )


# -- who owns the prefix --------------------------------------------------------------------------


def require_owner(scope: Scope, driver_epoch: ProducerEpoch, *keys: OffsetKey) -> Steps[ProducerEpoch]:
    """Raise TransactionError where another driver has taken over. Returns the new driver epoch.

    The proof is offsets that are recorded under the driver's id and aborted: only the id's present
    coordinator can do it, and only for its present owner. The present coordinators of these ``keys``' groups
    have been found then, too, as a former one cannot take offsets. No decision may have been made under the
    driver epoch, or be under way: brokers would take these offsets into it.
    """
    a_key_of = {key.group: key for key in keys or (scope.decision_key(0),)}
    results = yield tuple(
        RecordOffsets(scope.driver_id, driver_epoch, key.group, ((key.partition, ""),))
        for key in a_key_of.values()
    )
    failed = next((result for result in results if isinstance(result, Failed)), None)
    if failed is None:
        # Alone it would fail while the markers of a decision are being written.
        (ended,) = yield (EndTransaction(scope.driver_id, driver_epoch, commit=False),)
        if not isinstance(ended, Failed):
            return ProducerEpoch(*ended)
        failed = ended
    raise other_driver(scope, failed)


# -- what others have open ------------------------------------------------------------------------


def inspect(
    scope: Scope, driver_epoch: ProducerEpoch, names: Iterable[str], *keys: OffsetKey
) -> Steps[tuple[ProducerEpoch, Mapping[str, Described]]]:
    """Describe these ids of the prefix's tasks. Returns the renewed driver epoch, too. Raises as
    ``require_owner``; ``keys`` as there.

    The order makes it safe to end what is found: the driver epoch is proven after the inspection, so no later
    driver's tasks had begun by then, and what they begin later has other epochs.
    """
    found = yield from describe(*names, afresh=True)
    if found:
        driver_epoch = yield from require_owner(scope, driver_epoch, *keys)
    return driver_epoch, found


def abort_others(found: Mapping[str, Described], scope: Scope, decided: Iterable[Part]) -> Steps[int]:
    """Abort what ``inspect`` found that is open and was not decided; returns how many transactions that were.

    Ids that have no transaction yet are ended, too, so that none begins.
    """
    keep = {(part.id_in(scope), part.producer) for part in decided}
    ends = [
        (name, one)
        for name, one in found.items()
        if one.state in (OPEN, NO_TRANSACTION) and (name, one.producer) not in keep
    ]
    if not ends:
        return 0
    results = yield tuple(EndTransaction(name, one.producer, commit=False) for name, one in ends)
    return sum(
        one.state == OPEN and not isinstance(result, Failed)
        for (_, one), result in zip(ends, results, strict=True)
    )


# -- what was decided -----------------------------------------------------------------------------


def ends_of(scope: Scope, parts: Iterable[Part], *, afresh: bool = False) -> tuple[EndTransaction, ...]:
    """What commits decided transactions."""
    return tuple(
        EndTransaction(part.id_in(scope), part.producer, commit=True, afresh=afresh, of_task=True)
        for part in parts
    )


def failed_of(parts: Iterable[Part], results: Sequence[object]) -> tuple[Part, ...]:
    """Those whose commit failed, which proves nothing yet; the others are committed."""
    return tuple(part for part, result in zip(parts, results, strict=True) if isinstance(result, Failed))


@dataclass(frozen=True, slots=True)
class Judgement:
    """On some parts of a decision; the others are committed. ``driver_epoch`` is the driver's, renewed."""

    driver_epoch: ProducerEpoch
    lost: tuple[Part, ...] = ()
    unknown: tuple[Part, ...] = ()
    aborted: int = 0


def judge(
    scope: Scope, driver_epoch: ProducerEpoch, decision: Decision, failed: tuple[Part, ...], clock_ms: Clock
) -> Steps[Judgement]:
    """What became of decided parts whose commit failed. Raises TransactionError for a former owner.

    A progress marker that stays pending is in a transaction that is open: it is committed again, by a
    coordinator that is looked for again, as the one that answered with an error is no longer in charge.
    """
    aborted = 0
    is_proven = False
    while failed:
        pending, absent = yield from _markers_of(scope, decision, failed)
        if pending:
            results = yield ends_of(scope, pending, afresh=True)
            again = failed_of(pending, results)
            failed = tuple(part for part in failed if part in again or part in absent)
            # Or it is another attempt's, whose progress marker has the same place.
            (names,) = yield (ListOpen(scope.prefix),)
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
) -> Steps[tuple[tuple[Part, ...], tuple[Part, ...]]]:
    """Of these parts, those whose progress markers are pending, and those that have none."""
    keys = {part: decision.marker_key(scope, part) for part in parts}
    markers = yield from fetch_stable_offsets(*keys.values())
    pending = tuple(part for part, key in keys.items() if key in markers and markers[key] is None)
    absent = tuple(
        part
        for part, key in keys.items()
        if part not in pending and markers.get(key) != decision.batch.progress_marker(part)
    )
    return pending, absent


def are_visible(scope: Scope, decision: Decision, parts: tuple[Part, ...]) -> Steps[bool]:
    """Whether the progress markers of all these parts, which are committed, are visible by now."""
    return not parts or not any((yield from _markers_of(scope, decision, parts)))


def _without_markers(
    scope: Scope, decision: Decision, parts: tuple[Part, ...], clock_ms: Clock
) -> Steps[tuple[tuple[Part, ...], tuple[Part, ...]]]:
    """Of parts without a progress marker, those that were aborted, and those of which nobody knows.

    Offsets expire one by one, progress markers before their decision.
    """
    found = yield from describe(*(part.id_in(scope) for part in parts), afresh=True)
    markers_last = decision.began_ms >= 0 and abs(clock_ms() - decision.began_ms) < MARKERS_LAST_MS
    lost, unknown = [], []
    for part in parts:
        outcome = outcome_of(part, found.get(part.id_in(scope)))
        if outcome is Outcome.LOST or (outcome is Outcome.UNRECORDED and markers_last):
            lost.append(part)
        elif outcome is Outcome.UNRECORDED:
            unknown.append(part)
    return tuple(lost), tuple(unknown)


def outcome_of(part: Part, found: Described | None) -> Outcome:
    """What a description proves. The first end of a transaction raises the epoch by one, and says which it
    was until the id is taken over again. Under protocol 1 a commit leaves the epoch."""
    behind = None if found is None else epochs_behind(part.producer, found.producer)
    if found is None or behind not in (0, 1):
        return Outcome.UNRECORDED
    if found.state in COMMITTED:
        return Outcome.COMMITTED
    return Outcome.LOST if behind and found.state in ABORTED else Outcome.UNRECORDED


def uncommitted(scope: Scope, decision: Decision) -> Steps[tuple[Part, ...]]:
    """The parts that readers do not see at this moment. Waits for nothing: for people who look."""
    parts = tuple(part for part in decision.parts if part.outcome is not Outcome.COMMITTED)
    keys = tuple(decision.marker_key(scope, part) for part in parts)
    seen: Mapping[OffsetKey, str] = {}
    if keys:
        (seen,) = yield (FetchOffsets((), keys),)
    markers = set(seen.values())
    absent = tuple(part for part in parts if decision.batch.progress_marker(part) not in markers)
    found = yield from describe(*(part.id_in(scope) for part in absent))
    return tuple(
        part for part in absent if outcome_of(part, found.get(part.id_in(scope))) is not Outcome.COMMITTED
    )


def not_visible(scope: Scope, decision: Decision, seen: Mapping[OffsetKey, str]) -> Steps[tuple[Part, ...]]:
    """The parts that are not known to be committed, and whose progress marker is not visible at this moment.

    They may be committed all the same. ``seen`` are offsets with those of the first group of marks.
    """
    parts = tuple(part for part in decision.parts if part.outcome is not Outcome.COMMITTED)
    groups = {decision.marker_key(scope, part).group for part in parts} - {scope.marker_key(0).group}
    markers = set(seen.values())
    if groups:
        markers |= set((yield from fetch_offsets(*sorted(groups))).values())
    return tuple(part for part in parts if decision.batch.progress_marker(part) not in markers)


# -- what to say of it ----------------------------------------------------------------------------


def incomplete(scope: Scope, decision: Decision, tasks: Iterable[int]) -> str:
    """What to say of a batch that readers see a part of."""
    lost = sorted(tasks)
    if decision.batch.is_named:
        todo = (
            "Run the job again: with the same tasks it writes just these rows. Where it cannot have the same "
            f"tasks, {_command('rewrite', scope)} lets the next run write the whole batch, and readers see "
            "the other rows twice; abandon instead leaves the missing rows out"
        )
    else:
        todo = (
            "As the job has no txnAppId, no run writes just these rows: one that is started again writes all "
            f"rows, and readers see the others twice. {_command('abandon', scope)} leaves the missing rows "
            "out, and lets other jobs write where they share a transactional.id.prefix that you set"
        )
    return (
        f"{decision.batch} was decided, but the transactions of {named(lost)} ({_rows(decision, lost)}) were "
        "ended before they could be committed: nobody completed the batch within "
        f"kafka.transaction.timeout.ms. {todo}. See 'A batch is incomplete' in docs/exactly-once.md"
    )


def unfinished(scope: Scope, decision: Decision, error: Exception) -> str:
    """The message if a driver did not learn what became of a decision, or of its transactions. Its end says
    what readers see."""
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
    """What to say of a batch of which Kafka cannot tell any more whether readers see it."""
    unknown = sorted(tasks)
    return (
        f"{decision.batch} was decided, but whether the transactions of {named(unknown)} "
        f"({_rows(decision, unknown)}) were committed cannot be known any more: brokers have forgotten it, "
        "by offsets.retention.minutes and transactional.id.expiration.ms. Nothing says that rows are "
        "missing. Read the topic with isolation.level=read_committed. If the rows are there, "
        f"{_command('abandon', scope)} takes the batch for written. Only if they are not, "
        f"{_command('rewrite', scope)} lets the next run write the whole batch: rows that readers see by "
        "now, they then see twice. See 'A batch is incomplete' in docs/exactly-once.md"
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
