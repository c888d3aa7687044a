"""The driver's part of the protocol: own a ``transactional.id.prefix``, complete what was decided, and decide
each batch once.

Everything rests on the driver's own transactional id. ``take_over`` runs InitProducerId for it, which fences
every earlier driver. The decision is a transaction under that id, with the epoch that ``take_over`` got. So a
decision is either made by the driver that planned the batch, with no other driver in between, or not at all.

How one batch passes through this module:

1. ``take_over`` reads the last decision and lists the transactions that are open under the prefix. It commits
   those that were decided and aborts the others (``_settle``). If the proof of what became of the decided
   ones may soon be gone, it records their outcomes in a new decision (``_remember``).
2. Tasks write and leave their transactions open, each with a progress marker.
3. ``decide`` puts the decision into the driver's transaction (``record``), requires that the tasks'
   transactions are still open (``require_open``), and commits the driver's transaction: from then on the
   batch is decided. Then it commits the tasks' transactions and aborts those of other attempts
   (``_commit_parts``).
4. If the batch failed, ``abort`` first ends the driver's own transaction, so that no decision can follow, and
   then settles what is open as ``take_over`` does.

A crash between any two messages leaves the batch either undecided, and the next ``take_over`` aborts it, or
decided, and the next ``take_over`` completes it. proof.py decides what the brokers' answers prove.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kafka_sink.errors import DeliveryError, IncompleteBatchError, TransactionError
from kafka_sink.model import TopicPartition
from kafka_sink.transactions import decision as decisions
from kafka_sink.transactions import operations as ops
from kafka_sink.transactions import proof
from kafka_sink.transactions.decision import BatchIdentity, Decision, Outcome, Part
from kafka_sink.transactions.operations import Described, OffsetKey, ProducerEpoch, Scope, TransactionSteps
from kafka_sink.transactions.proof import Clock

_LOOKED_UP_TASKS = 64


@dataclass(frozen=True, slots=True)
class Ownership:
    """The state that planning found, and the driver epoch with which the decision is written.

    ``unknown``: tasks of ``decision`` for which brokers have forgotten how their transactions ended.
    ``completed`` and ``aborted`` count the transactions of an earlier driver that this one has ended.
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


def take_over(scope: Scope, clock_ms: Clock) -> TransactionSteps[Ownership]:
    """Fence other drivers of the prefix, complete what was decided, and abort everything else that is open.

    ``clock_ms`` returns the time of day. Raises TransactionError if another driver takes over meanwhile.
    """
    groups = scope.decision_key(0).group, scope.marker_key(0).group
    # This also finds the coordinators for most tasks, which are handed over to them.
    names = tuple(scope.task_id(task, 0) for task in range(_LOOKED_UP_TASKS))
    driver_epoch, _ = yield (ops.InitProducer(scope.driver_id), ops.LookUp(groups, names))
    return (yield from _settle(scope, ProducerEpoch(*driver_epoch), clock_ms))


