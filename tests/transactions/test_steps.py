"""Single courses of the protocol on the model of Kafka, step by step: one for each hole that was found."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from kafka_sink.errors import ChangedBatchError, DeliveryError, IncompleteBatchError, TransactionError
from kafka_sink.model import EndedTransactions
from kafka_sink.transactions import __main__ as command
from kafka_sink.transactions import batch as batches
from kafka_sink.transactions import driver, proof, task_attempt
from kafka_sink.transactions.batch import AttemptReport, TaskHandover, TaskRole
from kafka_sink.transactions.decision import BatchIdentity, Part, RowsDigest
from kafka_sink.transactions.operations import (
    LAST_EPOCH,
    Described,
    EndTransaction,
    Failed,
    InitProducer,
    Operation,
    ProducerEpoch,
    Scope,
    Steps,
)
from tests.support.transactions_of_kafka import Kafka, NotYet, Produce

SCOPE = Scope("q", "t", 2)
PROTOCOLS = (1, 2)


class Died(Exception):
    """The process did, before an operation."""


class Cluster:
    """Runs steps to their end, markers without delay."""

    def __init__(self, protocol: int = 2) -> None:
        self.kafka = Kafka(protocol=protocol)

    def run(self, steps: Steps[Any], die_before: Callable[[Operation], bool] | None = None) -> Any:
        """The steps' result. Raises what they raise, and Died."""
        answers: Any = None
        while True:
            try:
                wanted = steps.send(answers)
            except StopIteration as stop:
                return stop.value
            answers = tuple(self._answer(one, die_before) for one in wanted)

    def _answer(self, operation: Operation, die_before: Callable[[Operation], bool] | None) -> Any:
        if die_before is not None and die_before(operation):
            raise Died
        while True:
            try:
                answer = self.kafka.execute(operation)
            except NotYet:
                self.settle()
                for name in self.kafka.late_offsets():
                    self.kafka.tell_offsets(name)
                continue
            self.settle()
            return answer

    def settle(self) -> None:
        for name in self.kafka.pending_markers():
            self.kafka.write_markers(name)

    def plan(self, scope: Scope = SCOPE) -> TaskHandover:
        return TaskHandover.of(scope, self.run(driver.take_over(scope, self.kafka.now_ms)), self.kafka.now_ms)

    def write(
        self,
        handover: TaskHandover,
        number: int,
        index: int,
        *rows: int,
        attempt: int = 0,
        scope: Scope = SCOPE,
        app: str | None = None,
        query: str = "one",
    ) -> AttemptReport:
        """One attempt of a task, with these rows; of a query's batch, or of an application's job."""
        batch = BatchIdentity.of_query(query, number)
        if app is not None:
            batch = BatchIdentity.of_application(app, scope.topic, number)
        digest = digest_of(*rows)
        role = handover.role(batch, index)
        slot, producer = self.run(task_attempt.begin_steps(scope, handover.driver_epoch, index, attempt))
        taken = self.kafka.execute(
            Produce(scope.task_id(index, slot), producer, tuple((number, r) for r in rows))
        )
        assert taken
        self.run(task_attempt.finish_steps(scope, handover.driver_epoch, batch, index, slot, producer))
        part = Part(index, slot, producer, digest)
        return AttemptReport(handover.run(scope, batch), index, role, digest, part)

    def commit(self, *reports: AttemptReport, die_before: Callable[[Operation], bool] | None = None) -> Any:
        return self.run(batches.commit(reports, records_empty=False), die_before)


def digest_of(*rows: int) -> RowsDigest:
    return RowsDigest(len(rows), len(rows), hash(rows) & 0xFFFF)


def ends_task(index: int) -> Callable[[Operation], bool]:
    """Whether an operation commits this task's transaction."""

    def ends(one: Operation) -> bool:
        return isinstance(one, EndTransaction) and one.transactional_id.startswith(f"q-task-{index}-")

    return ends


def test_markers_of_a_batchs_first_writing_do_not_stand_for_its_second() -> None:
    """Catches: rows lost, of a batch that was written again after ``rewrite`` and decided by a driver that
    died then: the next run took the first writing's progress markers for the second's and aborted what was
    decided."""
    cluster = Cluster()
    run = cluster.plan()
    reports = [cluster.write(run, 0, 0, 0, 1), cluster.write(run, 0, 1, 2)]
    with pytest.raises(Died):
        cluster.commit(*reports, die_before=ends_task(1))
    cluster.kafka.time_out(SCOPE.task_id(1, 0))
    broken = cluster.run(driver.take_over(SCOPE, 0))
    assert broken.missing == {1}
    assert broken.completed == (), "what the first run committed was not left open, and the rest is lost"
    cluster.run(driver.resolve(SCOPE, broken.driver_epoch, broken.decision, rewrite=True))

    run = cluster.plan()
    reports = [cluster.write(run, 0, 0, 2), cluster.write(run, 0, 1, 0, 1)]
    with pytest.raises(Died):
        cluster.commit(*reports, die_before=ends_task(0))
    found = cluster.run(driver.take_over(SCOPE, 0))
    assert (len(found.completed), found.aborted, found.missing) == (2, (), frozenset())
    assert cluster.kafka.visible[0, 2] == 1


