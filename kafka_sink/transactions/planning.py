"""The driver's side of a write with delivery.guarantee=exactly-once: ``plan``, ``commit`` and ``abort``.

The story of one batch:

1. ``plan`` runs before the tasks. It derives the prefix of all transactional ids from the options, the
   query's id or the application, and takes that prefix over (``driver.take_over``): earlier drivers are
   fenced, a batch that they decided is completed, and everything else that they left open is aborted. What it
   learnt goes to the tasks as a TaskHandover. A micro-batch that follows the one before at once needs no
   request for that: the commit before left a note with the TaskHandover.
2. Each task attempt writes its rows in a transaction of its own and leaves it open (task_attempt.py). It
   reports its transaction and the digest of its rows.
3. ``commit`` gets all reports. It records the decision and commits the tasks' transactions (batch.py,
   driver.py).
4. ``abort`` runs instead if a task failed. It completes the batch if it was decided, and otherwise ends what
   is open.

Spark may create the writer anew for 3 and 4. Then only tasks' reports and the notes of ``spark_application``
connect these functions. All of them block the thread that calls them.
"""

from __future__ import annotations

import hashlib
import math
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kafka_sink import spark_application
from kafka_sink.clock import wall_ms
from kafka_sink.driver import driver_log
from kafka_sink.errors import ConfigurationError, KafkaSinkError
from kafka_sink.model import MetadataUpdate
from kafka_sink.options import SinkOptions
from kafka_sink.options.environment import has_variables
from kafka_sink.process_entries import ProcessEntries
from kafka_sink.transactions import batch as batches
from kafka_sink.transactions import driver
from kafka_sink.transactions.batch import LONG_OPEN, AttemptReport, BatchOutcome, TaskHandover, counted
from kafka_sink.transactions.checkpoint import Location, query_id
from kafka_sink.transactions.decision import BatchIdentity
from kafka_sink.transactions.operations import ProducerEpoch, Scope

if TYPE_CHECKING:
    from kafka_sink.network.client import NetworkClient
    from kafka_sink.transactions.client import KnownBrokers, TransactionClient

_NAME_DIGITS = 16
# Prefixes begin with this if the user has set no transactional.id.prefix.
_DERIVED = "kafka-chunked"
# The name of a query whose checkpoint planning does not learn (spark.sql.streaming.checkpointLocation).
_ANY_QUERY = "-query"
_MAX_IDLE_CLIENTS = 2
# How old the note of a commit may be if planning relies on it. In a longer pause somebody may have run
# kafka-chunked-transactions, which fences the driver: a batch that relies on an old note would fail.
_NOTE_LASTS_S = 60.0


@dataclass(frozen=True)
class PlannedTransactions:
    """The result of planning a write in transactions.

    ``batch`` is None for a stream, whose tasks learn their micro-batch from Spark. ``handover`` is None in a
    writer that only commits, because tasks' reports contain what it needs. ``brokers`` saves tasks and the
    commit from looking brokers up; they do so if it is None or out of date.
    """

    scope: Scope
    batch: BatchIdentity | None = None
    handover: TaskHandover | None = None
    brokers: KnownBrokers | None = None


# Spark's threads take clients and give them back when they plan, commit and abort. Without the lock two
# threads could take the same client and read each other's responses.
_idle_clients: ProcessEntries[dict[SinkOptions, TransactionClient]] = ProcessEntries({})


@contextmanager
def client_of(options: SinkOptions, brokers: KnownBrokers | None = None) -> Iterator[TransactionClient]:
    """Lend a client for this cluster that no other thread uses meanwhile.

    It is closed if the caller's code fails. A new client learns ``brokers``.
    """
    from kafka_sink.transactions.client import TransactionClient

    with _idle_clients.lock:
        client = _idle_clients.entries.pop(_client_key(options), None)
    if client is None:
        client = TransactionClient(options)
    if brokers is not None:
        client.learn(brokers)
    try:
        yield client
    except BaseException:
        client.close()
        raise
    _keep(options, client)


def keep_connections(options: SinkOptions, network: NetworkClient, update: MetadataUpdate) -> None:
    """Let transactions use these connections, over which planning has received this metadata."""
    from kafka_sink.transactions.client import TransactionClient

    client = TransactionClient(options, network)
    client.take_connections(update)
    _keep(options, client)


