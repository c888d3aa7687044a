"""One batch from planning to commit: what tasks are given, what they report, and what the commit does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from kafka_sink.errors import ChangedBatchError, IncompleteBatchError, TransactionError
from kafka_sink.transactions import decision as decisions
from kafka_sink.transactions import driver, proof
from kafka_sink.transactions.decision import (
    BatchIdentity,
    Decision,
    LastDecision,
    Part,
    RowsDigest,
    WrittenNumbers,
)
from kafka_sink.transactions.driver import Ownership
from kafka_sink.transactions.operations import ProducerEpoch, Scope, TransactionSteps

# The sink warns of a transaction that has been open for more than this share of kafka.transaction.timeout.ms.
LONG_OPEN = 0.5


class TaskRole(Enum):
    """How a task treats its rows. With SKIP, they were written before and are only compared."""

    WRITE = "write"
    SKIP = "skip"


@dataclass(frozen=True, slots=True)
class Incomplete:
    """A decided batch of which readers see only a part; ``problem`` is the message for the user.

    ``batch`` is the batch whose own tasks can complete it, or None if no task may.
    """

    batch: BatchIdentity | None
    missing: frozenset[int]
    problem: str


@dataclass(frozen=True, slots=True)
class BatchRun:
    """The facts that all tasks of a job or micro-batch report alike: their batch and planning's handover.

    ``scope`` says where the tasks' progress markers are. The commit may run in another process, which may see
    more partitions of the topic by then.
    """

    batch: BatchIdentity
    scope: Scope
    handover: TaskHandover

    @property
    def is_repair(self) -> bool:
        """Whether the batch was decided before, and only the tasks whose parts are missing write."""
        return self.handover.incomplete is not None


@dataclass(frozen=True, slots=True)
class TaskHandover:
    """The handover from planning to tasks: the decision's driver epoch, and a summary of the last decision.

    ``taken_over_ms`` is when planning last took the ids over, by the driver's clock.
    """

    driver_epoch: ProducerEpoch
    last: LastDecision = field(default_factory=LastDecision)
    incomplete: Incomplete | None = None
    taken_over_ms: int = -1

    @classmethod
    def of(cls, scope: Scope, ownership: Ownership, now_ms: float) -> TaskHandover:
        """Take only what tasks need: the owner's decision may list thousands of transactions."""
        decision, broken = ownership.decision, None
        problem = driver.problem_of(scope, ownership)
        if problem is not None and decision is not None:
            # If the outcome is unknown, the rows may be there, so not even the batch's own tasks may write.
            batch = None if ownership.unknown else decision.batch
            broken = Incomplete(batch, ownership.missing, problem)
        last = LastDecision() if decision is None else decision.summary
        return cls(ownership.driver_epoch, last, broken, round(now_ms))

    def role(self, batch: BatchIdentity, task: int, *, in_query: bool = False) -> TaskRole:
        """Return what a task does with its rows of this batch.

        ``in_query``: the version is the number of a micro-batch, because the write runs in foreachBatch.
        Raises IncompleteBatchError if another batch must be completed first, and ChangedBatchError if this
        batch cannot be the one that has its number.
        """
        if self.incomplete is not None:
            if batch != self.incomplete.batch:
                raise IncompleteBatchError(self.incomplete.problem)
            return TaskRole.WRITE if task in self.incomplete.missing else TaskRole.SKIP
        writer, written = self.last.writer, self.last.written
        if batch.writer != writer:
            if writer and batch.number:
                raise ChangedBatchError(_not_its_own(batch, writer))
            return TaskRole.WRITE
        if (in_query or batch.is_of_query) and batch.number < written.highest:
            raise ChangedBatchError(_went_back(batch, written))
        if batch.number in written:
            return TaskRole.SKIP
        if batch.number <= written.forgotten:
            # The version is so old that no record shows whether it was written.
            raise ChangedBatchError(
                f"it is not known whether {batch} was written before: only these versions of its application "
                f"are recorded: {written}. Nothing is written. If it was not written, use another txnAppId. "
                f"{_SEE}"
            )
        return TaskRole.WRITE


@dataclass(frozen=True, slots=True)
class AttemptReport:
    """A finished task's report to the commit. ``part`` is None if the task began no transaction.

    ``began_ms`` is a time shortly before the transaction began, by the task's clock.
    """

    run: BatchRun
    task: int
    role: TaskRole
    digest: RowsDigest
    part: Part | None
    began_ms: int = -1