def test_markers_are_looked_for_where_the_tasks_left_them() -> None:
    """Catches: a batch taken for incomplete, and written twice, as the topic got partitions since
    planning."""
    cluster = Cluster()
    run = cluster.plan()
    cluster.commit(*(cluster.write(run, 0, index, index) for index in range(3)))
    found = cluster.run(driver.take_over(replace(SCOPE, partitions=3), 0))
    assert (found.completed, found.missing) == ((), frozenset())


def test_reports_of_runs_that_saw_other_partitions_are_refused() -> None:
    cluster = Cluster()
    run = cluster.plan()
    other = replace(SCOPE, partitions=3)
    with pytest.raises(TransactionError, match="different runs"):
        cluster.commit(cluster.write(run, 0, 0, 0), cluster.write(run, 0, 1, 1, scope=other))


def test_a_stage_that_runs_again_does_not_end_what_its_first_run_has_written() -> None:
    """Catches: attempt numbers begin at 0 again, so the second run's attempt aborted the transaction of the
    first run's, which Spark had counted as done."""
    cluster = Cluster()
    run = cluster.plan()
    first = cluster.write(run, 0, 0, 0, 1)
    again = cluster.write(run, 0, 0, 0, 1)
    assert first.part is not None
    assert again.part is not None
    assert first.part.slot != again.part.slot
    assert len(cluster.commit(first).aborted) == 1
    assert dict(cluster.kafka.visible) == {(0, 0): 1, (0, 1): 1}
    late = cluster.plan()
    part = cluster.write(late, 1, 0, 0).part
    assert part is not None
    assert part.slot == 0


def test_an_attempt_does_not_look_for_a_free_slot_for_ever() -> None:
    cluster = Cluster()
    run = cluster.plan()
    for _ in range(16):
        cluster.write(run, 0, 0, 0)
    with pytest.raises(TransactionError, match="16 transactions open"):
        cluster.write(run, 0, 0, 0)


def test_a_marker_names_its_transaction() -> None:
    batch = BatchIdentity.of_query("one", 3)
    assert batch.progress_marker(0, ProducerEpoch(1, 2)) != batch.progress_marker(0, ProducerEpoch(1, 3))
    assert len(batch.progress_marker(10**6, ProducerEpoch(2**62, 2**15))) < 100


def test_a_commit_counts_what_planning_ended_for_an_earlier_run() -> None:
    """Catches: the live view showed tasks for transactions, and never what was recovered."""
    cluster = Cluster()
    dead = cluster.plan()
    reports = [cluster.write(dead, 0, index, index) for index in range(3)]
    with pytest.raises(Died):
        cluster.commit(*reports, die_before=ends_task(1))
    run = cluster.plan()
    first = cluster.write(run, 1, 0, 0)
    won = cluster.write(run, 1, 0, 0, attempt=1)
    assert first.run.recovered.count == 2
    ended = cluster.commit(won).transactions
    counts = {name: one.count for name, one in ended.items()}
    assert counts == {"committed": 1, "aborted": 1, "recovered": 2}


def test_a_transaction_that_somebody_else_has_ended_is_not_counted_as_aborted() -> None:
    found = {name: Described("Ongoing", ProducerEpoch(number, 0), number) for number, name in enumerate("ab")}
    steps = proof.abort_others(proof.LeftOpen(ProducerEpoch(1, 0), found), SCOPE, ())
    next(steps)
    with pytest.raises(StopIteration) as ended:
        steps.send((Failed("INVALID_TXN_STATE"), None))
    assert ended.value.value == (1,)


def test_ages_are_not_negative_where_clocks_of_two_hosts_differ() -> None:
    assert batches.ended((1_000, 3_000, -1), 2_000.4) == EndedTransactions(3, 1_000)
    unknown = batches.BatchOutcome(committed=(-1,), ended_ms=2_000.0)
    assert str(unknown) == "1 transaction committed", "no age, where no broker says when it began"