def _settle(scope: Scope, driver_epoch: ProducerEpoch, clock_ms: Clock) -> TransactionSteps[Ownership]:
    """Complete what was decided and abort everything else, as the owner of the prefix."""
    key, marker_key = scope.decision_key(0), scope.marker_key(0)
    read: tuple[ops.Operation, ...] = (
        ops.FetchOffsets((key.group, marker_key.group)),
        ops.FetchStableOffsets((key,)),
    )
    # All requests are in one step, because every job waits for it. Usually no other step follows.
    names, *offsets = yield (ops.ListOpen(scope.prefix), *read)
    left_open: Mapping[str, Described] = {}
    if names:
        # This finds the current coordinators. A former coordinator may have answered without the last
        # decision, whose parts would then be aborted as undecided, so the offsets are read again.
        driver_epoch, left_open = yield from proof.inspect(scope, driver_epoch, names, key, marker_key)
        offsets = list((yield read))
    # Brokers of Kafka 3 show offsets only some time after their transaction has ended.
    while offsets[0].get(key, "") != offsets[1].get(key, ""):
        offsets = list((yield read))
    seen: Mapping[OffsetKey, str] = offsets[0]
    decision = yield from _decision_in(scope, seen, waits=True)
    if decision is None:
        aborted = yield from proof.abort_others(left_open, scope, ())
        return Ownership(driver_epoch, aborted=aborted)
    unseen = yield from proof.not_visible(scope, decision, seen)
    descriptions: Mapping[str, Described] = {}
    failed: tuple[Part, ...] = ()
    if unseen:
        ids = tuple(part.id_in(scope) for part in unseen)
        descriptions, *results = yield (ops.Describe(ids), *proof.ends_of(scope, unseen))
        failed = proof.failed_of(unseen, results)
    aborted = yield from proof.abort_others(left_open, scope, decision.parts)
    judgement = yield from proof.judge(scope, driver_epoch, decision, failed, clock_ms)
    # We have just seen that these parts are committed. But the tasks of this run will use their ids again, so
    # the next run needs a progress marker or a recorded outcome.
    is_proved_otherwise = bool(failed) or not (yield from proof.are_visible(scope, decision, unseen))
    driver_epoch, decision = yield from _remember(
        scope, judgement, decision, clock_ms(), is_proved_otherwise=is_proved_otherwise
    )
    completed = sum(part not in judgement.lost and _is_open(scope, part, descriptions) for part in unseen)
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
) -> TransactionSteps[tuple[ProducerEpoch, Decision]]:
    """Record what became of the decision's parts if the next run could no longer find it out.

    The next run needs a proof for each part. Usually that is the progress marker, and nothing is recorded.
    There are two exceptions:

    - Markers do not prove everything (``is_proved_otherwise``): the ids of the tasks do, which the tasks of
      this run take over.
    - The decision is so old that markers, and then the decision itself, may expire before the next run.

    Returns the driver epoch and the decision that holds now.
    """
    is_old = abs(now_ms - decision.began_ms) >= proof.MARKERS_LAST_MS
    if not is_proved_otherwise and not is_old:
        return judgement.driver_epoch, decision
    known = decisions.recorded(decision, judgement.outcomes(decision))
    if judgement.unknown and known.parts == decision.parts:
        return judgement.driver_epoch, decision  # nothing has become known
    if not judgement.unknown:
        # No marker is needed any more, so none is older than this decision.
        known = replace(known, began_ms=round(now_ms))
    driver_epoch = yield from record_and_commit(scope, judgement.driver_epoch, known)
    # The commit of this run's batch builds on this decision.
    yield from _await_all_chunks(scope, len(decisions.encode(known, scope.partitions)))
    return driver_epoch, known


def abort(scope: Scope, driver_epoch: ProducerEpoch, clock_ms: Clock) -> TransactionSteps[Ownership | None]:
    """End what a failed batch left open, or complete the batch if it was decided.

    Returns None if another driver has taken over, which then does this. An abort under the driver's id
    excludes a decision under the same driver epoch and fences nobody.
    """
    (ended,) = yield (ops.EndTransaction(scope.driver_id, driver_epoch, commit=False),)
    renewed = (
        (yield from _renewed(scope, driver_epoch)) if isinstance(ended, ops.Failed) else ProducerEpoch(*ended)
    )
    return None if renewed is None else (yield from _settle(scope, renewed, clock_ms))


