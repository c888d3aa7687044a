"""Commits, course by course on the model of Kafka: one for each hole that was found."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from kafka_sink.errors import ChangedBatchError, DeliveryError, IncompleteBatchError, TransactionError
from kafka_sink.transactions import batch as batches
from kafka_sink.transactions import driver
from kafka_sink.transactions.batch import AttemptReport, BatchRun, TaskRole
from kafka_sink.transactions.decision import BatchIdentity, RowsDigest
from kafka_sink.transactions.operations import EndTransaction, Operation
from tests.support.transaction_steps import PROTOCOLS, SCOPE, Cluster, digest_of, ends_task, reports_of


def test_reports_of_runs_that_saw_other_partitions_are_refused() -> None:
    cluster = Cluster()
    run = cluster.plan()
    other = replace(SCOPE, partitions=3)
    with pytest.raises(TransactionError, match="different runs"):
        cluster.commit(cluster.write(run, 0, 0, 0), cluster.write(run, 0, 1, 1, scope=other))


def test_an_outcome_counts_the_transactions_that_it_has_ended() -> None:
    """It also has the time of the first. Catches: a slow query was not warned before brokers abort it."""
    cluster = Cluster()
    run = cluster.plan()
    cluster.kafka.now_ms = 61_000
    cluster.write(run, 1, 0, 0)
    won = cluster.write(run, 1, 0, 0, attempt=1)
    cluster.kafka.now_ms = 62_000
    outcome = cluster.commit(won)
    assert outcome.transactions == {"committed": 1, "aborted": 1}
    assert outcome.began_ms == 61_000
    assert str(outcome) == "1 transaction committed; 1 transaction of other attempts aborted"


@pytest.mark.parametrize(
    ("app", "who"),
    [
        ("nightly", "The next run of it, or 'kafka-chunked-transactions"),
        (None, r"the next job with the same transactional\.id\.prefix if you set one.*once more"),
    ],
)
def test_a_driver_that_does_not_learn_what_became_of_a_decision_says_what_readers_see(
    app: str | None, who: str
) -> None:
    """Its last words do. Catches: a job of which readers saw a part failed with the text of a request that
    failed, or ended with it."""
    cluster = Cluster()
    report = cluster.write(cluster.plan(), 7, 0, 0, app="nightly")
    if app is None:
        report = replace(report, run=replace(report.run, batch=BatchIdentity.of_unnamed_job()))
    steps = batches.commit([report])
    wanted = next(steps)
    while not any(map(ends_task(0), wanted)):
        wanted = steps.send(tuple(cluster.answer(one, None) for one in wanted))
    with pytest.raises(
        DeliveryError, match=rf"in part: EndTxn.*: no response.* see a part.*{who}.*stay missing"
    ):
        steps.throw(DeliveryError("EndTxn did not succeed: no response"))


def test_an_empty_first_batch_of_a_query_is_recorded_where_another_one_has_written() -> None:
    """Catches: the checkpoint was deleted, the new query's first batch had no rows, and every later one
    failed with ChangedBatchError, as what it had written was not known."""
    cluster = Cluster()
    cluster.commit(cluster.write(cluster.plan(), 7, 0, 0))
    run, batch = cluster.plan(), BatchIdentity.of_query("other", 0)
    empty = AttemptReport(BatchRun(batch, SCOPE, run), 0, TaskRole.WRITE, RowsDigest(), None)
    assert cluster.commit(empty).doubt == "", "no row can be there twice"
    assert cluster.commit(cluster.write(cluster.plan(), 1, 0, 0, query="other")).committed == 1


def test_a_batch_that_was_written_to_another_topic_is_not_skipped() -> None:
    """Catches: a copy of a checkpoint, started with another topic, wrote none of its first batch's rows."""
    orders, copies = replace(SCOPE, target="orders"), replace(SCOPE, target="copies")
    cluster = Cluster()
    cluster.commit(cluster.write(cluster.plan(orders), 0, 0, 0, scope=orders))
    for again, compare in ((orders, "content"), (copies, "none")):
        skipped = cluster.write(cluster.plan(again), 0, 0, 0, scope=again)
        steps = batches.commit([skipped], compare=compare)
        assert cluster.run(steps).skipped == 1
    moved = cluster.write(cluster.plan(copies), 0, 0, 0, scope=copies)
    with pytest.raises(
        ChangedBatchError, match=r"to topic 'orders', but.*'copies'.*transactional\.id\.prefix"
    ):
        cluster.commit(moved)