@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """The result of the commit, or the abort, of a batch.

    ``skipped`` is how many rows of ``batch`` were not written, because the batch was written before; None if
    it was not. ``compared``: the rows are known to be the same. ``repaired``: an incomplete batch was
    completed. ``doubt`` says why the batch may be there twice, or is "" if it cannot be.

    ``committed`` and ``aborted`` count transactions. ``began_ms`` is when the first of the committed
    transactions began, by its task's clock, or -1 if there is none. ``next_handover`` is what planning would
    give to the tasks of the next batch if no other driver takes over before; None if planning has to look.
    """

    skipped: int | None = None
    batch: BatchIdentity | None = None
    compared: bool = False
    committed: int = 0
    aborted: int = 0
    began_ms: int = -1
    repaired: bool = False
    doubt: str = ""
    next_handover: TaskHandover | None = None

    @property
    def transactions(self) -> dict[str, int]:
        return {"committed": self.committed, "aborted": self.aborted}

    @property
    def outcome(self) -> str:
        return "committed" if self.skipped is None else "skipped"

    @property
    def note(self) -> str:
        """The note for the log line of the write."""
        return str(self) if self.skipped is None else f"{self.batch}: {self}"

    def __str__(self) -> str:
        if self.skipped is not None:
            text = f"its {self.skipped:,} rows are skipped, because it was written before"
            text += " with the same rows" if self.compared else "; it is not known whether with the same rows"
        else:
            done = "committed to complete the batch" if self.repaired else "committed"
            text = counted(self.committed, done)
        if self.aborted:
            text += "; " + counted(self.aborted, "of other attempts aborted")
        return text


def counted(count: int, what: str) -> str:
    """Count transactions for a line of text: "2 transactions aborted"."""
    return f"{count:,} transaction{'' if count == 1 else 's'} {what}"


def commit(reports: Sequence[AttemptReport], *, compare: str = "content") -> TransactionSteps[BatchOutcome]:
    """Decide and complete the batch that these tasks have written.

    ``compare`` is what must be the same if the batch was written before: "content", "rows" or "none". Raises
    TransactionError if nothing is committed, IncompleteBatchError if only a part is committed, and
    ChangedBatchError if the batch was written before with other rows.
    """
    if not reports:
        raise TransactionError("no task has reported what it wrote, so nothing is committed")
    run = _agreed(reports)
    driver_epoch, last = run.handover.driver_epoch, run.handover.last
    parts = tuple(report.part for report in reports if report.part is not None)
    roles = {report.role for report in reports}
    # An empty version is recorded as written. So is the empty first batch of a new query: otherwise the
    # query's next batch would find another writer's decision and be refused.
    records_empty = run.batch.is_of_application or last.writer not in ("", run.batch.writer)
    if not parts and not records_empty and not run.is_repair and roles == {TaskRole.WRITE}:
        return BatchOutcome()
    previous = None
    if run.is_repair or TaskRole.SKIP in roles:
        previous = yield from driver.read_last(run.scope, driver_epoch, run.batch, last.number)
    if run.is_repair:
        try:
            incomplete = _repairable(run.batch, previous, reports)
        except IncompleteBatchError:
            # If another driver has taken over, what this one read is out of date: its advice would do harm.
            yield from proof.require_owner(run.scope, driver_epoch)
            raise
        decision = decisions.repaired(run.scope, incomplete, parts)
    elif TaskRole.SKIP in roles:
        return _skipped(run, previous, reports, compare)
    else:
        decision = decisions.next_decision(run.scope, last, run.batch, len(reports), parts)
    began = (report.began_ms for report in reports if report.part is not None)
    # The take-over comes before every transaction of the batch, so a time before it comes from a host whose
    # clock is wrong. It would make the markers look older than they are.
    taken_over_ms = run.handover.taken_over_ms
    decision = replace(decision, began_ms=max(min(began, default=taken_over_ms), taken_over_ms))
    aborted, next_epoch = yield from driver.decide(run.scope, driver_epoch, decision, parts)
    next_handover = None
    if next_epoch is not None:
        next_handover = replace(run.handover, driver_epoch=next_epoch, last=decision.summary, incomplete=None)
    return BatchOutcome(
        committed=len(parts),
        aborted=aborted,
        began_ms=decision.began_ms if parts else -1,
        repaired=run.is_repair,
        doubt=_doubt(run.batch, last) if parts else "",
        next_handover=next_handover,
    )


def _skipped(
    run: BatchRun, previous: Decision | None, reports: Sequence[AttemptReport], compare: str
) -> BatchOutcome:
    """Raise ChangedBatchError if a batch that was written before had other rows or another topic."""
    batch = run.batch
    if previous is None or not previous.covers(batch):
        raise TransactionError(
            f"{batch} was recorded as written when this run started, but no longer is. Start the query or "
            "job again"
        )
    given = RowsDigest.total(report.digest for report in reports)
    written = None if compare == "none" else previous.numbers_up_to(batch.number)
    if written is not None:
        if given.rows and written.target != run.scope.target:
            raise ChangedBatchError(_elsewhere(batch, written.target, run.scope.target))
        differs = given.rows != written.digest.rows if compare == "rows" else given != written.digest
        if differs:
            raise ChangedBatchError(_changed(batch, written.digest, given))
    return BatchOutcome(skipped=given.rows, batch=batch, compared=written is not None)