def _renewed(scope: Scope, driver_epoch: ProducerEpoch) -> TransactionSteps[ProducerEpoch | None]:
    """Return the new driver epoch after a failed abort, or None if another driver has taken over.

    The id's description shows why the abort failed. E is the epoch with which this driver wanted to abort:

    - E, open: a former coordinator had answered. The current one aborts.
    - E, not open: protocol 1, in which only clients raise the epoch. This driver's transaction has ended, by
      its decision or by its timeout, and InitProducerId raises the epoch.
    - E + 1, ended, protocol 2: the end of this driver's transaction has raised the epoch. A take-over would
      have left no transaction or an open one at E + 1, and its end would have raised the epoch further.
    - E + 1, ended, protocol 1: the end was another driver's, because an end leaves the epoch.
    - E + 1, no transaction: this driver or another one has raised the epoch with InitProducerId. The
      coordinator knows who, unless it was replaced since then: sent again with E, the request returns E + 1
      or fails. It is not sent at the last epoch, where brokers fail with UNKNOWN_SERVER_ERROR.
    - E + 1, open: another driver's transaction, which InitProducerId would abort.
    - Any other epoch: another driver has taken over.

    Nothing is recorded before the end of a transaction is complete, and nothing with E: brokers would add it
    to the transaction of a decision that is being committed, and it would replace the decision.
    """
    driver = (yield from ops.describe(scope.driver_id, afresh=True, once_ended=True)).get(scope.driver_id)
    if driver is None:
        return None
    behind = ops.epochs_behind(driver_epoch, driver.producer)
    is_ended = driver.state in ops.COMMITTED | ops.ABORTED
    retry: ops.Operation
    if behind == 0 and driver.state == ops.OPEN:
        retry = ops.EndTransaction(scope.driver_id, driver_epoch, commit=False)
    elif behind == 1 and is_ended and driver.ends_raise_epoch:
        try:
            return (yield from proof.require_owner(scope, driver.producer))
        except TransactionError:
            return None
    elif behind == 0 or (
        behind == 1 and driver.state == ops.NO_TRANSACTION and driver.producer.epoch != ops.LAST_EPOCH
    ):
        retry = ops.InitProducer(scope.driver_id, driver_epoch)
    else:
        return None
    (renewed,) = yield (retry,)
    return None if isinstance(renewed, ops.Failed) else ProducerEpoch(*renewed)


def problem_of(scope: Scope, ownership: Ownership) -> str | None:
    """The message for a batch of which readers see a part; None if they see all of it or nothing."""
    decision = ownership.decision
    if decision is not None and ownership.unknown:
        return proof.unknowable(scope, decision, ownership.unknown)
    if decision is not None and ownership.missing and not decision.is_lost:
        return proof.incomplete(scope, decision, ownership.missing)
    return None


def _is_open(scope: Scope, part: Part, descriptions: Mapping[str, Described]) -> bool:
    """Whether these descriptions show the part's transaction open."""
    transaction = descriptions.get(part.id_in(scope))
    return transaction is not None and transaction.state == ops.OPEN and transaction.producer == part.producer


def read_decision(scope: Scope) -> TransactionSteps[Decision | None]:
    """The latest decision that brokers show at this moment. Raises ProtocolError if it cannot be read."""
    return (yield from _decision_in(scope, (yield from ops.fetch_offsets(scope.decision_key(0).group))))


def _await_all_chunks(scope: Scope, chunks: int) -> TransactionSteps[None]:
    """Wait until every chunk of a committed decision can be read: groups do not show them at once."""
    keys = [scope.decision_key(chunk) for chunk in range(chunks)]
    while None in (yield from ops.fetch_stable_offsets(*keys)).values():
        pass


def _decision_in(
    scope: Scope, seen: Mapping[OffsetKey, str], *, waits: bool = False
) -> TransactionSteps[Decision | None]:
    """The latest decision, whose first group's offsets are ``seen``; ``waits`` until all chunks are there."""
    texts = [text for key, text in seen.items() if key.group == scope.decision_key(0).group]
    head = decisions.newest_head(texts)
    if head is None:
        return None
    # The decision's topic may have got partitions since then.
    written = replace(scope, partitions=head.partitions)
    groups = written.decision_groups(head.chunks)
    if len(groups) > 1:
        if waits:
            yield from _await_all_chunks(written, head.chunks)
        texts = list((yield from ops.fetch_offsets(*groups)).values())
    return decisions.decode(texts)