def test_transactions_that_ended_have_their_ages() -> None:
    """Catches: nothing said for how long readers were held up: by a batch, or by what a dead driver left."""
    cluster = Cluster()
    dead = cluster.plan()
    cluster.kafka.now_ms = 1_000
    reports = [cluster.write(dead, 0, index, index) for index in range(3)]
    cluster.kafka.now_ms = 1_500
    cluster.write(dead, 0, 0, 0, attempt=1)
    with pytest.raises(Died):
        cluster.commit(*reports, die_before=ends_task(1))
    cluster.kafka.now_ms = 61_000
    run = cluster.plan()
    cluster.write(run, 1, 0, 0)
    cluster.kafka.now_ms = 62_000
    won = cluster.write(run, 1, 0, 0, attempt=1)
    outcome = replace(cluster.commit(won), ended_ms=62_250.4)
    assert outcome.transactions == {
        "committed": EndedTransactions(1, 250),
        "aborted": EndedTransactions(1, 1_250),
        "recovered": EndedTransactions(3, 60_000),
    }
    assert str(outcome) == (
        "1 transaction committed (open for 0.25 s); 1 transaction of other attempts aborted (open for 1.25 "
        "s); 3 transactions of an earlier run recovered (open for at most 60.00 s)"
    )


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_abort_of_a_replaced_driver_leaves_its_successor_alone(protocol: int) -> None:
    """Catches: the successor's first take-over raises the epoch by one, as a decision does. A replaced driver
    took that for its own decision, fenced the successor, and so ended a query that was well."""
    cluster = Cluster(protocol)
    replaced = cluster.plan()
    cluster.write(replaced, 0, 0, 0)
    successor = cluster.plan()
    report = cluster.write(successor, 0, 0, 0)
    assert cluster.run(driver.abort(SCOPE, replaced.driver_epoch, 0)) is None
    cluster.commit(report)
    assert dict(cluster.kafka.visible) == {(0, 0): 1}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_abort_of_a_replaced_driver_leaves_alone_what_its_successor_is_deciding(protocol: int) -> None:
    """Catches: an open transaction at the next epoch, which is the successor's, was taken for its own."""
    cluster = Cluster(protocol)
    replaced = cluster.plan()
    successor = cluster.plan()
    report = cluster.write(successor, 0, 0, 0)
    with pytest.raises(Died):
        cluster.commit(report, die_before=ends_driver)
    assert cluster.run(driver.abort(SCOPE, replaced.driver_epoch, 0)) is None
    # As if it had only been slow.
    cluster.commit(report)
    assert dict(cluster.kafka.visible) == {(0, 0): 1}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_abort_of_a_replaced_driver_leaves_alone_what_its_successor_has_decided(protocol: int) -> None:
    """Catches: with protocol 1 a successor's decision has the next epoch, until the successor raises that.
    The replaced driver took it for its own, and wrote offsets under the successor's driver epoch, which a
    repeated EndTxn of the successor committed: they stood where the decision was, and no run could read
    it."""
    cluster = Cluster(protocol)
    replaced = cluster.plan()
    successor = cluster.plan()
    report = cluster.write(successor, 0, 0, 0)
    with pytest.raises(Died):
        cluster.commit(report, die_before=ends_driver)
    began = False

    def commits_again(one: Operation) -> bool:
        nonlocal began
        if began and isinstance(one, EndTransaction):
            cluster.kafka._end_txn(SCOPE.driver_id, successor.driver_epoch, commit=True)
            cluster.settle()
        began = True
        return False

    cluster.kafka._end_txn(SCOPE.driver_id, successor.driver_epoch, commit=True)
    cluster.settle()
    assert cluster.run(driver.abort(SCOPE, replaced.driver_epoch, 0), commits_again) is None
    assert cluster.plan().role(report.run.batch, 0) is TaskRole.SKIP
    assert dict(cluster.kafka.visible) == {(0, 0): 1}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_abort_after_the_decision_completes_it(protocol: int) -> None:
    cluster = Cluster(protocol)
    run = cluster.plan()
    reports = [cluster.write(run, 0, index, index) for index in range(2)]
    with pytest.raises(Died):
        cluster.commit(*reports, die_before=ends_task(1))
    assert len(cluster.run(driver.abort(SCOPE, run.driver_epoch, 0)).completed) == 1
    assert dict(cluster.kafka.visible) == {(0, 0): 1, (0, 1): 1}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_abort_of_a_decision_whose_response_was_lost_completes_it(protocol: int) -> None:
    """With protocol 1 the epoch is raised by the client, which the driver did not come to."""
    cluster = Cluster(protocol)
    run = cluster.plan()
    reports = [cluster.write(run, 0, index, index) for index in range(2)]
    with pytest.raises(Died):
        cluster.commit(*reports, die_before=ends_driver)
    cluster.kafka._end_txn(SCOPE.driver_id, run.driver_epoch, commit=True)
    cluster.settle()
    assert len(cluster.run(driver.abort(SCOPE, run.driver_epoch, 0)).completed) == 2
    assert dict(cluster.kafka.visible) == {(0, 0): 1, (0, 1): 1}


def test_an_abort_does_not_ask_who_has_raised_an_epoch_to_the_last_one() -> None:
    """Catches: with protocol 1 brokers fail there with UNKNOWN_SERVER_ERROR, and so did the abort."""
    cluster = Cluster(1)
    first = cluster.plan().driver_epoch
    cluster.kafka.transactions[SCOPE.driver_id].producer = first._replace(epoch=LAST_EPOCH - 2)
    run = cluster.plan()
    report = cluster.write(run, 0, 0, 0)
    with pytest.raises(Died):
        cluster.commit(report, die_before=ends_task(0))
    asks = cluster.run(driver.abort(SCOPE, run.driver_epoch, 0), lambda one: isinstance(one, InitProducer))
    assert asks is None
    assert cluster.plan().role(report.run.batch, 0) is TaskRole.SKIP
    assert dict(cluster.kafka.visible) == {(0, 0): 1}