def test_a_batch_is_repaired_in_its_own_topic_only() -> None:
    """Catches: the rows that one topic missed went into another one, and the batch counted as complete."""
    orders, copies = replace(SCOPE, target="orders"), replace(SCOPE, target="copies")
    cluster = Cluster()
    run = cluster.plan(orders)
    cluster.dies(*(cluster.write(run, 0, task, task, scope=orders) for task in (0, 1)), before=ends_task(1))
    cluster.kafka.time_out(SCOPE.task_id(1, 0))
    for scope, error in ((copies, IncompleteBatchError), (orders, None)):
        run = cluster.plan(scope)
        reports = [cluster.write(run, 0, task, task, scope=scope) for task in (0, 1)]
        with pytest.raises(error, match="topic that it had before") if error else nullcontext():
            assert cluster.commit(*reports).repaired
    assert dict(cluster.kafka.visible) == {(0, 0): 1, (0, 1): 1}


def times_out(cluster: Cluster, *tasks: int) -> Callable[[Operation], bool]:
    """Let the transactions of these tasks time out behind the decision; nobody dies."""

    def before(one: Operation) -> bool:
        if isinstance(one, EndTransaction) and one.transactional_id.startswith("q-task-"):
            while tasks_left:
                cluster.kafka.time_out(SCOPE.task_id(tasks_left.pop(), 0))
        return False

    tasks_left = list(tasks)
    return before


@pytest.mark.parametrize(
    ("batch", "advice", "never"),
    [
        (BatchIdentity.of_application("nightly", "t", 7), "writes just these rows.*rewrite", "writes all"),
        (BatchIdentity.of_query("one", 0), "writes just these rows.*rewrite", "writes all"),
        (BatchIdentity.of_unnamed_job(), "no run writes just these rows.*abandon", "Run the job again"),
    ],
    ids=["application", "query", "unnamed job"],
)
def test_incomplete_batch_error_advises_a_rerun_only_if_that_can_complete_it(
    batch: BatchIdentity, advice: str, never: str
) -> None:
    """Catches: an unnamed job was to be run again to write what was missing, and wrote all rows."""
    cluster = Cluster()
    reports = reports_of(cluster, batch)
    with pytest.raises(IncompleteBatchError, match=advice) as reported:
        cluster.commit(*reports, die_before=times_out(cluster, 0))
    assert never not in str(reported.value)
    assert sum(cluster.kafka.visible.values()) == 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_batch_that_is_lost_in_the_commit_itself_is_just_run_again(protocol: int) -> None:
    """Catches: advice to ``abandon`` all rows of a batch of which readers saw none."""
    cluster = Cluster(protocol)
    reports = reports_of(cluster, BatchIdentity.of_query("one", 0))
    with pytest.raises(TransactionError, match=r"Readers see none of its rows.* run it again") as reported:
        cluster.commit(*reports, die_before=times_out(cluster, 0, 1))
    assert not isinstance(reported.value, IncompleteBatchError)
    cluster.commit(*cluster.wrote()[1])
    assert dict(cluster.kafka.visible) == {(0, 0): 1, (0, 1): 1}


def test_queries_under_one_name_double_no_batch_without_a_warning() -> None:
    """Catches: a query killed behind its decided batch wrote it twice, if another began under its name."""
    cluster = Cluster()
    doubts = [
        cluster.commit(cluster.write(cluster.plan(), 0, 0, 0, query=query)).doubt
        for query in ("one", "two", "one")
    ]
    assert ["may be there twice" in one for one in doubts] == [False, True, True]
    assert not doubts[0]
    assert "query two used before" in doubts[2]
    assert not cluster.commit(cluster.write(cluster.plan(), 1, 0, 0)).doubt, "it goes on"
    later, named = Cluster(), Cluster()
    assert "may be there twice" in later.commit(later.write(later.plan(), 5, 0, 0)).doubt
    assert not later.commit(later.write(later.plan(), 6, 0, 0)).doubt
    assert not named.commit(named.write(named.plan(), 5, 0, 0, app="nightly")).doubt


