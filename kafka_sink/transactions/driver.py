"""The driver's side: who owns a prefix, what was decided, and the one decision a batch.

All of it hangs on the driver's own transactional id. Planning takes it over, which fences every earlier
driver; the decision is a transaction under it, begun with the epoch that planning got. So a decision is
written by the driver that planned the batch, without another driver in between, or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kafka_sink.errors import IncompleteBatchError, TransactionError
from kafka_sink.model import TopicPartition
from kafka_sink.transactions import decision as decisions
from kafka_sink.transactions.decision import BatchIdentity, Decision, Part, Written
from kafka_sink.transactions.operations import (
    NO_TRANSACTION,
    OPEN,
    Describe,
    Described,
    EndTransaction,
    FetchOffsets,
    ListOpen,
    OffsetKey,
    ProducerEpoch,
    RecordOffsets,
    Refused,
    Steps,
    describe,
    epochs_behind,
    fetch_offsets,
    fetch_stable_offsets,
    init_producer,
)
from kafka_sink.transactions.scope import Scope

_NAMED = 5
# When each of some transactions began, by its coordinator's clock; -1 where that is not known.
BeganMs = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ownership:
    """What planning found and took. ``claim`` is the driver's id, which the decision needs.

    ``missing``: tasks of ``decision`` whose transactions ended without being committed. ``completed`` and
    ``aborted``: when the transactions began that an earlier driver had left open and this one ended so.
    """

    claim: ProducerEpoch
    decision: Decision | None = None
    missing: frozenset[int] = frozenset()
    completed: BeganMs = ()
    aborted: BeganMs = ()


@dataclass(frozen=True, slots=True)
class Committed:
    """What became of a batch: when the transactions began that were committed, and those of others that were
    open under the prefix and were aborted."""

    committed: BeganMs
    aborted: BeganMs


def take_over(scope: Scope) -> Steps[Ownership]:
    """Fence other drivers of the prefix, complete what was decided, abort everything else that is open."""
    claim = yield from init_producer(scope.driver_id)
    # Both at once, for every micro-batch waits for it; where nothing is left open, this is all.
    seen, names = yield (
        FetchOffsets(take_over_groups(scope)),
        ListOpen(scope.prefix),
    )
    if names:
        # Of these, what a former coordinator does not know to be decided would be aborted.
        claim = yield from _reach_coordinators(scope, claim, scope.decision_key(0), scope.mark_key(0))
        seen = yield from fetch_offsets(*take_over_groups(scope))
    decision = yield from _decision_in(scope, seen)
    not_visible: tuple[Part, ...] = ()
    left_open: Mapping[str, Described] = {}
    if decision is not None:
        not_visible = yield from _not_visible(scope, decision, seen)
    if not_visible:
        left_open = yield from describe(*(scope.task_id(part.task, part.slot) for part in not_visible))
        yield from _end(scope, not_visible)
        (names,) = yield (ListOpen(scope.prefix),)
    aborted = yield from abort_open(scope, claim, names)
    missing: tuple[Part, ...] = ()
    if decision is not None and not_visible:
        # Everything else of the prefix is aborted, so asking for the marks in a way that waits for undecided
        # transactions ends soon.
        missing = yield from unmarked(scope, decision)
    if decision is not None and missing:
        where = replace(scope, topic=decision.topic, partitions=decision.partitions)
        claim = yield from _reach_coordinators(scope, claim, *(where.mark_key(one.task) for one in missing))
        missing = yield from unmarked(scope, decision)
    completed = (_began_ms(scope, part, left_open) for part in not_visible if part not in missing)
    return Ownership(
        claim,
        decision,
        frozenset(part.task for part in missing),
        completed=tuple(completed),
        aborted=aborted,
    )


def abort(scope: Scope, claim: ProducerEpoch) -> Steps[Ownership | None]:
    """After a failed batch: end what it left open, or complete it if it was decided.

    None where another driver has taken over, whose business it is then. A decision raises the epoch by one,
    and so does the time-out of the driver's own transaction; both end it. Another driver's take-over raises
    the epoch, too, but leaves the id without any transaction, until that driver opens one.
    """
    found = (yield from describe(scope.driver_id)).get(scope.driver_id)
    if found is None:
        return None
    behind = epochs_behind(claim, found.producer)
    if behind == 0 or (behind == 1 and found.state not in (NO_TRANSACTION, OPEN)):
        return (yield from take_over(scope))
    return None


def _began_ms(scope: Scope, part: Part, found: Mapping[str, Described]) -> int:
    one = found.get(scope.task_id(part.task, part.slot))
    return one.started_ms if one is not None and one.producer == part.producer else -1


def take_over_groups(scope: Scope) -> tuple[str, ...]:
    """The groups that ``take_over`` reads every time."""
    return _first_decision_group(scope), _first_mark_group(scope)


def read_decision(scope: Scope) -> Steps[Decision | None]:
    """The latest decision under the prefix. Raises ProtocolError for one that cannot be read.

    No decision is pending after the driver's id was taken over, as that waits for its transaction's markers.
    """
    return (yield from _decision_in(scope, (yield from fetch_offsets(_first_decision_group(scope)))))


def _first_decision_group(scope: Scope) -> str:
    return scope.decision_key(0).group


def _first_mark_group(scope: Scope) -> str:
    return scope.mark_key(0).group


def _decision_in(scope: Scope, seen: Mapping[OffsetKey, str]) -> Steps[Decision | None]:
    """The latest decision, from offsets with those of its first group."""
    texts = [text for key, text in seen.items() if key.group == _first_decision_group(scope)]
    head = decisions.newest_head(texts)
    if head is None:
        return None
    groups = decisions.written_scope(scope, head).decision_groups(head.chunks)
    if len(groups) > 1:
        texts = list((yield from fetch_offsets(*groups)).values())
    return decisions.decode(texts)


def look(scope: Scope, parts: Iterable[Part]) -> Steps[tuple[Decision | None, Mapping[str, Described]]]:
    """The latest decision, and what is open under the ids of these parts: one round trip for both."""
    ids = tuple(scope.task_id(part.task, part.slot) for part in parts)
    seen, found = yield (FetchOffsets((_first_decision_group(scope),)), Describe(ids))
    return (yield from _decision_in(scope, seen)), dict(found)


def forget(scope: Scope, claim: ProducerEpoch, decision: Decision) -> Steps[None]:
    """Record that a batch was not decided, so that the next run writes all of it; what readers see stays."""
    yield from _replace(scope, claim, decision, "forgotten", decision.progress_before())


def abandon(scope: Scope, claim: ProducerEpoch, decision: Decision) -> Steps[None]:
    """Record that a batch was written as readers see it: no run writes what is missing."""
    yield from _replace(scope, claim, decision, "abandoned", decision.progress_as_it_is())


def _replace(
    scope: Scope, claim: ProducerEpoch, decision: Decision, word: str, progress: Mapping[str, Written]
) -> Steps[None]:
    """Record a decision without parts behind an incomplete one."""
    replacing = replace(
        decision,
        number=decision.number + 1,
        batch=BatchIdentity(f"{word} {decision.batch.writer}", decision.batch.number),
        parts=(),
        progress=progress,
    )
    yield from _record(scope, claim, replacing)
    (ended,) = yield (EndTransaction(scope.driver_id, claim, commit=True),)
    if isinstance(ended, Refused):
        raise TransactionError(f"{OTHER_DRIVER} ({ended.error})")


def decide(
    scope: Scope,
    claim: ProducerEpoch,
    decision: Decision,
    parts: tuple[Part, ...],
    found: Mapping[str, Described],
) -> Steps[Committed]:
    """Record a decision and commit those of its parts that are written now.

    ``found`` describes their transactions. Raises TransactionError where nothing was decided or nobody knows,
    IncompleteBatchError where it was and some transactions had ended by then.
    """
    _require_open(scope, decision.batch, parts, found)
    yield from _record(scope, claim, decision)
    (ended,) = yield (EndTransaction(scope.driver_id, claim, commit=True),)
    if isinstance(ended, Refused):
        raise TransactionError(
            f"whether {decision.batch} was decided is not known ({ended.error}), as {OTHER_DRIVER}. "
            "The next run finds out, and completes it or writes it again"
        )
    # The list first: a broker handles requests of one connection in order, and commits wait for its log.
    names, *results = yield (ListOpen(scope.prefix), *_ends(scope, parts))
    refused = _refused(parts, results)
    # The list was asked for together with the commits, so it may still name parts that have just been
    # committed: leave those out. An open transaction under the id of a refused part is another
    # attempt's: abort it.
    ours = {scope.task_id(part.task, part.slot) for part in parts if part not in refused}
    aborted = yield from abort_open(scope, ended, [name for name in names if name not in ours])
    if refused:
        lost = yield from unmarked(scope, decision)
        if lost:
            raise IncompleteBatchError(incomplete(scope, decision, [part.task for part in lost]))
    return Committed(tuple(_began_ms(scope, part, found) for part in parts), aborted)


def _require_open(
    scope: Scope, batch: BatchIdentity, parts: tuple[Part, ...], found: Mapping[str, Described]
) -> None:
    """Raises TransactionError if a part's transaction is no longer open: a batch that has lost a part must
    not be decided."""
    ids = {scope.task_id(part.task, part.slot): part for part in parts}
    lost = [part.task for name, part in ids.items() if not _is_open(found.get(name), part.producer)]
    if lost:
        raise TransactionError(
            f"{batch} is not committed: the transactions of {_tasks(lost)} are no longer open. They were "
            "open for longer than kafka.transaction.timeout.ms, or another run took "
            f"transactional.id.prefix '{scope.prefix}' over"
        )


def _is_open(found: Described | None, producer: ProducerEpoch) -> bool:
    return found is not None and found.state == OPEN and found.producer == producer


def require_last(scope: Scope, batch: BatchIdentity, expected: int, found: int) -> None:
    """Raises TransactionError if the last decision's number is not the one that a new decision builds on.

    The claim keeps other drivers from deciding, so one of the two was not the last: a broker that was frozen
    or cut off answers for groups that have another coordinator by now, until it learns of it.
    """
    if found != expected:
        raise TransactionError(
            f"{batch} is not committed: decision {max(found, expected)} was decided under "
            f"transactional.id.prefix '{scope.prefix}', but a broker knew nothing after decision "
            f"{min(found, expected)}. Start the query or job again"
        )


def _record(scope: Scope, claim: ProducerEpoch, decision: Decision) -> Steps[None]:
    """Put the decision into the driver's transaction, and see that the one before it is the last.

    A broker that is not the group's coordinator any more cannot take offsets, but can tell old ones. Both
    requests go over one connection, and brokers handle these in turn, so that the coordinator that took the
    offsets is the one that tells what was decided.
    """
    groups: dict[str, list[tuple[TopicPartition, str]]] = {}
    for index, text in enumerate(decisions.encode(decision, scope.partitions)):
        key = scope.decision_key(index)
        groups.setdefault(key.group, []).append((key.partition, text))
    *results, seen = yield (
        *(RecordOffsets(scope.driver_id, claim, group, tuple(entries)) for group, entries in groups.items()),
        FetchOffsets((_first_decision_group(scope),)),
    )
    for result in results:
        if isinstance(result, Refused):
            raise TransactionError(
                f"{decision.batch} is not committed: {OTHER_DRIVER} ({result.error}; "
                f"transactional.id.prefix '{scope.prefix}')"
            )
    head = decisions.newest_head(seen.values())
    require_last(scope, decision.batch, decision.number - 1, 0 if head is None else head.number)


def _end(scope: Scope, parts: tuple[Part, ...]) -> Steps[list[Part]]:
    """Commit decided transactions; returns those for which Kafka refuses it, which says nothing yet."""
    if not parts:
        return []
    return _refused(parts, (yield _ends(scope, parts)))


def _ends(scope: Scope, parts: tuple[Part, ...]) -> tuple[EndTransaction, ...]:
    return tuple(
        EndTransaction(scope.task_id(part.task, part.slot), part.producer, commit=True) for part in parts
    )


def _refused(parts: tuple[Part, ...], results: Sequence[object]) -> list[Part]:
    return [part for part, result in zip(parts, results, strict=True) if isinstance(result, Refused)]


def _reach_coordinators(scope: Scope, claim: ProducerEpoch, *keys: OffsetKey) -> Steps[ProducerEpoch]:
    """Offsets that are taken, and aborted, before what these keys' groups tell is acted upon.

    Only a group's present coordinator can take them: see ``_record``. Returns the new claim.
    """
    a_key_of = {key.group: key for key in keys}
    results = yield tuple(
        RecordOffsets(scope.driver_id, claim, key.group, ((key.partition, ""),)) for key in a_key_of.values()
    )
    (ended,) = yield (EndTransaction(scope.driver_id, claim, commit=False),)
    for result in (*results, ended):
        if isinstance(result, Refused):
            raise TransactionError(
                f"{OTHER_DRIVER} ({result.error}; transactional.id.prefix '{scope.prefix}')"
            )
    return ProducerEpoch(*ended)


def unmarked(scope: Scope, decision: Decision) -> Steps[tuple[Part, ...]]:
    """The parts that were not committed, once no transaction with a mark for them is undecided.

    A mark is in the transaction of its rows, and becomes visible with them.
    """
    where = replace(scope, topic=decision.topic, partitions=decision.partitions)
    keys = {part.task: where.mark_key(part.task) for part in decision.parts}
    marks = yield from fetch_stable_offsets(*keys.values())
    return tuple(part for part in decision.parts if marks.get(keys[part.task]) != _mark(decision, part))


def uncommitted(scope: Scope, decision: Decision) -> Steps[tuple[Part, ...]]:
    """The parts that readers do not see at this moment. Waits for nothing: for people who look."""
    return (yield from _not_visible(scope, decision, (yield from fetch_offsets(_first_mark_group(scope)))))


def _not_visible(scope: Scope, decision: Decision, seen: Mapping[OffsetKey, str]) -> Steps[tuple[Part, ...]]:
    """The parts whose mark is not visible at this moment; they may be committed all the same.

    ``seen`` are offsets with those of the first group of marks.
    """
    where = replace(scope, topic=decision.topic, partitions=decision.partitions)
    groups = {where.mark_key(part.task).group for part in decision.parts} - {_first_mark_group(scope)}
    marks = set(seen.values())
    if groups:
        marks |= set((yield from fetch_offsets(*sorted(groups))).values())
    return tuple(part for part in decision.parts if _mark(decision, part) not in marks)


def _mark(decision: Decision, part: Part) -> str:
    return decision.batch.mark(part.task, part.producer)


def abort_open(scope: Scope, claim: ProducerEpoch, names: Iterable[str]) -> Steps[BeganMs]:
    """Abort these of the prefix's tasks; returns when they began. Decided transactions are ended before.

    Raises TransactionError where another driver took over. The order makes it safe: transactions are looked
    at first and the driver's id after that. If that is unchanged, no later driver's tasks had begun when
    their transactions were looked at, and what they begin later has other epochs, which are not aborted here.
    """
    found = yield from describe(*names)
    if not found:
        return ()
    driver = yield from describe(scope.driver_id)
    if scope.driver_id not in driver or driver[scope.driver_id].producer != claim:
        raise TransactionError(f"{OTHER_DRIVER} (transactional.id.prefix '{scope.prefix}')")
    still_open = [(name, one) for name, one in found.items() if one.state == OPEN]
    if not still_open:
        return ()
    results = yield tuple(EndTransaction(name, one.producer, commit=False) for name, one in still_open)
    return tuple(
        one.started_ms
        for (_, one), result in zip(still_open, results, strict=True)
        if not isinstance(result, Refused)
    )


def incomplete(scope: Scope, decision: Decision, tasks: Iterable[int]) -> str:
    """What to say of a batch that readers see a part of."""
    lost = sorted(tasks)
    rows = sum(decision.digest_of(task).rows for task in lost)
    return (
        f"{decision.batch} was decided, but the transactions of {_tasks(lost)} ({rows} rows of "
        f"{sum(part.digest.rows for part in decision.parts)}) were ended before they could be committed: "
        "nobody completed the batch within kafka.transaction.timeout.ms. Run the job again: with the same "
        "tasks it writes just these rows. Where it cannot have the same tasks, 'python -m "
        f"kafka_sink.transactions rewrite --bootstrap-servers ... --prefix {scope.prefix} --topic "
        f"{scope.topic}' lets the next run write the whole batch, and readers see the other rows twice. See "
        "'A batch is incomplete' in docs/exactly-once.md"
    )


OTHER_DRIVER = "another driver has taken the transactional ids over"


def _tasks(tasks: list[int]) -> str:
    named = ", ".join(map(str, tasks[:_NAMED]))
    more = f" and {len(tasks) - _NAMED} more" if len(tasks) > _NAMED else ""
    return f"task{'s' if len(tasks) > 1 else ''} {named}{more}"
