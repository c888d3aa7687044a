"""A task attempt with a producer and connections. Its transaction begins with its first row."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa

from kafka_sink.clock import monotonic_ms, wall_ms
from kafka_sink.errors import IncompleteBatchError, KafkaSinkError, TransactionError
from kafka_sink.transactions import operations as ops
from kafka_sink.transactions.batch import LONG_OPEN, AttemptReport, BatchRun, TaskHandover, TaskRole
from kafka_sink.transactions.client import PROTOCOL_1, TransactionClient
from kafka_sink.transactions.decision import BatchIdentity, Part, RowsDigest
from kafka_sink.transactions.digest import RunningDigest
from kafka_sink.transactions.operations import Described, ProducerEpoch, Scope, TransactionSteps

_log = logging.getLogger(__name__)
# How long the first rows wait for the progress marker at most. Coordinators of transactions need less.
_HEAD_START_MS = 20.0
# How long the abort of a failed attempt may take. The driver ends transactions that stay open after that.
_ABORT_MS = 5000.0
# Kafka's own producer has these names, see docs/metrics.md.
INIT_TIME_METRIC = "txn-init-time-ns-total"
SEND_OFFSETS_TIME_METRIC = "txn-send-offsets-time-ns-total"


# A producer's method. Its parameters: transactional id, producer id, epoch, whether to add partitions to it.
BeginTransaction = Callable[[str, int, int, bool], None]


class TaskAttempt:
    """One attempt of one task. The task's thread and the thread that reads the task's rows use it."""

    def __init__(  # noqa: PLR0913 - what planning handed over, and which attempt this is
        self,
        client: TransactionClient,
        scope: Scope,
        handover: TaskHandover,
        batch: BatchIdentity,
        task: int,
        attempt: int,
        columns: Sequence[int | None],
        timeout_ms: float,
        transaction_timeout_ms: float = math.inf,
        *,
        in_query: bool = False,
    ) -> None:
        try:
            self.role = handover.role(batch, task, in_query=in_query)
        except IncompleteBatchError:
            # If another driver has taken over, what planning read is out of date: its advice would do harm.
            client.run(require_driver_epoch(scope, handover.driver_epoch), timeout_ms)
            raise
        # The thread that reads rows begins the transaction, and the task's thread aborts it after a failure.
        # Both use the client and write _producer and _slot. Without the lock an abort could come before the
        # begin is complete, and leave a transaction open that readers wait for.
        self._lock = threading.Lock()
        self._client = client
        self._scope = scope
        self._handover = handover
        self._batch = batch
        self._task = task
        self._slot = attempt
        self._digest = RunningDigest(columns if batch.is_named else ())
        self._timeout_ms = timeout_ms
        self._transaction_timeout_ms = transaction_timeout_ms
        # When the transaction began, by the monotonic clock, until a warning that it is open for long.
        self._open_since_ms = math.inf
        self._producer: ProducerEpoch | None = None
        self._marking: TransactionSteps[None] | None = None
        self._began_ms = -1
        # Kafka's names; they are added to the producer's metrics.
        self.metrics: dict[str, float] = {}

    @property
    def writes(self) -> bool:
        return self.role is TaskRole.WRITE

    def take(self, batch: pa.RecordBatch, begin_transaction: BeginTransaction | None = None) -> bool:
        """Add rows to the digest, and return whether they are to be written: only then ``begin_transaction``
        is needed, as the transaction begins before the first row."""
        if self.writes and batch.num_rows:
            assert begin_transaction is not None
            self.begin(begin_transaction)
        self._digest.update(batch)
        self.warn_if_open_long(monotonic_ms())
        return self.writes

    def warn_if_open_long(self, now_ms: float) -> None:
        """Log a warning, once, if brokers may soon abort the transaction."""
        open_ms = now_ms - self._open_since_ms
        if open_ms > self._transaction_timeout_ms * LONG_OPEN:
            self._open_since_ms = math.inf
            _log.warning(
                "kafka-chunked: this task's transaction has been open for %.0f s. Brokers abort a "
                "transaction after kafka.transaction.timeout.ms = %.0f ms, and then nothing of the batch is "
                "committed: all tasks must end before that. Raise it, up to the brokers' "
                "transaction.max.timeout.ms, or cut the job into several writes: see 'Jobs longer than a "
                "transaction' in docs/exactly-once.md",
                open_ms / 1000,
                self._transaction_timeout_ms,
            )

    def begin(self, begin_transaction: BeginTransaction) -> None:
        """Begin the transaction, unless it has begun."""
        with self._lock:
            if self._producer is None:
                steps = begin_steps(self._scope, self._handover.driver_epoch, self._task, self._slot)
                self._began_ms = round(wall_ms())
                began = time.monotonic_ns()
                self._slot, self._producer = self._client.run(steps, self._timeout_ms)
                self.metrics[INIT_TIME_METRIC] = time.monotonic_ns() - began
                name = self._scope.task_id(self._task, self._slot)
                self._open_since_ms = monotonic_ms()
                part = Part(self._task, self._slot, self._producer, RowsDigest())
                self._marking = mark_steps(self._scope, self._handover.driver_epoch, self._batch, part)
                adds_partitions = self._client.protocol == PROTOCOL_1
                if not adds_partitions:
                    # While the transaction's coordinator adds a part to it, it rejects others. A marker that
                    # is rejected costs a round trip, so it goes ahead of the first rows.
                    self._client.start(self._marking, _HEAD_START_MS, self._timeout_ms)
                begin_transaction(name, *self._producer, adds_partitions)

    def mark(self) -> None:
        """Make sure that the progress marker is in the transaction. Raises TransactionError."""
        if self._marking is not None:
            began = time.monotonic_ns()
            self._client.run(self._marking, self._timeout_ms)
            self.metrics[SEND_OFFSETS_TIME_METRIC] = time.monotonic_ns() - began

    def finish(self) -> AttemptReport:
        """Report the transaction, after all rows are acknowledged and ``mark`` has returned."""
        digest = self._digest.result()
        part = None
        if self._producer is not None:
            part = Part(self._task, self._slot, self._producer, digest)
        run = BatchRun(self._batch, self._scope, self._handover)
        return AttemptReport(run, self._task, self.role, digest, part, self._began_ms)

    def abort(self) -> None:
        """Abort after a failure, so that readers do not wait. It never raises KafkaSinkError."""
        with self._lock:
            if self._producer is None:
                return
            try:
                name = self._scope.task_id(self._task, self._slot)
                self._client.run(abort_steps(name, self._producer), _ABORT_MS)
            except KafkaSinkError:
                pass  # the driver's abort, the next run or the broker's timeout ends it


# An attempt whose slot is taken tries further slots, each _NEXT_SLOT after the one before, _MAX_SLOTS in all.
_NEXT_SLOT = 1000
_MAX_SLOTS = 16


def begin_steps(
    scope: Scope, driver_epoch: ProducerEpoch, task: int, attempt: int
) -> TransactionSteps[tuple[int, ProducerEpoch]]:
    """Begin a transaction; returns the slot, and the producer id and epoch to write with.

    Each attempt first tries the slot of its own number, so a late attempt ends no transaction of another
    attempt of its batch. If Spark runs a stage again, it counts the attempts from 0 once more. So an attempt
    that finds an open transaction in its slot takes another slot; planning has left none open. Raises
    TransactionError for an attempt of an older batch, because the driver's epoch has changed.
    """
    for slot in range(attempt, attempt + _MAX_SLOTS * _NEXT_SLOT, _NEXT_SLOT):
        name = scope.task_id(task, slot)
        descriptions, _ = yield (
            ops.Describe((scope.driver_id, name)),
            ops.LookUp((scope.marker_key(task).group,)),
        )
        yield from require_driver_epoch(scope, driver_epoch, descriptions)
        if name not in descriptions or descriptions[name].state != ops.OPEN:
            return slot, (yield from ops.init_producer(name))
    raise TransactionError(f"attempt {attempt} of task {task} has {_MAX_SLOTS} transactions open already")


def mark_steps(
    scope: Scope, driver_epoch: ProducerEpoch, batch: BatchIdentity, part: Part
) -> TransactionSteps[None]:
    """Put the progress marker into the transaction. Rows may be on their way meanwhile.

    A late attempt, whose batch was committed without it, raises TransactionError here and aborts its
    transaction, because nobody else might end it. Two facts make sure of that. The commit raises the driver
    epoch first, and then lists what it has to abort. And the driver epoch is described here when the list
    already contains this attempt: with protocol 2 since it took its id over, with protocol 1 since the marker
    is in the transaction. So either the list came later and contained the attempt, or the description shows
    the raised epoch.
    """
    key, name = scope.marker_key(part.task), part.id_in(scope)
    marker = ops.RecordOffsets(
        name, part.producer, key.group, ((key.partition, batch.progress_marker(part)),)
    )
    failed, driver = yield (marker, ops.Describe((scope.driver_id,)))
    if isinstance(failed, ops.Failed):
        raise TransactionError(
            f"the transaction '{name}' is no longer this task's ({failed.error}): it was open for longer "
            "than kafka.transaction.timeout.ms, or another attempt or run took its place"
        )
    if not all(described.ends_raise_epoch for described in driver.values()):
        driver = {}
    yield from require_driver_epoch(scope, driver_epoch, driver)


def abort_steps(transactional_id: str, producer: ProducerEpoch) -> TransactionSteps[None]:
    yield (ops.EndTransaction(transactional_id, producer, commit=False),)


def require_driver_epoch(
    scope: Scope, driver_epoch: ProducerEpoch, described: Mapping[str, Described] | None = None
) -> TransactionSteps[None]:
    """Raise TransactionError if the driver no longer has this epoch. ``described`` may describe it."""
    driver = (described or {}).get(scope.driver_id)
    if driver is not None and driver.producer == driver_epoch:
        return
    # That description may come from a former coordinator.
    driver = (yield from ops.describe(scope.driver_id, afresh=True)).get(scope.driver_id)
    if driver is not None and driver.producer == driver_epoch:
        return
    raise TransactionError(
        f"this attempt is too late: its batch was decided without it, or another driver uses "
        f"transactional.id.prefix '{scope.prefix}'"
    )