def test_an_abort_leaves_alone_a_driver_that_took_over_after_the_id_was_inspected() -> None:
    """Catches: with protocol 1 an abort without a transaction is refused, too. The replaced driver took the
    id over then, whoever had it by now, and so ended a query that was well."""
    cluster = Cluster(1)
    replaced = cluster.plan()
    successor: list[TaskHandover] = []

    def takes_over(one: Operation) -> bool:
        if isinstance(one, InitProducer) and not successor:
            successor.append(TaskHandover(ProducerEpoch(-1, -1)))
            successor[0] = cluster.plan()
        return False

    assert cluster.run(driver.abort(SCOPE, replaced.driver_epoch, 0), takes_over) is None
    cluster.commit(cluster.write(successor[0], 0, 0, 0))
    assert dict(cluster.kafka.visible) == {(0, 0): 1}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_abort_that_a_former_coordinator_refuses_is_sent_to_the_present_one(protocol: int) -> None:
    cluster = Cluster(protocol)
    cluster.kafka.replace_coordinator_of_id(SCOPE.driver_id)
    former = dict(cluster.kafka.former_ids)
    run = cluster.plan()
    report = cluster.write(run, 0, 0, 0)
    with pytest.raises(Died):
        cluster.commit(report, die_before=ends_driver)
    cluster.kafka.former_ids.update(former)
    assert len(cluster.run(driver.abort(SCOPE, run.driver_epoch, 0)).aborted) == 1
    assert cluster.kafka.open() == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_abort_of_what_was_recorded_and_not_decided_aborts_all_of_it(protocol: int) -> None:
    """The driver's own transaction may have timed out by then, which raises its epoch, too."""
    for times_out in (False, True):
        cluster = Cluster(protocol)
        run = cluster.plan()
        reports = [cluster.write(run, 0, index, index) for index in range(2)]
        with pytest.raises(Died):
            cluster.commit(*reports, die_before=ends_driver)
        if times_out:
            cluster.kafka.time_out(SCOPE.driver_id)
        ended = cluster.run(driver.abort(SCOPE, run.driver_epoch, 0))
        if times_out and protocol == 1:
            # A later driver's abort looks the same. The tasks' transactions are older, so they time out, too.
            assert ended is None
            cluster.plan()
        else:
            assert len(ended.aborted) == 2
        assert cluster.kafka.open() == []
        assert not cluster.kafka.visible


def ends_driver(one: Operation) -> bool:
    return isinstance(one, EndTransaction) and one.transactional_id == SCOPE.driver_id


def test_a_version_is_written_once_whether_its_first_job_was_aborted_before_or_after_the_decision() -> None:
    for decided in (False, True):
        cluster = Cluster()
        first = cluster.plan()
        reports = [cluster.write(first, 7, index, index, app="nightly") for index in range(2)]
        if decided:
            with pytest.raises(Died):
                cluster.commit(*reports, die_before=ends_task(0))
        ended = cluster.run(driver.abort(SCOPE, first.driver_epoch, 0))
        assert (len(ended.completed), len(ended.aborted)) == ((2, 0) if decided else (0, 2))
        again = cluster.plan()
        batch = BatchIdentity.of_application("nightly", "t", 7)
        assert again.role(batch, 0) is (TaskRole.SKIP if decided else TaskRole.WRITE)
        if not decided:
            cluster.commit(*(cluster.write(again, 7, index, index, app="nightly") for index in range(2)))
        assert dict(cluster.kafka.visible) == {(7, 0): 1, (7, 1): 1}


@pytest.mark.parametrize(
    ("app", "who"),
    [
        ("nightly", "The next run of it, or 'kafka-chunked-transactions"),
        (None, r"The next job with the same transactional\.id\.prefix, if you set one, or.*once more"),
    ],
)
def test_a_driver_that_does_not_learn_what_became_of_a_decision_says_what_readers_see(
    app: str | None, who: str
) -> None:
    """Catches: a job of which readers saw a part, and would for good, failed with the text of a
    request that failed."""
    cluster = Cluster()
    report = cluster.write(cluster.plan(), 7, 0, 0, app="nightly")
    if app is None:
        report = replace(report, run=replace(report.run, batch=BatchIdentity.of_unnamed_job()))
    steps = batches.commit([report], records_empty=False)
    wanted = next(steps)
    while not any(map(ends_task(0), wanted)):
        wanted = steps.send(tuple(cluster._answer(one, None) for one in wanted))
    with pytest.raises(DeliveryError, match=rf"may be decided.* see a part.*{who}.*: no response"):
        steps.throw(DeliveryError("EndTxn did not succeed: no response"))