def _client_key(options: SinkOptions) -> SinkOptions:
    return replace(options.for_tasks(), delivery_guarantee="at-least-once")


def _keep(options: SinkOptions, client: TransactionClient) -> None:
    key = _client_key(options)
    with _idle_clients.lock:
        clients = _idle_clients.entries
        surplus = clients.pop(key, None)
        if surplus is None and len(clients) >= _MAX_IDLE_CLIENTS:
            surplus = clients.pop(next(iter(clients)))
        clients[key] = client
    if surplus is not None:
        surplus.close()


Clients = Callable[..., AbstractContextManager["TransactionClient"]]


def plan(
    options: SinkOptions,
    raw: Mapping[str, str],
    *,
    is_streaming: bool,
    for_tasks: bool,
    is_repeated: bool = False,
    clients: Clients = client_of,
    clock_ms: Callable[[], float] = wall_ms,
) -> PlannedTransactions:
    """Take over the transactional ids of a write with delivery.guarantee=exactly-once.

    ``for_tasks`` is false if Spark creates a writer only to commit. ``is_repeated``: the write is a
    micro-batch, so the one before may have left a note. ``clock_ms`` is the wall clock. Raises
    ConfigurationError if the options do not allow exactly once, BrokerVersionError if brokers are too old,
    and DeliveryError if brokers do not respond.
    """
    name = _scope_name(options, raw, is_streaming=is_streaming)
    topic = options.transaction_progress_topic or options.topic
    if topic is None:
        raise ConfigurationError(
            "delivery.guarantee=exactly-once needs transaction.progress.topic, because rows name their "
            "topics: progress is recorded as offsets of that topic"
        )
    batch = None if is_streaming else _job(options)
    if not for_tasks:
        # Decisions and progress markers are found even if the number of partitions is not known.
        return PlannedTransactions(Scope(name, topic, 1), batch)
    scope, now_ms = Scope(name, topic, 1, options.topic or ""), clock_ms()
    # Nobody else may use the note, even if this planning does not.
    note = spark_application.take_noted(_note_key(options, name), _NOTE_LASTS_S, CommitNote)
    if is_repeated and note is not None and note.holds_for(scope, now_ms, options.metadata_max_age_ms):
        scope, handover, brokers = note.scope, note.handover, None
    else:
        scope, handover, brokers = _take_over(options, scope, clients, clock_ms)
    if batch is not None:
        # This raises before tasks start. Otherwise each task would raise it, and Spark would retry them all.
        handover.role(batch, 0)
    _remember_driver_epoch(scope, handover.driver_epoch)
    return PlannedTransactions(scope, batch, handover, brokers)


def _take_over(
    options: SinkOptions, scope: Scope, clients: Clients, clock_ms: Callable[[], float]
) -> tuple[Scope, TaskHandover, KnownBrokers | None]:
    with clients(options) as client:
        partitions = client.partitions(scope.topic, options.max_block_ms)
        if not partitions:
            raise ConfigurationError(
                f"the topic '{scope.topic}', for which progress is recorded, does not exist: create it"
            )
        scope = replace(scope, partitions=partitions)
        ownership = client.run(driver.take_over(scope, clock_ms), options.max_block_ms)
        protocol = client.protocol
        # With variables in its name, a task's client may get the addresses of another zone.
        brokers = None if has_variables(options.client_id) else client.known
    handover = TaskHandover.of(scope, ownership, clock_ms())
    if options.log_summary:
        _report_names(scope, protocol)
    _report_takeover(scope, ownership, handover)
    return scope, handover, brokers