def test_a_batch_of_which_no_task_reports_is_not_committed() -> None:
    """Catches: a job without partitions passed for success where readers saw a part of its version."""
    with pytest.raises(TransactionError, match="no task has reported"):
        Cluster().commit()


def test_a_repair_by_tasks_without_rows_is_refused() -> None:
    """Catches: rows lost, as a repair whose source had no rows any more passed for an empty batch."""
    cluster = Cluster()
    reports = cluster.decided(0)
    again = cluster.plan()
    assert again.incomplete is not None
    of_repair = BatchRun(reports[0].run.batch, SCOPE, again)
    with pytest.raises(IncompleteBatchError, match="task 0"):
        cluster.commit(replace(reports[0], run=of_repair, digest=RowsDigest(), part=None))


@pytest.mark.parametrize("learns", [True, False])
def test_a_decision_that_planning_did_not_see_is_not_made_again(*, learns: bool) -> None:
    """Catches: rows doubled, where planning asked a former coordinator, and the commit mostly did, too."""
    cluster = Cluster()
    first = cluster.plan()
    answers_again = cluster.kafka.replace_coordinator(SCOPE.decision_key(0).group)
    cluster.commit(cluster.write(first, 0, 0, 0))
    answers_again()
    misled = cluster.plan()
    report = cluster.write(misled, 0, 0, 0)
    if learns:
        cluster.kafka.former.clear()
    with pytest.raises(TransactionError, match="decision 1 was made"):
        cluster.commit(report)
    assert dict(cluster.kafka.visible) == {(0, 0): 1}
    assert cluster.abort(misled).aborted == 1
    assert cluster.plan().role(report.run.batch, 0) is TaskRole.SKIP


def again(cluster: Cluster, *rows: RowsDigest, compare: str = "content", app: str | None = None) -> Any:
    """The commit of batch or version 1 that is run again, by tasks with these rows."""
    run = cluster.plan()
    batch = BatchIdentity.of_query("one", 1)
    if app is not None:
        batch = BatchIdentity.of_application(app, SCOPE.topic, 1)
    assert run.role(batch, 0) is TaskRole.SKIP
    reports = [
        AttemptReport(BatchRun(batch, SCOPE, run), task, TaskRole.SKIP, one, None)
        for task, one in enumerate(rows)
    ]
    return cluster.run(batches.commit(reports, compare=compare))


def test_a_batch_that_is_run_again_with_other_rows_is_refused() -> None:
    """Catches: rows lost, where a checkpoint lost its last batch and Spark gave its number to another one."""
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


def test_second_write_with_the_same_name_is_refused() -> None:
    """Catches: of two sinks of foreachBatch with one txnAppId the second one lost everything."""
    cluster = Cluster()
    cluster.commit(cluster.write(cluster.plan(), 1, 0, 1, 2, app="first"))
    with pytest.raises(ChangedBatchError, match="give each write a txnAppId of its own"):
        again(cluster, digest_of(3, 4), app="first")
    assert again(cluster, digest_of(1, 2), app="first").compared


def test_an_abandoned_batch_is_compared_when_it_is_run_again() -> None:
    """Catches: rows lost, where a checkpoint lost an abandoned batch, and another one was taken for it."""
    cluster = Cluster()
    cluster.decided(0, number=1)
    found = cluster.take_over()
    cluster.run(driver.resolve(SCOPE, found.driver_epoch, found.decision, rewrite=False))
    assert again(cluster, RowsDigest.total([digest_of(0), digest_of(1)])).compared
    with pytest.raises(ChangedBatchError):
        again(cluster, RowsDigest(7, 7, 7))
    outcome = again(cluster, RowsDigest(7, 7, 7), compare="none")
    assert (outcome.skipped, outcome.compared) == (7, False)
    assert "not known" in str(outcome)


def test_a_former_coordinator_does_not_keep_a_batch_from_being_decided() -> None:
    """Catches: a batch failed, as its transactions were called ended by a broker that never saw them."""
    cluster = Cluster()
    run = cluster.plan()
    answers_again = cluster.kafka.replace_coordinator_of_id(SCOPE.task_id(0, 0))
    report = cluster.write(run, 0, 0, 0)
    answers_again()
    assert cluster.commit(report).committed == 1
