"""The driver's side: who owns a prefix, what was decided, and the one decision for each batch.

All of it depends on the driver's own transactional id. Planning takes it over, which fences every earlier
driver; the decision is a transaction under it, begun with the epoch that planning got. So a decision is
written by the driver that planned the batch, without another driver in between, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kafka_sink.errors import DeliveryError, IncompleteBatchError, TransactionError
from kafka_sink.model import TopicPartition
from kafka_sink.transactions import decision as decisions
from kafka_sink.transactions import proof
from kafka_sink.transactions.decision import BatchIdentity, Decision, Outcome, Part
from kafka_sink.transactions.operations import (
    ABORTED,
    COMMITTED,
    LAST_EPOCH,
    OPEN,
    Describe,
    Described,
    EndTransaction,
    Failed,
    FetchOffsets,
    FetchStableOffsets,
    InitProducer,
    ListOpen,
    LookUp,
    OffsetKey,
    Operation,
    ProducerEpoch,
    RecordOffsets,
    Scope,
    Steps,
    describe,
    epochs_behind,
    fetch_offsets,
    fetch_stable_offsets,
    init_producer,
)
from kafka_sink.transactions.proof import Clock


@dataclass(frozen=True, slots=True)
class Ownership:
    """What planning found, and the epoch it got, with which the decision is written.

    ``unknown``: tasks of ``decision`` for which brokers have forgotten how their transactions ended.
    ``completed`` and ``aborted`` count the transactions that an earlier driver had left open, and that this
    one committed or aborted.
    """

    driver_epoch: ProducerEpoch
    decision: Decision | None = None
    unknown: frozenset[int] = frozenset()
    completed: int = 0
    aborted: int = 0

    @property
    def missing(self) -> frozenset[int]:
        """Tasks of the decision whose transactions ended without being committed."""
        parts = () if self.decision is None else self.decision.parts
        return frozenset(part.task for part in parts if part.outcome is Outcome.LOST)


def take_over(scope: Scope, clock_ms: Clock) -> Steps[Ownership]:
    """Fence other drivers of the prefix, complete what was decided, abort everything else that is open.

    ``clock_ms`` returns the time of day. Raises TransactionError if another driver takes over meanwhile.
    """
    groups = scope.decision_key(0).group, scope.marker_key(0).group
    driver_epoch = yield from init_producer(scope.driver_id, *groups)
    return (yield from _settle(scope, driver_epoch, clock_ms))


def _settle(scope: Scope, driver_epoch: ProducerEpoch, clock_ms: Clock) -> Steps[Ownership]:
    """Complete what was decided and abort everything else, as the owner of the prefix."""
    key, marker_key = scope.decision_key(0), scope.marker_key(0)
    read: tuple[Operation, ...] = FetchOffsets((key.group, marker_key.group)), FetchStableOffsets((key,))
    # All in one step, as every micro-batch waits for it; where nothing is left open, this is all.
    names, *offsets = yield (ListOpen(scope.prefix), *read)
    left_open: Mapping[str, Described] = {}
    if names:
        # By way of current coordinators. A former one may not know of a decision, and its parts would then be
        # aborted as undecided: so the offsets are read again.
        driver_epoch, left_open = yield from proof.inspect(scope, driver_epoch, names, key, marker_key)
        offsets = list((yield read))
    # Brokers of Kafka 3 show offsets only some time after their transaction is over.
    while offsets[0].get(key, "") != offsets[1].get(key, ""):
        offsets = list((yield read))
    seen: Mapping[OffsetKey, str] = offsets[0]
    decision = yield from _decision_in(scope, seen, waits=True)
    decided = () if decision is None else decision.parts
    unseen: tuple[Part, ...] = ()
    if decision is not None:
        absent = yield from proof.not_visible(scope, decision, seen)
        unseen = tuple(part for part in absent if part.outcome is not Outcome.LOST)
    ids = tuple(part.id_in(scope) for part in unseen)
    found: Mapping[str, Described] = {}
    failed: tuple[Part, ...] = ()
    if unseen:
        found, *results = yield (Describe(ids), *proof.ends_of(scope, unseen))
        failed = proof.failed_of(unseen, results)
    aborted = yield from proof.abort_others(left_open, scope, decided)
    if decision is None:
        return Ownership(driver_epoch, aborted=aborted)
    judgement = yield from proof.judge(scope, driver_epoch, decision, failed, clock_ms)
    # Their commit has just proved itself. The next run needs a marker, as this run's tasks take the ids over.
    is_proved_otherwise = bool(failed) or not (yield from proof.are_visible(scope, decision, unseen))
    driver_epoch, decision = yield from _remember(
        scope, judgement, decision, clock_ms(), is_proved_otherwise=is_proved_otherwise
    )
    completed = sum(part not in judgement.lost and bool(_open_part(scope, part, found)) for part in unseen)
    return Ownership(
        driver_epoch,
        decision,
        frozenset(part.task for part in judgement.unknown),
        completed,
        aborted + judgement.aborted,
    )


def _remember(
    scope: Scope,
    judgement: proof.Judgement,
    decision: Decision,
    now_ms: float,
    *,
    is_proved_otherwise: bool,
) -> Steps[tuple[ProducerEpoch, Decision]]:
    """Record the outcomes of the decision's parts while they are known, because their proof expires.

    ``is_proved_otherwise``: progress markers do not show all of it. They may be gone, or elsewhere. Then only
    the tasks' ids prove it, until the tasks of this run take the ids over. An old decision is recorded anew
    even if all its markers are visible, because they may have expired when the next run asks. Recording it
    also keeps what was written from expiring.
    """
    is_old = abs(now_ms - decision.began_ms) >= proof.MARKERS_LAST_MS
    if not is_proved_otherwise and not is_old:
        return judgement.driver_epoch, decision
    outcomes = {part.task: Outcome.COMMITTED for part in decision.parts if part.outcome is Outcome.UNRECORDED}
    outcomes |= {part.task: Outcome.UNRECORDED for part in judgement.unknown}
    outcomes |= {part.task: Outcome.LOST for part in judgement.lost}
    # Progress markers of what stays unknown are as old as before.
    began_ms = decision.began_ms if judgement.unknown else round(now_ms)
    known = replace(decisions.recorded(decision, outcomes), began_ms=began_ms)
    if judgement.unknown and known.parts == decision.parts:
        return judgement.driver_epoch, decision
    driver_epoch, _ = yield from record_and_commit(scope, judgement.driver_epoch, known)
    # The commit of this run's batch builds on what it reads.
    yield from _await_all_chunks(scope, len(decisions.encode(known, scope.partitions)))
    return driver_epoch, known


def abort(scope: Scope, driver_epoch: ProducerEpoch, clock_ms: Clock) -> Steps[Ownership | None]:
    """After a failed batch: end what it left open, or complete it if it was decided.

    None where another driver has taken over, whose business it is then. An abort under the driver's id
    excludes a decision under the same driver epoch, and fences nobody.
    """
    (ended,) = yield (EndTransaction(scope.driver_id, driver_epoch, commit=False),)
    renewed = (
        (yield from _renewed(scope, driver_epoch)) if isinstance(ended, Failed) else ProducerEpoch(*ended)
    )
    return None if renewed is None else (yield from _settle(scope, renewed, clock_ms))


def _renewed(scope: Scope, driver_epoch: ProducerEpoch) -> Steps[ProducerEpoch | None]:
    """The driver epoch of a driver whose abort failed; None where another driver has taken over.

    The abort fails after a decision, and after the time-out of the driver's own transaction, which both
    raise the epoch by one and end a transaction. Another driver's take-over raises the epoch, too, but leaves
    the id without any transaction, until that driver opens one; its end raises the epoch further. With
    protocol 1 only the client raises it behind an end, so there the first end at the next epoch is another
    driver's, and an abort without a transaction fails, too. Then the id's coordinator tells who has
    raised the epoch, or raises it now. One that was replaced since does not know: None as well. It is not
    asked while another driver has a transaction open, which that would abort, nor behind the last epoch but
    one, where brokers fail with UNKNOWN_SERVER_ERROR.

    While a decision is being committed, brokers take offsets of its epoch into it until they have its
    marker: an offset that was only to prove ownership would replace the decision. So nothing is recorded
    under the driver epoch itself, nor before the end of a transaction is over. It may be another driver's:
    while brokers change from protocol 1 to 2, that driver may still speak 1, and its end leaves the epoch.
    """
    found = (yield from describe(scope.driver_id, afresh=True, once_ended=True)).get(scope.driver_id)
    behind = None if found is None else epochs_behind(driver_epoch, found.producer)
    if found is None or behind not in (0, 1):
        return None
    if behind == 1 and found.state in COMMITTED | ABORTED:
        if not found.ends_raise_epoch:
            return None
        try:
            return (yield from proof.require_owner(scope, found.producer))
        except TransactionError:
            return None
    if behind == 1 and (found.state == OPEN or found.producer.epoch == LAST_EPOCH):
        return None
    renewal: Operation = InitProducer(scope.driver_id, driver_epoch)
    if found.state == OPEN:
        # A former coordinator did not end it.
        renewal = EndTransaction(scope.driver_id, driver_epoch, commit=False)
    (renewed,) = yield (renewal,)
    return None if isinstance(renewed, Failed) else ProducerEpoch(*renewed)


def problem_of(scope: Scope, ownership: Ownership) -> str | None:
    """What to say of a batch that readers see a part of, None where they see all or nothing."""
    decision = ownership.decision
    if decision is not None and ownership.unknown:
        return proof.unknowable(scope, decision, ownership.unknown)
    if decision is not None and ownership.missing and not decision.is_lost:
        return proof.incomplete(scope, decision, ownership.missing)
    return None


def _open_part(scope: Scope, part: Part, found: Mapping[str, Described]) -> Described | None:
    """Its transaction, where that is open by these descriptions."""
    one = found.get(part.id_in(scope))
    return one if one is not None and one.state == OPEN and one.producer == part.producer else None


def read_decision(scope: Scope) -> Steps[Decision | None]:
    """The latest decision that brokers show by now. Raises ProtocolError for one that cannot be read."""
    return (yield from _decision_in(scope, (yield from fetch_offsets(scope.decision_key(0).group))))


def _await_all_chunks(scope: Scope, chunks: int) -> Steps[None]:
    """Wait until every chunk of a committed decision can be read: groups show theirs one after the other."""
    keys = [scope.decision_key(chunk) for chunk in range(chunks)]
    while None in (yield from fetch_stable_offsets(*keys)).values():
        pass


def _decision_in(
    scope: Scope, seen: Mapping[OffsetKey, str], *, waits: bool = False
) -> Steps[Decision | None]:
    """The latest decision, from offsets with those of its first group; ``waits`` for all of it."""
    texts = [text for key, text in seen.items() if key.group == scope.decision_key(0).group]
    head = decisions.newest_head(texts)
    if head is None:
        return None
    # Its topic may have got partitions since.
    written = replace(scope, partitions=head.partitions)
    groups = written.decision_groups(head.chunks)
    if len(groups) > 1:
        if waits:
            yield from _await_all_chunks(written, head.chunks)
        texts = list((yield from fetch_offsets(*groups)).values())
    return decisions.decode(texts)


def read_last(
    scope: Scope, driver_epoch: ProducerEpoch, batch: BatchIdentity, expected: int
) -> Steps[Decision | None]:
    """The latest decision. Raises TransactionError if it is not the one that planning saw.

    Then another driver has taken over and decided. Or one of the two was not the last: a broker that was
    frozen or cut off answers for groups that have another coordinator by now, until it learns of it.
    """
    decision = yield from read_decision(scope)
    number = 0 if decision is None else decision.number
    if number != expected:
        yield from proof.require_owner(scope, driver_epoch)
        raise _misled(scope, batch, expected, number)
    return decision


def resolve(scope: Scope, driver_epoch: ProducerEpoch, decision: Decision, *, rewrite: bool) -> Steps[None]:
    """Record that an incomplete batch is taken for lost or for written. What readers see of it stays.

    ``rewrite``: for lost, so that the next run writes all of it. Else for written, so that no run writes what
    is missing; a run of it again is still compared, so that no other batch of its number is taken for it.
    """
    outcomes = {
        part.task: Outcome.LOST if rewrite else Outcome.COMMITTED
        for part in decision.parts
        if rewrite or part.outcome is not Outcome.COMMITTED
    }
    yield from record_and_commit(scope, driver_epoch, decisions.recorded(decision, outcomes))


def record_and_commit(
    scope: Scope, driver_epoch: ProducerEpoch, decision: Decision, parts: tuple[Part, ...] = ()
) -> Steps[tuple[ProducerEpoch, Mapping[str, Described]]]:
    """Record and commit a decision; returns the new driver epoch, and descriptions of these ``parts``, which
    must be open. Raises TransactionError."""
    found = yield from record(scope, driver_epoch, decision, parts)
    if parts:
        found = yield from require_open(scope, decision.batch, parts, found)
    (ended,) = yield (EndTransaction(scope.driver_id, driver_epoch, commit=True),)
    if isinstance(ended, Failed):
        raise proof.other_driver(scope, ended, f"whether {decision.batch} was decided is not known: ")
    return ProducerEpoch(*ended), found


def decide(
    scope: Scope, driver_epoch: ProducerEpoch, decision: Decision, parts: tuple[Part, ...]
) -> Steps[tuple[int, int]]:
    """Record a decision and commit those of its parts that are written now.

    Returns when the first of their transactions began by its coordinator's clock (-1 if that is not known),
    and how many others were open and were aborted. Raises TransactionError if readers see nothing of it or
    another driver completes it, IncompleteBatchError if some transactions had ended by then, and
    DeliveryError if this was not learnt in time.
    """
    try:
        driver_epoch, found = yield from record_and_commit(scope, driver_epoch, decision, parts)
        aborted = yield from _commit_parts(scope, driver_epoch, decision, parts)
    except TransactionError:
        raise
    except DeliveryError as error:
        raise DeliveryError(proof.unfinished(scope, decision, error)) from error
    started = (found[part.id_in(scope)].started_ms for part in parts)
    return min((time_ms for time_ms in started if time_ms >= 0), default=-1), aborted


def _commit_parts(
    scope: Scope, driver_epoch: ProducerEpoch, decision: Decision, parts: tuple[Part, ...]
) -> Steps[int]:
    """Commit the parts of a new decision; returns how many other transactions were aborted."""
    # The list first: a broker handles requests of one connection in order, and commits wait for its log.
    names, *results = yield (ListOpen(scope.prefix), *proof.ends_of(scope, parts))
    failed = proof.failed_of(parts, results)
    # The list was asked for together with the commits, so it may still name parts that have just been
    # committed: leave those out.
    ours = {part.id_in(scope) for part in parts if part not in failed}
    others = [name for name in names if name not in ours]
    driver_epoch, left_open = yield from proof.inspect(scope, driver_epoch, others)
    aborted = yield from proof.abort_others(left_open, scope, parts)
    # No progress marker can have expired, as it was decided just now.
    judgement = yield from proof.judge(scope, driver_epoch, decision, failed, lambda: decision.began_ms)
    outcomes = dict.fromkeys((part.task for part in judgement.lost), Outcome.LOST)
    if decisions.recorded(decision, outcomes).is_lost:
        raise TransactionError(
            f"{decision.batch} is not committed: kafka.transaction.timeout.ms had ended all transactions. "
            "Readers see nothing of it and it counts as not written: run it again"
        )
    lost = [part.task for part in (*judgement.lost, *judgement.unknown)]
    if lost:
        raise IncompleteBatchError(proof.incomplete(scope, decision, lost))
    return aborted + judgement.aborted


def require_open(
    scope: Scope, batch: BatchIdentity, parts: tuple[Part, ...], found: Mapping[str, Described]
) -> Steps[Mapping[str, Described]]:
    """The descriptions of transactions that are all open.

    Raises TransactionError where one is not: a batch that has lost a part must not be decided.
    """
    doubtful = [part for part in parts if not _open_part(scope, part, found)]
    names = (part.id_in(scope) for part in doubtful)
    found = {**found, **(yield from describe(*names, afresh=True))}
    lost = [part.task for part in doubtful if not _open_part(scope, part, found)]
    if lost:
        raise TransactionError(
            f"{batch} is not committed: the transactions of {proof.named(lost)} are no longer open. They "
            "were open for longer than kafka.transaction.timeout.ms, or another run took "
            f"transactional.id.prefix '{scope.prefix}' over"
        )
    return found


def _misled(scope: Scope, batch: BatchIdentity, expected: int, found: int) -> TransactionError:
    return TransactionError(
        f"{batch} is not committed: decision {max(found, expected)} was decided under "
        f"transactional.id.prefix '{scope.prefix}', but a broker knew nothing after decision "
        f"{min(found, expected)}. Start the query or job again"
    )


def record(
    scope: Scope, driver_epoch: ProducerEpoch, decision: Decision, parts: tuple[Part, ...] = ()
) -> Steps[Mapping[str, Described]]:
    """Put the decision into the driver's transaction, and see that the one before it is the last.

    Describes the transactions of ``parts`` at the same time: they need be open only before the decision is
    committed.

    A broker that is not the group's coordinator any more cannot take offsets, but can tell old ones. Both
    requests go over one connection, and brokers handle these in turn, so that the coordinator that took the
    offsets is the one that tells what was decided.
    """
    groups: dict[str, list[tuple[TopicPartition, str]]] = {}
    for index, text in enumerate(decisions.encode(decision, scope.partitions)):
        key = scope.decision_key(index)
        groups.setdefault(key.group, []).append((key.partition, text))
    *results, seen, found, _ = yield (
        *(
            RecordOffsets(scope.driver_id, driver_epoch, group, tuple(entries))
            for group, entries in groups.items()
        ),
        FetchOffsets((scope.decision_key(0).group,)),
        Describe(tuple(part.id_in(scope) for part in parts)),
        LookUp((), (scope.driver_id,)),
    )
    for result in results:
        if isinstance(result, Failed):
            raise proof.other_driver(scope, result, f"{decision.batch} is not committed: ")
    head = decisions.newest_head(seen.values())
    last = 0 if head is None else head.number
    if last != decision.number - 1:
        # It has taken the offsets, so the driver epoch holds.
        raise _misled(scope, decision.batch, decision.number - 1, last)
    return dict(found)