def commit(
    options: SinkOptions,
    planned: PlannedTransactions,
    reports: Sequence[AttemptReport],
    clients: Clients = client_of,
    clock_ms: Callable[[], float] = wall_ms,
) -> BatchOutcome:
    """Decide and complete a batch. Raises TransactionError, IncompleteBatchError, or DeliveryError."""
    with clients(options, planned.brokers) as client:
        steps = batches.commit(reports, compare=options.transaction_rerun_compare)
        outcome = client.run(steps, options.delivery_timeout_ms, "kafka.delivery.timeout.ms")
        # A broker that did not respond may know of open transactions. With protocol 1, a group's coordinator
        # may show a decision some time after the commit, and then also offsets that were recorded meanwhile.
        is_sure = client.protocol == 2 and not client.left_out
        next_handover = outcome.next_handover if is_sure else None
    if next_handover is not None:
        note = CommitNote(reports[0].run.scope, next_handover)
        spark_application.note(_note_key(options, note.scope.prefix), note)
    if planned.batch is not None:
        spark_application.forget(_taken_key(planned.scope.prefix))
    if outcome.doubt:
        driver_log.warn(f"kafka-chunked: {outcome.doubt}")
    # The two times are by two hosts' clocks, so their difference is good enough only for a warning.
    open_ms = clock_ms() - outcome.began_ms
    if outcome.began_ms >= 0 and open_ms > LONG_OPEN * options.transaction_timeout_ms:
        driver_log.warn(
            f"kafka-chunked: the batch's first transaction was open for {open_ms / 1000:.0f} s, and brokers "
            f"abort one after kafka.transaction.timeout.ms = {options.transaction_timeout_ms} ms: raise the "
            "option, or make batches smaller"
        )
    return outcome


def abort(options: SinkOptions, planned: PlannedTransactions, clients: Clients = client_of) -> BatchOutcome:
    """End a failed batch's open transactions, or complete it if it was decided; returns how many of each.

    If another driver has taken over, it does this instead. Raises what ``plan`` raises.
    """
    # The commit may have failed after it had left a note, whose epoch ends here.
    spark_application.forget(_note_key(options, planned.scope.prefix))
    driver_epoch = _remembered_driver_epoch(planned)
    if driver_epoch is None:
        return BatchOutcome()
    with clients(options, planned.brokers) as client:
        ownership = client.run(driver.abort(planned.scope, driver_epoch, wall_ms), options.max_block_ms)
    if ownership is None:
        return BatchOutcome()
    _remember_driver_epoch(planned.scope, ownership.driver_epoch)
    return BatchOutcome(committed=ownership.completed, aborted=ownership.aborted)


def abort_or_explain(
    options: SinkOptions, planned: PlannedTransactions, clients: Clients = client_of
) -> tuple[dict[str, int], str]:
    """Abort a write that has failed, and return the counts of ended transactions and a note for the log.

    It does what ``abort`` does, but raises no KafkaSinkError: the note then says why the abort failed.
    """
    try:
        ended = abort(options, planned, clients)
    except KafkaSinkError as error:
        return {}, (
            f"its open transactions could not be aborted: {error}. The next run aborts them, or brokers do "
            "so after kafka.transaction.timeout.ms. Until then, consumers with "
            "isolation.level=read_committed wait"
        )
    note = counted(ended.aborted, "aborted")
    if ended.committed:
        note += "; " + counted(ended.committed, "committed, because the batch was decided")
    return ended.transactions, note


@dataclass(frozen=True)
class CommitNote:
    """A note from a commit to the planning of the next micro-batch, often in another process of the driver.

    Nothing of the batch is open, and ``handover`` has the driver epoch that the decision's EndTxn returned.
    No other driver has had this epoch, so it protects the next decision as one from ``take_over`` does. Only
    one planning may use it: two drivers with one epoch would both be able to decide.
    """

    scope: Scope
    handover: TaskHandover

    def holds_for(self, scope: Scope, now_ms: float, max_age_ms: float) -> bool:
        """Whether planning may use it for this writer, whose number of partitions it does not know.

        At least every ``max_age_ms`` planning looks at brokers that have joined and partitions that are new.
        """
        is_same = replace(self.scope, partitions=scope.partitions) == scope
        return is_same and 0 <= now_ms - self.handover.taken_over_ms < max_age_ms


def _note_key(options: SinkOptions, prefix: str) -> str:
    return f"transactional.id.prefix {prefix} at {options.bootstrap_servers} is committed"


