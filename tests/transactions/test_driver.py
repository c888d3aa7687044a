"""Take-over and abort, course by course on the model of Kafka: one for each hole that was found."""

from __future__ import annotations

import io
from dataclasses import replace
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

from kafka_sink.transactions import __main__ as command
from kafka_sink.transactions import batch as batches
from kafka_sink.transactions import driver
from kafka_sink.transactions.batch import AttemptReport, BatchRun, TaskHandover, TaskRole
from kafka_sink.transactions.decision import BatchIdentity, RowsDigest
from kafka_sink.transactions.operations import (
    LAST_EPOCH,
    EndTransaction,
    Failed,
    InitProducer,
    Operation,
    ProducerEpoch,
    Scope,
)
from tests.support.transaction_steps import PROTOCOLS, SCOPE, Cluster, ends_driver, ends_task
from tests.support.transactions_of_kafka import Kafka


def test_markers_of_a_batchs_first_writing_do_not_stand_for_its_second() -> None:
    """Catches: rows lost, of a batch that was written again after ``rewrite`` by a driver that died."""
    cluster = Cluster()
    run = cluster.plan()
    reports = [cluster.write(run, 0, 0, 0, 1), cluster.write(run, 0, 1, 2)]
    cluster.dies(*reports, before=ends_task(1))
    cluster.kafka.time_out(SCOPE.task_id(1, 0))
    broken = cluster.take_over()
    assert broken.missing == {1}
    assert broken.completed == 0, "what the first run committed was not left open, and the rest is lost"
    cluster.run(driver.resolve(SCOPE, broken.driver_epoch, broken.decision, rewrite=True))

    run = cluster.plan()
    reports = [cluster.write(run, 0, 0, 2), cluster.write(run, 0, 1, 0, 1)]
    cluster.dies(*reports, before=ends_task(0))
    found = cluster.take_over()
    assert (found.completed, found.aborted, found.missing) == (2, 0, frozenset())
    assert cluster.kafka.visible[0, 2] == 1


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_abort_of_a_replaced_driver_leaves_its_successor_alone(protocol: int) -> None:
    """While it writes, decides and has decided. Catches: the epoch that its take-over or its decision raised,
    or an open transaction at the next epoch, was taken for the replaced driver's own decision. With protocol
    1 that wrote offsets under the successor's driver epoch, which a repeated EndTxn of the successor
    committed: they stood where the decision was, and no run could read it."""
    cluster = Cluster(protocol)
    replaced = cluster.plan()
    cluster.write(replaced, 0, 0, 0)
    successor = cluster.plan()
    report = cluster.write(successor, 0, 0, 0)

    def decides() -> None:
        found = cluster.kafka.end_txn(SCOPE.driver_id, successor.driver_epoch, commit=True)
        assert not isinstance(found, Failed)
        cluster.settle()

    def decides_again(one: Operation) -> bool:
        nonlocal began
        if began and isinstance(one, EndTransaction):
            decides()
        began = True
        return False

    began = False
    assert cluster.abort(replaced) is None
    cluster.dies(report, before=ends_driver)
    assert cluster.abort(replaced) is None
    decides()
    assert cluster.abort(replaced, decides_again) is None
    assert cluster.plan().role(report.run.batch, 0) is TaskRole.SKIP
    assert dict(cluster.kafka.visible) == {(0, 0): 1}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("is_written", [True, False], ids=["", "markers pending"])
def test_an_abort_of_a_decision_whose_response_was_lost_completes_it(
    protocol: int, *, is_written: bool
) -> None:
    """With protocol 1 the client raises the epoch, to which the driver did not come. Catches: rows lost.
    Until a broker has the marker of a transaction that is being ended, it takes more offsets of that epoch
    into it: those that were to prove who owns the prefix became the decision."""
    cluster = Cluster(protocol)
    run, reports = cluster.wrote()
    cluster.dies(*reports, before=ends_driver)
    cluster.kafka.end_txn(SCOPE.driver_id, run.driver_epoch, commit=True)
    assert cluster.kafka.pending_markers() == [SCOPE.driver_id]
    if is_written:
        cluster.settle()
    assert cluster.abort(run).completed == 2
    assert dict(cluster.kafka.visible) == {(0, 0): 1, (0, 1): 1}