def _agreed(reports: Sequence[AttemptReport]) -> BatchRun:
    tasks = {report.task for report in reports}
    if len(tasks) != len(reports):
        raise TransactionError("two tasks report the same partition of the job")
    agreed = {report.run for report in reports}
    if len(agreed) != 1:
        raise TransactionError("tasks of different runs report to one commit")
    return agreed.pop()


def _repairable(
    batch: BatchIdentity, previous: Decision | None, reports: Sequence[AttemptReport]
) -> Decision:
    """The decision to repair. Raises IncompleteBatchError if these are not the tasks of that decision."""
    if previous is None or previous.batch != batch:
        raise TransactionError(
            f"another run has replaced the decision of {batch} since this run started. Start the query or "
            "job again"
        )
    changed = len(reports) != previous.tasks or any(
        report.digest != previous.digest_of(report.task) for report in reports
    )
    scope = reports[0].run.scope
    if previous.target != scope.target:
        raise IncompleteBatchError(
            f"{batch} is incomplete in {_named(previous.target)}, and this run writes to "
            f"{_named(scope.target)}: nothing was written. Run it again with the topic that it had before"
        )
    if changed:
        missing = [report.task for report in reports if report.role is TaskRole.WRITE]
        raise IncompleteBatchError(
            f"{proof.incomplete(scope, previous, missing)}. This run split the rows "
            f"into other tasks ({len(reports)} instead of {previous.tasks}) or had other rows, so it cannot "
            "find out which rows are missing. Nothing was written"
        )
    return previous


_SEE = "See 'A batch that has changed' in docs/exactly-once.md"


def _changed(batch: BatchIdentity, written: RowsDigest, given: RowsDigest) -> str:
    """The message for a batch that was written before and is run again with other rows."""
    if (written.rows, written.size) == (given.rows, given.size):
        how = f"this run has other rows: {given.rows:,} of the same size"
    else:
        how = f"this run has {given.rows:,} of {given.size:,} bytes"
    if batch.is_of_query:
        why = (
            "Either the checkpoint has lost that batch, and Spark planned another one under its number: "
            "restore the checkpoint, or start the query with a new one after the rows that were written. Or "
            "the query computes other values in each run, such as uuid(), or its source has changed"
        )
    else:
        why = (
            "Either another write uses the same txnAppId and txnVersion: give each write a txnAppId of its "
            "own, including the writes of one foreachBatch, and a new one with a new checkpoint. Or the job "
            "computes other values in each run, such as uuid(), or its source has changed"
        )
    return (
        f"{batch} was written before with {written.rows:,} rows of {written.size:,} bytes, and {how}. "
        f"Nothing is written. {why}: transaction.rerun.compare=rows compares only the number of rows, and "
        f"'none' compares nothing. {_SEE}"
    )


def _elsewhere(batch: BatchIdentity, target: str, now: str) -> str:
    """The message for a batch that was written before to another topic than this run's."""
    return (
        f"{batch} was written before to {_named(target)}, but this run would write it to {_named(now)}. "
        "Nothing is written. If this is a copy of another query's checkpoint, it counts as the same query: "
        "give it a transactional.id.prefix of its own. If the query's topic was changed on purpose, set "
        "transaction.rerun.compare=none for one run: it skips this batch, whose rows stay where they are. "
        f"{_SEE}"
    )


def _named(target: str) -> str:
    return f"topic '{target}'" if target else "the topics that its rows name"


def _went_back(batch: BatchIdentity, written: WrittenNumbers) -> str:
    """The message for a micro-batch below the last one that was written. Spark never plans one by itself."""
    return (
        f"{batch} comes after batch {written.highest} was written, and Spark does not go back by itself: the "
        "checkpoint was rewound or deleted or has lost files, so its numbers may stand for other rows. "
        "Nothing is written. Restore the checkpoint, or start the query on a new one"
        f"{'' if batch.is_of_query else ' with another txnAppId'}. {_SEE}"
    )


def _not_its_own(batch: BatchIdentity, other: str) -> str:
    """The message for a query that has written before, under a name that another query has used since."""
    return (
        f"it is not known which batches of {batch.writer} were written before, because {other} has written "
        "under the same name since. Nothing is written. Give each query a transactional.id.prefix of its "
        f"own. {_SEE}"
    )


def _doubt(batch: BatchIdentity, last: LastDecision) -> str:
    """The message for a query that may have written batches of which nothing is recorded under this name."""
    if batch.is_of_query and not last.number and batch.number:
        return (
            f"{batch} is the first batch that is recorded under this name. It may be there twice if it was "
            "written before its checkpoint was moved or transactional.id.prefix was changed, or longer ago "
            "than offsets.retention.minutes. It is there once if earlier batches had no rows or another "
            "delivery.guarantee"
        )
    if batch.is_of_query and last.number and last.writer != batch.writer:
        return (
            f"{batch} is written under a name that {last.writer} used before. It may be there twice if it "
            "was already written before that and its checkpoint was restored. Set the option "
            "checkpointLocation, or a transactional.id.prefix for each query"
        )
    return ""