def times_out(cluster: Cluster, *tasks: int) -> Callable[[Operation], bool]:
    """Let the transactions of these tasks time out behind the decision; nobody dies."""

    def before(one: Operation) -> bool:
        if isinstance(one, EndTransaction) and one.transactional_id.startswith("q-task-"):
            while tasks_left:
                cluster.kafka.time_out(SCOPE.task_id(tasks_left.pop(), 0))
        return False

    tasks_left = list(tasks)
    return before


def decided_by(cluster: Cluster, batch: BatchIdentity) -> list[AttemptReport]:
    reports = [cluster.write(cluster.plan(), 0, 0, 0)]
    # The same driver epoch, as of one planning.
    handover = TaskHandover(reports[0].run.driver_epoch)
    reports.append(cluster.write(handover, 0, 1, 1))
    run = replace(reports[0].run, batch=batch)
    return [replace(one, run=run) for one in reports]


@pytest.mark.parametrize(
    ("batch", "advice", "never"),
    [
        (BatchIdentity.of_application("nightly", "t", 7), "writes just these rows.*rewrite", "writes all"),
        (BatchIdentity.of_query("one", 0), "writes just these rows.*rewrite", "writes all"),
        (BatchIdentity.of_unnamed_job(), "no run writes just these rows.*abandon", "Run the job again"),
    ],
    ids=["application", "query", "unnamed job"],
)
def test_what_completes_a_batch_is_said_of_those_that_can_be_completed(
    batch: BatchIdentity, advice: str, never: str
) -> None:
    """Catches: the error said to run an unnamed job again to write just what was missing, and it wrote all
    rows."""
    cluster = Cluster()
    reports = decided_by(cluster, batch)
    with pytest.raises(IncompleteBatchError, match=advice) as reported:
        cluster.commit(*reports, die_before=times_out(cluster, 0))
    assert never not in str(reported.value)
    assert sum(cluster.kafka.visible.values()) == 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_batch_that_is_lost_in_the_commit_itself_is_just_run_again(protocol: int) -> None:
    """Catches: it was reported as one that readers see a part of, with advice to ``abandon`` all of its
    rows."""
    cluster = Cluster(protocol)
    reports = decided_by(cluster, BatchIdentity.of_query("one", 0))
    with pytest.raises(TransactionError, match=r"Readers see nothing of it.* run it again") as reported:
        cluster.commit(*reports, die_before=times_out(cluster, 0, 1))
    assert not isinstance(reported.value, IncompleteBatchError)
    run = cluster.plan()
    cluster.commit(*(cluster.write(run, 0, index, index) for index in range(2)))
    assert dict(cluster.kafka.visible) == {(0, 0): 1, (0, 1): 1}


@pytest.mark.parametrize("rewrite", [True, False])
def test_the_command_leaves_a_batch_alone_that_is_lost_as_a_whole(*, rewrite: bool) -> None:
    """Catches: ``abandon`` took a batch for written of which no reader sees a row."""
    cluster = Cluster()
    reports = decided_by(cluster, BatchIdentity.of_query("one", 0))
    with pytest.raises(Died):
        cluster.commit(*reports, die_before=ends_task(0))
    for index in range(2):
        cluster.kafka.time_out(SCOPE.task_id(index, 0))
    out = io.StringIO()
    client: Any = SimpleNamespace(run=lambda steps, *_: cluster.run(steps))
    assert command._resolve(client, SCOPE, out, rewrite=rewrite) == 0
    assert "counts as not written" in out.getvalue()
    assert cluster.plan().role(reports[0].run.batch, 0) is TaskRole.WRITE


def test_all_chunks_of_a_decision_are_waited_for() -> None:
    """Catches: planning waited for the first one only, and failed with "only 1 of 2 chunks are there" where
    another group's coordinator reported it later."""
    scope = replace(SCOPE, partitions=1)
    cluster = Cluster()
    cluster.kafka = Kafka(delays_offsets=True)
    run = cluster.plan(scope)
    random = Random(1)
    reports = [
        replace(one, digest=digest, part=replace(one.part, digest=digest) if one.part else None)
        for index in range(300)
        for one in [cluster.write(run, 0, index, index, scope=scope)]
        for digest in [RowsDigest(random.getrandbits(40), random.getrandbits(40), random.getrandbits(64))]
    ]
    cluster.commit(*reports)
    late = cluster.kafka.transactions[scope.driver_id].late_offsets
    first = scope.decision_key(0)
    assert len(late) > 1
    # The first group's coordinator tells it, and the others not yet.
    cluster.kafka.offsets[first] = late.pop(first)
    assert cluster.plan(scope).role(reports[0].run.batch, 0) is TaskRole.SKIP