def read_last(
    scope: Scope, driver_epoch: ProducerEpoch, batch: BatchIdentity, expected: int
) -> TransactionSteps[Decision | None]:
    """The latest decision. Raises TransactionError if it is not the one that planning read.

    In that case another driver has taken over and decided, or one of the two was not the latest: a broker
    that was frozen or cut off answers for groups that have another coordinator by now, until it learns of it.
    """
    decision = yield from read_decision(scope)
    number = 0 if decision is None else decision.number
    if number != expected:
        yield from proof.require_owner(scope, driver_epoch)
        raise _misled(scope, batch, expected, number)
    return decision


def resolve(
    scope: Scope, driver_epoch: ProducerEpoch, decision: Decision, *, rewrite: bool
) -> TransactionSteps[None]:
    """Record that an incomplete batch counts as lost or as written. What readers see of it does not change.

    ``rewrite``: it counts as lost, and the next run writes all of it. Otherwise it counts as written, and no
    run writes the missing rows. A run with its number is still compared with it, so that another batch is not
    taken for it.
    """
    outcomes = {
        part.task: Outcome.LOST if rewrite else Outcome.COMMITTED
        for part in decision.parts
        if rewrite or part.outcome is not Outcome.COMMITTED
    }
    yield from record_and_commit(scope, driver_epoch, decisions.recorded(decision, outcomes))


def record_and_commit(
    scope: Scope, driver_epoch: ProducerEpoch, decision: Decision, parts: tuple[Part, ...] = ()
) -> TransactionSteps[ProducerEpoch]:
    """Record and commit a decision, whose new ``parts`` must be open. Returns the new driver epoch."""
    descriptions = yield from record(scope, driver_epoch, decision, parts)
    yield from require_open(scope, decision.batch, parts, descriptions)
    (ended,) = yield (ops.EndTransaction(scope.driver_id, driver_epoch, commit=True),)
    if isinstance(ended, ops.Failed):
        raise proof.other_driver(scope, ended, f"it is not known whether {decision.batch} was decided: ")
    return ProducerEpoch(*ended)


def decide(
    scope: Scope, driver_epoch: ProducerEpoch, decision: Decision, parts: tuple[Part, ...]
) -> TransactionSteps[tuple[int, ProducerEpoch | None]]:
    """Record a decision and commit the parts of it that are written now.

    Returns how many other transactions were open and were aborted, and the driver epoch for the next batch.
    The epoch is None if the next batch must begin with ``take_over``. Raises TransactionError if readers see
    nothing of the batch or another driver completes it, IncompleteBatchError if some transactions had ended
    by then, and DeliveryError if the result was not learnt in time.
    """
    try:
        decided_epoch = yield from record_and_commit(scope, driver_epoch, decision, parts)
        last_epoch, aborted = yield from _commit_parts(scope, decided_epoch, decision, parts)
    except TransactionError:
        raise
    except DeliveryError as error:
        raise DeliveryError(proof.unfinished(scope, decision, error)) from error
    is_clean = driver_epoch != decided_epoch == last_epoch
    return aborted, decided_epoch if is_clean else None