def test_an_abort_does_not_ask_who_has_raised_an_epoch_to_the_last_one() -> None:
    """Catches: with protocol 1 brokers fail there with UNKNOWN_SERVER_ERROR, and so did the abort."""
    cluster = Cluster(1)
    first = cluster.plan().driver_epoch
    cluster.kafka.transactions[SCOPE.driver_id].producer = first._replace(epoch=LAST_EPOCH - 2)
    run = cluster.plan()
    report = cluster.write(run, 0, 0, 0)
    cluster.dies(report, before=ends_task(0))
    assert cluster.abort(run, lambda one: isinstance(one, InitProducer)) is None
    assert cluster.plan().role(report.run.batch, 0) is TaskRole.SKIP
    assert dict(cluster.kafka.visible) == {(0, 0): 1}


def test_an_abort_leaves_alone_a_driver_that_took_over_after_the_id_was_inspected() -> None:
    """Catches: with protocol 1 the replaced driver took the id over, as its abort was refused."""
    cluster = Cluster(1)
    replaced = cluster.plan()
    successor: list[TaskHandover] = []

    def takes_over(one: Operation) -> bool:
        if isinstance(one, InitProducer) and not successor:
            successor.append(TaskHandover(ProducerEpoch(-1, -1)))
            successor[0] = cluster.plan()
        return False

    assert cluster.abort(replaced, takes_over) is None
    cluster.commit(cluster.write(successor[0], 0, 0, 0))
    assert dict(cluster.kafka.visible) == {(0, 0): 1}


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_abort_that_a_former_coordinator_refuses_is_sent_to_the_present_one(protocol: int) -> None:
    cluster = Cluster(protocol)
    answers_again = cluster.kafka.replace_coordinator_of_id(SCOPE.driver_id)
    run = cluster.plan()
    report = cluster.write(run, 0, 0, 0)
    cluster.dies(report, before=ends_driver)
    answers_again()
    assert cluster.abort(run).aborted == 1
    assert cluster.kafka.open() == []


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_an_abort_of_what_was_recorded_and_not_decided_aborts_all_of_it(protocol: int) -> None:
    """The driver's own transaction may have timed out by then, which raises its epoch, too."""
    for times_out in (False, True):
        cluster = Cluster(protocol)
        run, reports = cluster.wrote()
        cluster.dies(*reports, before=ends_driver)
        if times_out:
            cluster.kafka.time_out(SCOPE.driver_id)
        ended = cluster.abort(run)
        if times_out and protocol == 1:
            # A later driver's abort looks the same. The tasks' transactions are older, so they time out, too.
            assert ended is None
            cluster.plan()
        else:
            assert ended.aborted == 2
        assert cluster.kafka.open() == []
        assert not cluster.kafka.visible


@pytest.mark.parametrize("rewrite", [True, False])
def test_the_command_leaves_a_batch_alone_that_is_lost_as_a_whole(*, rewrite: bool) -> None:
    """Catches: ``abandon`` took a batch for written of which no reader sees a row."""
    cluster = Cluster()
    reports = cluster.decided(0, 1)
    out = io.StringIO()
    client: Any = SimpleNamespace(run=lambda steps, *_: cluster.run(steps))
    assert command.resolve(client, SCOPE, out, rewrite=rewrite) == 0
    assert "counts as not written" in out.getvalue()
    assert cluster.plan().role(reports[0].run.batch, 0) is TaskRole.WRITE


def test_planning_waits_for_all_chunks_of_a_decision() -> None:
    """Catches: planning failed where another group's coordinator reported its chunk later."""
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
    cluster.kafka.now_ms = 1_000
    run, batch = cluster.plan(), BatchIdentity.of_application("nightly", "t", 1)
    empty = AttemptReport(BatchRun(batch, SCOPE, run), 0, TaskRole.WRITE, RowsDigest(), None)
    cluster.run(batches.commit([empty]))
    cluster.kafka.now_ms = 2_000
    for _ in range(2):
        found = cluster.take_over().decision
        assert (found.number, found.began_ms) == (1, 1_000), "each planning would wait for another decision"
    cluster.kafka.now_ms = 7 * 86_400_000
    for _ in range(2):
        found = cluster.take_over().decision
        assert (found.number, found.began_ms) == (2, cluster.kafka.now_ms)
    assert cluster.plan().role(batch, 0) is TaskRole.SKIP


def test_a_transaction_that_is_lost_long_after_planning_is_lost_and_not_unknown() -> None:
    """Catches: the age of a job's progress markers counted from its planning, hours before its first row, so
    that a person had to say whether rows were missing."""
    cluster = Cluster()
    run = cluster.plan()
    cluster.kafka.now_ms = 86_400_000
    cluster.dies(*(cluster.write(run, 0, task, task) for task in (0, 1)), before=ends_task(1))
    # A late attempt takes the id over, which says nothing of the transaction any more.
    cluster.kafka.init(SCOPE.task_id(1, 0))
    found = cluster.take_over()
    assert (found.missing, found.unknown) == ({1}, frozenset())