def test_a_decision_without_parts_is_recorded_anew_like_others() -> None:
    """Catches: it expired by offsets.retention.minutes however often its job was started."""
    cluster = Cluster()
    run, batch = cluster.plan(), BatchIdentity.of_application("nightly", "t", 1)
    empty = AttemptReport(run.run(SCOPE, batch), 0, TaskRole.WRITE, RowsDigest(), None)
    cluster.run(batches.commit([empty], records_empty=True, now_ms=1_000.4))
    cluster.kafka.now_ms = 2_000
    for _ in range(2):
        found = cluster.run(driver.take_over(SCOPE, cluster.kafka.now_ms)).decision
        assert (found.number, found.began_ms) == (1, 1_000), "each planning would wait for another decision"
    cluster.kafka.now_ms = 7 * 86_400_000
    for _ in range(2):
        found = cluster.run(driver.take_over(SCOPE, cluster.kafka.now_ms)).decision
        assert (found.number, found.began_ms) == (2, cluster.kafka.now_ms)
    assert cluster.plan().role(batch, 0) is TaskRole.SKIP


def test_of_two_queries_under_one_name_no_batch_is_doubled_without_a_warning() -> None:
    """Catches: a query that was killed behind its decided batch 0 wrote it twice if another query had begun
    under its name meanwhile; and so did one whose name had changed."""
    cluster = Cluster()
    doubts = [
        cluster.commit(cluster.write(cluster.plan(), 0, 0, 0, query=query)).doubt
        for query in ("one", "two", "one")
    ]
    assert ["may be there twice" in one for one in doubts] == [False, True, True]
    assert not doubts[0]
    assert "query two before" in doubts[2]
    assert not cluster.commit(cluster.write(cluster.plan(), 1, 0, 0)).doubt, "it goes on"


def test_a_query_that_begins_under_a_name_with_a_later_batch_is_warned_of() -> None:
    cluster = Cluster()
    assert "may be there twice" in cluster.commit(cluster.write(cluster.plan(), 5, 0, 0)).doubt
    assert not cluster.commit(cluster.write(cluster.plan(), 6, 0, 0)).doubt
    later = Cluster()
    assert not later.commit(later.write(later.plan(), 5, 0, 0, app="nightly")).doubt


def test_a_batch_of_which_no_task_reports_is_not_committed() -> None:
    """Catches: a job without partitions passed for success where readers saw a part of its version."""
    with pytest.raises(TransactionError, match="no task has reported"):
        Cluster().commit()


def test_a_repair_by_tasks_without_rows_is_refused() -> None:
    """Catches: rows lost in silence. Of an incomplete batch only tasks that are missing were run again, and
    their source had no rows any more: the commit took that for an empty batch."""
    cluster = Cluster()
    run = cluster.plan()
    reports = [cluster.write(run, 0, index, index) for index in range(2)]
    with pytest.raises(Died):
        cluster.commit(*reports, die_before=ends_task(0))
    cluster.kafka.time_out(SCOPE.task_id(0, 0))
    again = cluster.plan()
    assert again.incomplete is not None
    of_repair = again.run(SCOPE, reports[0].run.batch)
    with pytest.raises(IncompleteBatchError, match="task 0"):
        cluster.commit(replace(reports[0], run=of_repair, digest=RowsDigest(), part=None))


@pytest.mark.parametrize("learns", [True, False])
def test_a_decision_that_planning_did_not_see_is_not_made_again(*, learns: bool) -> None:
    """Catches: rows doubled. Planning, and mostly the commit, asked a broker that had been frozen and did not
    know yet that another one was the group's coordinator, which had taken a decision since."""
    cluster = Cluster()
    first = cluster.plan()
    cluster.kafka.replace_coordinator(SCOPE.decision_key(0).group)
    former = dict(cluster.kafka.former)
    cluster.commit(cluster.write(first, 0, 0, 0))
    cluster.kafka.former.update(former)
    misled = cluster.plan()
    report = cluster.write(misled, 0, 0, 0)
    if learns:
        cluster.kafka.former.clear()
    with pytest.raises(TransactionError, match="decision 1 was decided"):
        cluster.commit(report)
    assert dict(cluster.kafka.visible) == {(0, 0): 1}
    ended = cluster.run(driver.abort(SCOPE, misled.driver_epoch, 0))
    assert len(ended.aborted) == 1
    assert cluster.plan().role(report.run.batch, 0) is TaskRole.SKIP


def again(cluster: Cluster, *rows: RowsDigest, compare: str = "content", app: str | None = None) -> Any:
    """The commit of batch or version 1 that is run again, by tasks with these rows."""
    run = cluster.plan()
    batch = BatchIdentity.of_query("one", 1)
    if app is not None:
        batch = BatchIdentity.of_application(app, SCOPE.topic, 1)
    assert run.role(batch, 0) is TaskRole.SKIP
    reports = [
        AttemptReport(run.run(SCOPE, batch), task, TaskRole.SKIP, one, None) for task, one in enumerate(rows)
    ]
    return cluster.run(batches.commit(reports, records_empty=False, compare=compare))