def _commit_parts(
    scope: Scope, driver_epoch: ProducerEpoch, decision: Decision, parts: tuple[Part, ...]
) -> TransactionSteps[tuple[ProducerEpoch, int]]:
    """Commit the parts of a new decision.

    Returns the driver epoch, and how many other transactions were aborted. The driver epoch is still the same
    if there were none, and every part is proved to be committed by its EndTxn or its progress marker.
    """
    # The list comes first: a connection's requests are handled in order, and commits wait for the log.
    names, *results = yield (ops.ListOpen(scope.prefix), *proof.ends_of(scope, parts))
    failed = proof.failed_of(parts, results)
    # The list was requested together with the commits, so it may contain parts that are committed by now.
    ours = {part.id_in(scope) for part in parts if part not in failed}
    others = [name for name in names if name not in ours]
    driver_epoch, left_open = yield from proof.inspect(scope, driver_epoch, others)
    aborted = yield from proof.abort_others(left_open, scope, parts)
    # No progress marker can have expired, because the batch was decided just now.
    judgement = yield from proof.judge(scope, driver_epoch, decision, failed, lambda: decision.began_ms)
    if decisions.recorded(decision, judgement.outcomes(decision)).is_lost:
        raise TransactionError(
            f"{decision.batch} is not committed: brokers aborted all its transactions after "
            "kafka.transaction.timeout.ms. Readers see none of its rows and it counts as not written: run it "
            "again"
        )
    lost = [part.task for part in (*judgement.lost, *judgement.unknown)]
    if lost:
        raise IncompleteBatchError(proof.incomplete(scope, decision, lost))
    return judgement.driver_epoch, aborted + judgement.aborted


def require_open(
    scope: Scope, batch: BatchIdentity, parts: tuple[Part, ...], descriptions: Mapping[str, Described]
) -> TransactionSteps[None]:
    """Raise TransactionError if a transaction is not open: a batch that has lost a part must not be decided.

    ``descriptions`` may come from former coordinators, so what they do not show as open is described again.
    """
    doubtful = [part for part in parts if not _is_open(scope, part, descriptions)]
    descriptions = yield from ops.describe(*(part.id_in(scope) for part in doubtful), afresh=True)
    lost = [part.task for part in doubtful if not _is_open(scope, part, descriptions)]
    if lost:
        raise TransactionError(
            f"{batch} is not committed: the transactions of {proof.named(lost)} are no longer open. They "
            "were open for longer than kafka.transaction.timeout.ms, or another run took "
            f"transactional.id.prefix '{scope.prefix}' over"
        )


def _misled(scope: Scope, batch: BatchIdentity, expected: int, number: int) -> TransactionError:
    return TransactionError(
        f"{batch} is not committed: decision {max(number, expected)} was made under "
        f"transactional.id.prefix '{scope.prefix}', but a broker returned nothing after decision "
        f"{min(number, expected)}. Start the query or job again"
    )


def record(
    scope: Scope, driver_epoch: ProducerEpoch, decision: Decision, parts: tuple[Part, ...] = ()
) -> TransactionSteps[Mapping[str, Described]]:
    """Put the decision into the driver's transaction, and check that its predecessor is still the last.

    It also describes the transactions of ``parts``, in the same step.

    A broker that is no longer the group's coordinator cannot accept offsets, but may still return old ones.
    Both requests use one connection, and a broker handles the requests of a connection in turn. So the last
    decision comes from the coordinator that has accepted the new one.
    """
    groups: dict[str, list[tuple[TopicPartition, str]]] = {}
    for index, text in enumerate(decisions.encode(decision, scope.partitions)):
        key = scope.decision_key(index)
        groups.setdefault(key.group, []).append((key.partition, text))
    *results, seen, descriptions, _ = yield (
        *(
            ops.RecordOffsets(scope.driver_id, driver_epoch, group, tuple(entries))
            for group, entries in groups.items()
        ),
        ops.FetchOffsets((scope.decision_key(0).group,)),
        ops.Describe(tuple(part.id_in(scope) for part in parts)),
        # This finds the coordinator that will commit the driver's transaction.
        ops.LookUp((), (scope.driver_id,)),
    )
    for result in results:
        if isinstance(result, ops.Failed):
            raise proof.other_driver(scope, result, f"{decision.batch} is not committed: ")
    head = decisions.newest_head(seen.values())
    last = 0 if head is None else head.number
    if last != decision.number - 1:
        # The coordinator has accepted the offsets, so the driver epoch is still valid.
        raise _misled(scope, decision.batch, decision.number - 1, last)
    return dict(descriptions)