def _scope_name(options: SinkOptions, raw: Mapping[str, str], *, is_streaming: bool) -> str:
    """The beginning of all names of one writer: transactional.id.prefix and digits that identify the writer.

    Planning can read a query's id only if its checkpoint is on this host. Otherwise the location of the
    checkpoint is used instead.
    """
    if is_streaming and options.txn_app_id:
        raise ConfigurationError(
            "txnAppId and txnVersion are only for df.write and foreachBatch: remove them, because a "
            "streaming query identifies its batches itself"
        )
    prefix = options.transactional_id_prefix
    if options.txn_app_id:
        return f"{prefix or _DERIVED}-{_digits(options.txn_app_id, options.topic or '')}"
    if not is_streaming:
        return f"{prefix}-job" if prefix else _job_name()
    checkpoint = raw.get("checkpointlocation") or raw.get("checkpointLocation")
    if not checkpoint:
        if prefix:
            return prefix + _ANY_QUERY
        raise ConfigurationError(
            "delivery.guarantee=exactly-once needs transactional.id.prefix, or the option "
            "checkpointLocation, from which it can be derived"
        )
    query = query_id(checkpoint, is_required=not prefix)
    names = ("query", query) if query is not None else Location.of(checkpoint)
    return f"{prefix or _DERIVED}-{_digits(*names)}"


def _job_name() -> str:
    """Choose a name for a job that has none: one of its application's names that no running job has taken.

    A job that failed keeps its name, because its transactions may be incomplete. Without a folder, nobody
    knows which names are taken, and a job with another's name would end that job's transactions.
    """
    application, number = _digits(spark_application.folder()), 0
    while (is_free := spark_application.claim(_taken_key(f"{_DERIVED}-{application}-{number}"))) is False:
        number += 1
    if is_free is None:
        application = _digits(uuid.uuid4().hex)
    return f"{_DERIVED}-{application}-{number}"


def _taken_key(prefix: str) -> str:
    return f"transactional.id.prefix {prefix} is taken"


def _digits(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:_NAME_DIGITS]


def _job(options: SinkOptions) -> BatchIdentity:
    if options.txn_app_id:
        return BatchIdentity.of_application(options.txn_app_id, options.topic or "", options.txn_version)
    return BatchIdentity.of_unnamed_job()


def _remember_driver_epoch(scope: Scope, driver_epoch: ProducerEpoch) -> None:
    """Note the driver epoch for an abort without reports: it shows whether another driver took over."""
    spark_application.note(_driver_epoch_key(scope), driver_epoch)


def _remembered_driver_epoch(planned: PlannedTransactions) -> ProducerEpoch | None:
    if planned.handover is not None:
        return planned.handover.driver_epoch
    return spark_application.noted_within(_driver_epoch_key(planned.scope), math.inf, ProducerEpoch)


def _driver_epoch_key(scope: Scope) -> str:
    return f"transactional.id.prefix {scope.prefix} is owned by"


def _report_names(scope: Scope, protocol: int) -> None:
    """Log the prefix once in an application, for operators who look for the transactions it has left open."""
    key = f"transactional.id.prefix {scope.prefix} is reported"
    if not spark_application.first_time(key):
        return
    relies_on = ""
    if protocol == 1:
        # This is the first part of KIP-890, see docs/exactly-once-proof.md. Brokers have it on by default.
        relies_on = (
            ". As transaction.version is below 2, it relies on "
            "transaction.partition.verification.enable=true on all brokers"
        )
    driver_log.report(
        f"kafka-chunked: writes exactly once under transactional.id.prefix '{scope.prefix}', and records "
        f"progress for topic '{scope.topic}'{relies_on}"
    )


def _report_takeover(scope: Scope, ownership: driver.Ownership, handover: TaskHandover) -> None:
    if ownership.completed or ownership.aborted:
        driver_log.warn(
            f"kafka-chunked: an earlier run with transactional.id.prefix '{scope.prefix}' had left "
            f"transactions open: {ownership.completed} committed, because their batch was decided, and "
            f"{ownership.aborted} aborted"
        )
    if handover.incomplete is not None:
        driver_log.error(f"kafka-chunked: {handover.incomplete.problem}")
    elif ownership.decision is not None and ownership.missing:
        driver_log.warn(
            f"kafka-chunked: {ownership.decision.batch} was decided but counts as not written, because "
            "brokers aborted all its transactions after kafka.transaction.timeout.ms, or because somebody "
            "ran 'kafka-chunked-transactions rewrite'. It is written when it is run again"
        )