def test_a_replaced_driver_ends_nothing_where_a_former_coordinator_takes_it_for_the_owner() -> None:
    """Catches: it aborted what its successor had open, as the id's coordinator was frozen as long as it."""
    cluster = Cluster()
    replaced = cluster.plan()
    answers_again = cluster.kafka.replace_coordinator_of_id(SCOPE.driver_id)
    successor = cluster.plan()
    report = cluster.write(successor, 0, 0, 0)
    answers_again()
    assert cluster.abort(replaced) is None
    cluster.commit(report)
    assert dict(cluster.kafka.visible) == {(0, 0): 1}


def test_the_marker_of_a_repair_is_found_after_the_topic_has_got_partitions() -> None:
    """Catches: the repaired decision kept the former number of partitions. After the next run's tasks had
    taken the ids over and its driver had died, the batch was called incomplete, and the error's advice
    doubled rows."""
    small, grown = replace(SCOPE, partitions=1), replace(SCOPE, partitions=2)

    def wrote(scope: Scope, number: int) -> list[AttemptReport]:
        run = cluster.plan(scope)
        return [cluster.write(run, number, task, task, scope=scope) for task in (2, 3)]

    cluster = Cluster()
    cluster.dies(*wrote(small, 0), before=ends_task(3))
    cluster.kafka.time_out(SCOPE.task_id(3, 0))
    assert cluster.commit(*wrote(grown, 0)).repaired
    decided = cluster.run(driver.read_decision(grown))
    wrote(grown, 1)
    found = cluster.take_over(grown)
    assert (found.missing, found.decision) == (frozenset(), decided), "it need not be recorded anew"


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_version_whose_markers_are_gone_is_not_written_again(protocol: int) -> None:
    """The group was deleted, or offsets.retention.minutes is short. Catches: all rows doubled, as the next
    version's tasks took over the ids that alone had proved the commit, and its driver died."""
    cluster = Cluster(protocol)
    _, reports = cluster.wrote()
    cluster.commit(*reports)
    cluster.kafka.expire_offsets(SCOPE.marker_key(0).group)
    cluster.wrote(number=1)
    assert cluster.plan().role(reports[0].run.batch, 0) is TaskRole.SKIP
    assert dict(cluster.kafka.visible) == {(0, 0): 1, (0, 1): 1}


def test_an_abort_waits_for_the_end_of_what_another_driver_is_committing() -> None:
    """Catches: while brokers went from protocol 1 to 2, a driver that spoke 2 took the decision of another
    one, which spoke 1 and kept the epoch, for its own, and an empty text replaced it."""
    cluster = Cluster(1)
    replaced = cluster.plan()
    successor = cluster.plan()
    report = cluster.write(successor, 0, 0, 0)
    cluster.dies(report, before=ends_driver)
    cluster.kafka.end_txn(SCOPE.driver_id, successor.driver_epoch, commit=True)
    cluster.kafka.protocol, cluster.writes_markers_at_once = 2, False
    cluster.abort(replaced)
    assert cluster.plan().role(report.run.batch, 0) is TaskRole.SKIP
    assert dict(cluster.kafka.visible) == {(0, 0): 1}


def test_a_repair_that_dies_leaves_the_batch_as_it_was() -> None:
    """Its tasks take over the ids that tell what became of the batch, and progress markers expire."""
    cluster = Cluster()
    cluster.decided(1)
    broken = cluster.plan()
    assert broken.incomplete is not None
    cluster.write(broken, 0, 1, 1)
    cluster.kafka.now_ms += 7 * 86_400_000
    cluster.kafka.expire_offsets(SCOPE.marker_key(0).group)
    found = cluster.take_over()
    assert (found.missing, found.unknown) == ({1}, frozenset())


def test_the_tool_shows_warnings_about_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: nothing said that host names are not verified."""
    options = [
        *("--bootstrap-servers", "127.0.0.1:1", "--option", "kafka.security.protocol=SSL"),
        *("--option", "kafka.ssl.endpoint.identification.algorithm="),
    ]
    assert command.main(["list", *options], connect_bound_ms=1) == 1
    warning, error = capsys.readouterr().err.splitlines()
    assert warning.startswith("warning: ")
    assert "ssl.endpoint.identification.algorithm" in warning
    assert error.startswith("error: ")