def test_a_batch_that_is_run_again_with_other_rows_is_refused() -> None:
    """Catches: rows lost in silence, where a checkpoint lost its last batch and Spark planned another one
    under its number: all its rows were skipped."""
    cluster = Cluster()
    for number in range(2):
        run = cluster.plan()
        cluster.commit(cluster.write(run, number, 0, 1, 2), cluster.write(run, number, 1, 3))
    written = RowsDigest.total([digest_of(1, 2), digest_of(3)])
    outcome = again(cluster, written, RowsDigest())
    assert (outcome.skipped, outcome.compared) == (3, True), "split into other tasks"
    for other in (
        replace(written, rows=4),
        replace(written, size=4),
        replace(written, checksum=written.checksum + 1),
        RowsDigest(),
    ):
        with pytest.raises(ChangedBatchError, match=r"was written before with 3 rows.*Nothing is written"):
            again(cluster, other)
        assert again(cluster, other, compare="none").skipped == other.rows
    assert again(cluster, replace(written, size=9), compare="rows").compared
    with pytest.raises(ChangedBatchError):
        again(cluster, replace(written, rows=4), compare="rows")


def test_of_two_writes_with_one_name_the_second_is_refused() -> None:
    """Catches: two sinks of foreachBatch with the same txnAppId, and rows that name their topics: the second
    one lost everything."""
    cluster = Cluster()
    cluster.commit(cluster.write(cluster.plan(), 1, 0, 1, 2, app="first"))
    with pytest.raises(ChangedBatchError, match="give each write a txnAppId of its own"):
        again(cluster, digest_of(3, 4), app="first")
    assert again(cluster, digest_of(1, 2), app="first").compared


def test_an_abandoned_batch_is_compared_when_it_is_run_again() -> None:
    """Catches: 50 rows lost in a round. What became of a batch could not be known, so it was abandoned; then
    the checkpoint lost it, and another batch of its number was taken for it."""
    cluster = Cluster()
    run = cluster.plan()
    reports = [cluster.write(run, 1, index, index) for index in range(2)]
    with pytest.raises(Died):
        cluster.commit(*reports, die_before=ends_task(0))
    cluster.kafka.time_out(SCOPE.task_id(0, 0))
    found = cluster.run(driver.take_over(SCOPE, 0))
    cluster.run(driver.resolve(SCOPE, found.driver_epoch, found.decision, rewrite=False))
    assert again(cluster, RowsDigest.total([digest_of(0), digest_of(1)])).compared
    with pytest.raises(ChangedBatchError):
        again(cluster, RowsDigest(7, 7, 7))
    outcome = again(cluster, RowsDigest(7, 7, 7), compare="none")
    assert (outcome.skipped, outcome.compared) == (7, False)
    assert "not known" in str(outcome)


def test_what_a_former_coordinator_does_not_know_to_be_decided_is_not_aborted() -> None:
    """Catches: a batch that was decided, and could have been completed, became incomplete."""
    cluster = Cluster()
    first = cluster.plan()
    cluster.kafka.replace_coordinator(SCOPE.decision_key(0).group)
    former = dict(cluster.kafka.former)
    reports = [cluster.write(first, 0, index, index) for index in range(2)]
    with pytest.raises(Died):
        cluster.commit(*reports, die_before=ends_task(0))
    cluster.kafka.former.update(former)
    found = cluster.run(driver.take_over(SCOPE, 0))
    assert (len(found.completed), found.aborted, found.missing) == (2, (), frozenset())


def test_markers_that_only_a_former_coordinator_does_not_have_are_not_missing() -> None:
    """Catches: rows doubled, as a batch that is complete was taken for lost and written again."""
    cluster = Cluster()
    first = cluster.plan()
    cluster.kafka.replace_coordinator(SCOPE.marker_key(0).group)
    former = dict(cluster.kafka.former)
    report = cluster.write(first, 0, 0, 0)
    cluster.commit(report)
    cluster.kafka.former.update(former)
    again = cluster.plan()
    assert again.role(report.run.batch, 0) is TaskRole.SKIP
    later = cluster.write(again, 1, 0, 0)
    assert len(cluster.commit(later).committed) == 1


def test_a_decided_transaction_that_a_former_coordinator_refused_to_commit_is_committed() -> None:
    """Catches: it says so from memory, as it never saw the transaction. The driver then aborted what it had
    decided, as an open transaction under that id seemed to be another attempt's."""
    cluster = Cluster()
    run = cluster.plan()
    name = SCOPE.task_id(0, 0)
    cluster.kafka.replace_coordinator_of_id(name)
    former = dict(cluster.kafka.former_ids)
    report = cluster.write(run, 0, 0, 0)

    def thaws(one: Operation) -> bool:
        if ends_driver(one):
            cluster.kafka.former_ids.update(former)
            former.clear()
        return False

    assert len(cluster.commit(report, die_before=thaws).committed) == 1
    assert dict(cluster.kafka.visible) == {(0, 0): 1}


def test_a_next_run_commits_what_a_former_coordinator_refuses() -> None:
    cluster = Cluster()
    run = cluster.plan()
    cluster.kafka.replace_coordinator_of_id(SCOPE.task_id(0, 0))
    former = dict(cluster.kafka.former_ids)
    report = cluster.write(run, 0, 0, 0)
    with pytest.raises(Died):
        cluster.commit(report, die_before=ends_task(0))
    cluster.kafka.former_ids.update(former)
    found = cluster.run(driver.take_over(SCOPE, 0))
    assert (found.aborted, found.missing, found.unknown) == ((), frozenset(), frozenset())
    assert dict(cluster.kafka.visible) == {(0, 0): 1}


def test_a_former_coordinator_does_not_keep_a_batch_from_being_decided() -> None:
    """Catches: a batch failed, as its transactions were called ended by a broker that never saw them."""
    cluster = Cluster()
    run = cluster.plan()
    cluster.kafka.replace_coordinator_of_id(SCOPE.task_id(0, 0))
    former = dict(cluster.kafka.former_ids)
    report = cluster.write(run, 0, 0, 0)
    cluster.kafka.former_ids.update(former)
    assert len(cluster.commit(report).committed) == 1


def test_a_replaced_driver_ends_nothing_where_a_former_coordinator_takes_it_for_the_owner() -> None:
    """Catches: it aborted what its successor had open, as the coordinator of the driver's id was frozen as
    long as the driver."""
    cluster = Cluster()
    replaced = cluster.plan()
    cluster.kafka.replace_coordinator_of_id(SCOPE.driver_id)
    former = dict(cluster.kafka.former_ids)
    successor = cluster.plan()
    report = cluster.write(successor, 0, 0, 0)
    cluster.kafka.former_ids.update(former)
    assert cluster.run(driver.abort(SCOPE, replaced.driver_epoch, 0)) is None
    cluster.commit(report)
    assert dict(cluster.kafka.visible) == {(0, 0): 1}


def test_a_repair_that_dies_leaves_the_batch_as_it_was() -> None:
    """The tasks of the repair take over the ids that tell what became of the batch, and progress markers
    expire."""
    cluster = Cluster()
    run = cluster.plan()
    reports = [cluster.write(run, 0, index, index) for index in range(2)]
    with pytest.raises(Died):
        cluster.commit(*reports, die_before=ends_task(1))
    cluster.kafka.time_out(SCOPE.task_id(1, 0))
    broken = cluster.plan()
    assert broken.incomplete is not None
    cluster.write(broken, 0, 1, 1)
    cluster.kafka.now_ms += 7 * 86_400_000
    cluster.kafka.expire_offsets(SCOPE.marker_key(0).group)
    found = cluster.run(driver.take_over(SCOPE, cluster.kafka.now_ms))
    assert (found.missing, found.unknown) == ({1}, frozenset())


def test_an_abort_adds_nothing_to_a_decision_that_is_being_committed() -> None:
    """Catches: rows lost. Until a broker has the marker of a transaction that is being ended, it takes more
    offsets of that epoch into it: those that were to prove who owns the prefix became the decision."""
    cluster = Cluster()
    run = cluster.plan()
    reports = [cluster.write(run, 0, index, index) for index in range(2)]
    with pytest.raises(Died):
        cluster.commit(*reports, die_before=ends_driver)
    cluster.kafka.execute(EndTransaction(SCOPE.driver_id, run.driver_epoch, commit=True))
    assert cluster.kafka.pending_markers() == [SCOPE.driver_id]
    ended = cluster.run(driver.abort(SCOPE, run.driver_epoch, 0))
    assert len(ended.completed) == 2
    assert dict(cluster.kafka.visible) == {(0, 0): 1, (0, 1): 1}


def test_a_version_that_was_decided_and_lost_is_not_taken_for_written_behind_another_decision() -> None:
    """Catches: 50 of 100 rows nowhere. All transactions of version 1 had timed out behind its decision, and
    the decision of version 2 said that both were written."""
    cluster = Cluster()
    run = cluster.plan()
    reports = [cluster.write(run, 1, index, index, app="nightly") for index in range(2)]
    with pytest.raises(Died):
        cluster.commit(*reports, die_before=lambda one: ends_task(0)(one) or ends_task(1)(one))
    for index in range(2):
        cluster.kafka.time_out(SCOPE.task_id(index, 0))
    cluster.commit(cluster.write(cluster.plan(), 2, 0, 7, app="nightly"))
    again = cluster.plan()
    assert again.role(BatchIdentity.of_application("nightly", "t", 1), 0) is TaskRole.WRITE
    assert again.role(BatchIdentity.of_application("nightly", "t", 2), 0) is TaskRole.SKIP
