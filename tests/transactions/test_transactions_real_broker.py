"""The protocol on a real broker: drivers that die between any two steps, late tasks, timeouts."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.admin import AdminClient

from kafka_sink.clock import wall_ms
from kafka_sink.errors import ConfigurationError, IncompleteBatchError, KafkaSinkError, TransactionError
from kafka_sink.model import TopicPartition
from kafka_sink.options import parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.task.producer_cache import task_producer
from kafka_sink.transactions import __main__ as command
from kafka_sink.transactions import batch, driver, task_attempt
from kafka_sink.transactions.batch import TaskHandover, TaskRole
from kafka_sink.transactions.client import PROTOCOL_2, TransactionClient
from kafka_sink.transactions.decision import BatchIdentity, Part, RowsDigest
from kafka_sink.transactions.operations import (
    ABORTED,
    EndTransaction,
    Operation,
    Scope,
    TransactionSteps,
    describe,
    fetch_stable_offsets,
    init_producer,
)
from local_kafka import LocalBroker
from tests.support.batches_by_hand import PARTITIONS, Job
from tests.support.raw_producer import RawProducer
from tests.support.transaction_steps import through
from tests.support.waiting import until

_FENCED = ("PRODUCER_FENCED", "INVALID_PRODUCER_EPOCH")

_numbers = iter(range(1000))


@pytest.fixture(params=["broker", "old_broker"], ids=["protocol 2", "protocol 1"])
def kafka(_programs: None, request: pytest.FixtureRequest) -> LocalBroker:
    """Each test runs on brokers of both transaction protocols."""
    running: LocalBroker = request.getfixturevalue(request.param)
    return running


_PROTOCOL_1 = pytest.mark.parametrize("kafka", ["old_broker"], indirect=True)
# These tests do not depend on the protocol.
_PROTOCOL_2 = pytest.mark.parametrize("kafka", ["broker"], indirect=True)


@pytest.fixture
def job(kafka: LocalBroker) -> Iterator[Callable[..., Job]]:
    topic = f"exactly-once-{next(_numbers)}"
    kafka.create_topic(topic, PARTITIONS)

    def make(**options: str) -> Job:
        raw = {
            "kafka.bootstrap.servers": kafka.bootstrap_servers,
            "topic": topic,
            "delivery.guarantee": "exactly-once",
            **options,
        }
        parsed = parse(raw).options
        client = clients.enter_context(closing(TransactionClient(parsed)))
        return Job(parsed, client, Scope(f"prefix-{topic}", topic, PARTITIONS), clients)

    with ExitStack() as clients:
        yield make


def test_rows_are_visible_once_their_batch_is_committed_or_completed_by_the_next_driver(
    job: Callable[..., Job],
) -> None:
    run, later = job(), job()
    for number in range(2):
        handover = run.take_over()
        reports = [run.write(handover, number, index, [f"{number}-{index}"]) for index in range(3)]
        assert len(run.read()) == 3 * number
        committed = run.commit(*reports)
        assert committed.committed == 3
        assert 0 <= wall_ms() - committed.began_ms < 60_000
        run.await_rows(sorted(f"{n}-{index}" for n in range(number + 1) for index in range(3)))
    assert run.open() == []
    # Epochs move on as the model of the protocol says: under protocol 1 a task's commit leaves the epoch.
    described = run.run(describe(run.scope.driver_id, run.scope.task_id(0, 0)))
    assert described[run.scope.driver_id].producer.epoch == handover.driver_epoch.epoch + 1
    raised = int(run.client.protocol == PROTOCOL_2)
    assert reports[0].part is not None
    assert described[run.scope.task_id(0, 0)].producer.epoch == reports[0].part.producer.epoch + raised
    run.decided(2, 3)
    assert len(run.read()) == 6
    found = later.run(driver.take_over(later.scope, wall_ms))
    assert (found.completed, found.aborted, found.missing) == (3, 0, frozenset())
    later.await_rows([f"{number}-{index}" for number in range(3) for index in range(3)])
    again = TaskHandover.of(run.scope, found, wall_ms())
    assert again.role(BatchIdentity("query", 2), 0).value == "skip"


@_PROTOCOL_1
def test_an_abort_completes_its_own_decision_only_where_the_epoch_behind_it_was_not_raised(
    job: Callable[..., Job],
) -> None:
    """Catches: a replaced driver wrote offsets where its successor's decision was."""
    run = job()
    replaced = run.take_over()
    handover = run.take_over()
    reports = [run.write(handover, 0, index, [f"0-{index}"]) for index in range(2)]
    run.record_only(handover, *reports)
    with closing(RawProducer(run.servers, run.scope.driver_id)) as raw:
        assert raw.end(handover.driver_epoch, commit=True) == "NONE"
        assert run.run(driver.abort(run.scope, replaced.driver_epoch, wall_ms)) is None
        assert raw.end(handover.driver_epoch, commit=True) == "NONE"
    assert run.run(driver.abort(run.scope, handover.driver_epoch, wall_ms)).completed == 2
    assert run.take_over().role(BatchIdentity("query", 0), 0).value == "skip"
    run.await_rows(["0-0", "0-1"])


@_PROTOCOL_1
def test_batch_with_a_timed_out_transaction_is_not_decided(job: Callable[..., Job]) -> None:
    # A busy machine may need seconds for the write.
    run = job(**{"kafka.transaction.timeout.ms": "5000"})
    handover = run.take_over()
    report = run.write(handover, 0, 0, ["late"])
    run.await_end()
    with pytest.raises(TransactionError, match=r"kafka\.transaction\.timeout\.ms"):
        run.commit(report)
    assert run.read() == []


def _told(run: Job, action: str, *more: str, code: int = 0) -> str:
    """What ``kafka-chunked-transactions`` says of the job's prefix."""
    out = io.StringIO()
    where = ["--bootstrap-servers", run.servers, "--prefix", run.scope.prefix]
    assert command.main([action, *where, *more], out) == code
    return out.getvalue()


def test_a_batch_that_cannot_be_repaired_is_an_error_until_somebody_resolves_it(
    job: Callable[..., Job], tmp_path: Path
) -> None:
    run = job()
    reports = run.decided(0, 2)
    run.lose(reports[1])
    broken = run.take_over()
    other = run.digested(broken, 0, 0, b"other", b"rows")
    with pytest.raises(IncompleteBatchError, match="other tasks"):
        run.commit(other, run.write(broken, 0, 1, ["0-1"]))
    run.await_rows(["0-0"])
    # The same file of options as for the doctor.
    (tmp_path / "options.json").write_text(json.dumps({"kafka.client.id": "operator"}))
    more = ("--topic", run.scope.topic, "--options-file", str(tmp_path / "options.json"))
    listed = _told(run, "list", *more)
    assert "1 of them not committed" in listed
    assert "1 transaction open" in listed
    _told(run, "complete", *more, code=2)
    assert "is dropped" in _told(run, "rewrite", *more)
    assert run.open() == []
    assert run.take_over().role(BatchIdentity("query", 0), 0).value == "write"


@_PROTOCOL_2
def test_an_incomplete_batch_can_be_abandoned_without_doubling(job: Callable[..., Job]) -> None:
    """What readers see of it they see once; the next run takes it for written, and later batches go on."""
    run = job()
    run.lose(run.decided(0, 2)[1])
    # Without --topic, the command finds the first decision of a prefix only once its group shows it.
    until(lambda: run.run(driver.read_decision(run.scope)) is not None, "the decision")
    assert "1 rows of 1 tasks are missing" in _told(run, "abandon")
    assert "nothing is changed" in _told(run, "abandon")
    again = run.take_over()
    assert again.role(BatchIdentity("query", 0), 1).value == "skip"
    run.commit(run.write(again, 1, 0, ["1-0"]))
    run.await_rows(["0-0", "1-0"])


@_PROTOCOL_2
def test_the_command_creates_nothing_and_lists_what_is_there(
    job: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches: for a misspelt prefix 0 transactions committed, exit 0, and an id of it for a week."""
    run = job()
    run.take_over()
    where = ["--bootstrap-servers", run.servers]
    _told(run, "list", code=1)
    assert "--topic" in capsys.readouterr().err, "nothing is decided, so nothing names it"
    with pytest.raises(SystemExit):
        command.main(["complete", *where])
    misspelt = f"{run.scope.prefix}x"
    for action in ("list", "complete", "rewrite", "abandon"):
        capsys.readouterr()
        assert command.main([action, *where, "--prefix", misspelt, "--topic", run.scope.topic]) == 1
        assert f"no broker lists transactional.id.prefix '{misspelt}'" in capsys.readouterr().err
    assert run.run(describe(f"{misspelt}-driver")) == {}
    run.commit(run.write(run.take_over(), 0, 0, ["0-0"]))
    run.write(run.take_over(), 1, 0, ["1-0"])
    out = io.StringIO()
    assert command.main(["list", *where], out) == 0
    expected = (
        f"{run.scope.prefix}: batch 0 of query, 1 tasks, 1 transactions, all committed; 1 transaction open"
    )
    assert expected in out.getvalue().splitlines()
    assert "0 transactions committed, 1 aborted" in _told(run, "complete")


def test_the_command_says_soon_that_no_broker_can_be_reached(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: a minute without a word for an address that is misspelt."""
    began = time.monotonic()
    asked = ["list", "--bootstrap-servers", "127.0.0.1:1", "--prefix", "a", "--topic", "b"]
    assert command.main(asked, connect_bound_ms=300.0) == 1
    assert "Connection refused" in capsys.readouterr().err
    assert time.monotonic() - began < 60


@_PROTOCOL_2
def test_a_timeout_above_the_brokers_limit_is_refused_saying_so(job: Callable[..., Job]) -> None:
    with pytest.raises(ConfigurationError, match=r"transaction\.max\.timeout\.ms"):
        job(**{"kafka.transaction.timeout.ms": "900001"}).take_over()


@_PROTOCOL_2
def test_a_marker_that_is_pending_for_the_first_time_is_told_from_one_that_is_not_there(
    job: Callable[..., Job],
) -> None:
    """Catches: it passed for a lost commit. Asked for all of a group's offsets, brokers leave it out."""
    run = job()
    handover = run.take_over()
    report = run.write(handover, 0, 0, ["0-0"])
    key = run.scope.marker_key(0)
    assert run.run(fetch_stable_offsets(key)) == {key: None}
    run.commit(report)
    assert run.run(fetch_stable_offsets(key))[key] is not None
    assert run.run(fetch_stable_offsets(run.scope.marker_key(1))) == {}


# Ids that are not in use look the same with protocol 1, whatever became of them.
@_PROTOCOL_2
def test_an_attempt_that_has_sent_nothing_yet_is_ended_too(job: Callable[..., Job]) -> None:
    """Catches: it began its transaction after the batch, for nobody to end. No broker lists it as open."""
    for ends in ("commit", "abort", "take over"):
        run = job()
        handover = run.take_over()
        began = run.run(task_attempt.begin_steps(run.scope, handover.driver_epoch, 0, 1))
        slow, name = Part(0, began[0], began[1], RowsDigest()), run.scope.task_id(0, 1)
        assert run.run(describe(name))[name].state == "Empty"
        report = run.write(handover, 0, 0, ["0-0"])
        if ends == "commit":
            assert run.commit(report).aborted == 0, "it was no transaction"
        elif ends == "abort":
            assert run.run(driver.abort(run.scope, handover.driver_epoch, wall_ms)).aborted == 1
        else:
            run.take_over()
        assert run.run(describe(name))[name].state in ABORTED
        marking = task_attempt.mark_steps(run.scope, handover.driver_epoch, BatchIdentity("query", 0), slow)
        with pytest.raises(TransactionError):
            run.run(marking)
        assert run.open() == []


def _commit_and_expire_marks(run: Job) -> None:
    """As offsets.retention.minutes does, which expires each offset by its age: progress markers first."""
    handover = run.take_over()
    run.commit(*(run.write(handover, 0, index, [f"0-{index}"]) for index in range(2)))
    admin = AdminClient({"bootstrap.servers": run.servers})
    for deleted in admin.delete_consumer_groups([run.scope.marker_key(0).group]).values():
        deleted.result(30)


def in_a_week_ms() -> float:
    return wall_ms() + 7 * 86_400_000


def test_a_complete_batch_stays_complete_when_its_markers_have_expired(job: Callable[..., Job]) -> None:
    """Catches: a weekly job's batch was called incomplete, and the error's advice doubled its rows."""
    run = job()
    _commit_and_expire_marks(run)
    found = run.run(driver.take_over(run.scope, in_a_week_ms))
    assert (found.missing, found.unknown, found.completed) == (frozenset(), frozenset(), 0)
    # The run that follows takes the ids over, and dies. Then no id tells of the batch any more.
    run.write(TaskHandover.of(run.scope, found, wall_ms()), 1, 0, ["lost"])
    found = run.run(driver.take_over(run.scope, in_a_week_ms))
    assert (found.missing, found.unknown, found.aborted) == (frozenset(), frozenset(), 1)
    run.await_rows(["0-0", "0-1"])


@_PROTOCOL_2
def test_forgotten_transactions_are_reported_as_unknown_and_not_missing(job: Callable[..., Job]) -> None:
    run = job()
    _commit_and_expire_marks(run)
    # As an attempt does that was frozen just before.
    run.run(init_producer(run.scope.task_id(1, 0)))
    found = run.run(driver.take_over(run.scope, in_a_week_ms))
    assert (found.missing, found.unknown) == (frozenset(), {1})
    reported = TaskHandover.of(run.scope, found, wall_ms())
    with pytest.raises(IncompleteBatchError, match=r"can no longer be known.*Only if they are not"):
        reported.role(BatchIdentity("query", 0), 1)
    run.run(driver.resolve(run.scope, found.driver_epoch, found.decision, rewrite=False))
    _told(run, "complete")
    assert run.take_over().role(BatchIdentity("query", 0), 1).value == "skip"


def test_a_driver_that_was_replaced_calls_no_batch_incomplete(job: Callable[..., Job]) -> None:
    """Catches: one that froze after its decision found its successor's markers, and advised to rewrite."""
    first, second = job(), job()
    handover = first.take_over()
    reports = [first.write(handover, 0, index, [f"0-{index}"]) for index in range(2)]

    def freezes(wanted: tuple[Operation, ...]) -> TransactionSteps[Any]:
        if any(isinstance(one, EndTransaction) and "-task-" in one.transactional_id for one in wanted):
            again = second.take_over()
            second.commit(*(second.write(again, 1, index, [f"1-{index}"]) for index in range(2)))
        return (yield wanted)

    with pytest.raises(TransactionError, match="another driver has taken the transactional ids over"):
        first.run(through(batch.commit(reports), freezes))
    assert first.run(driver.abort(first.scope, handover.driver_epoch, wall_ms)) is None
    second.await_rows(["0-0", "0-1", "1-0", "1-1"])


@_PROTOCOL_2
def test_a_driver_that_was_replaced_before_its_decision_leaves_its_successor_alone(
    job: Callable[..., Job],
) -> None:
    """Catches: the error said to start the query again, which fences the successor."""
    first, second = job(), job()
    older = first.take_over()
    report = first.write(older, 0, 0, ["older"])
    newer = second.take_over()
    second.commit(second.write(newer, 0, 0, ["newer"]))
    # A group's coordinator tells a decision a moment after it is answered.
    until(lambda: second.run(driver.read_decision(second.scope)), "the decision")
    with pytest.raises(TransactionError, match="let it run"):
        first.commit(report)
    assert first.run(driver.abort(first.scope, older.driver_epoch, wall_ms)) is None
    second.await_rows(["newer"])


@_PROTOCOL_2
def test_a_task_of_a_replaced_driver_advises_nothing(job: Callable[..., Job]) -> None:
    """Catches: tasks advised to rewrite a batch that another driver had mended long ago."""
    first, second = job(), job()
    first.lose(first.decided(0, 2)[1])
    broken = first.take_over()
    with pytest.raises(IncompleteBatchError):
        first.attempt(broken, 1, 0)
    second.take_over()
    with pytest.raises(TransactionError, match="another driver"):
        first.attempt(broken, 1, 0)


def test_an_attempt_that_thaws_after_its_batch_adds_nothing(job: Callable[..., Job]) -> None:
    """Its transaction was aborted by its batch's commit; it goes on in a partition that is new to it."""
    run = job()
    handover = run.take_over()
    frozen = run.attempt(handover, 0, 0)
    plan = ColumnPlan.of([("value", "binary"), ("partition", "int")], run.scope.topic)

    def rows(partition: int) -> pa.RecordBatch:
        place = pa.array([partition], pa.int32())
        return pa.record_batch({"value": pa.array([b"frozen"], pa.binary()), "partition": place})

    def thaw_late() -> None:
        with task_producer(run.options, plan) as producer:
            frozen.take(rows(0), producer.begin_transaction)
            producer.send(rows(0))
            until(lambda: any(one.partitions for one in run.run(describe(*run.open())).values()), "rows")
            run.commit(run.write(handover, 0, 0, ["copy"], slot=1))
            producer.send(rows(1))
            producer.finish()

    with pytest.raises(KafkaSinkError):
        thaw_late()
    run.await_rows(["copy"])
    assert run.open() == []


def test_an_attempt_whose_first_row_comes_behind_the_commit_leaves_nothing_open(
    job: Callable[..., Job],
) -> None:
    """Catches: its transaction held readers up until the timeout, as nobody told it that it was late."""
    run = job()
    handover = run.take_over()
    late = run.attempt(handover, 0, 0, slot=1)
    plan = ColumnPlan.of([("value", "binary")], run.scope.topic)
    rows = pa.record_batch({"value": pa.array([b"late"], pa.binary())})

    def come_late() -> None:
        with task_producer(run.options, plan) as producer:
            late.take(rows, producer.begin_transaction)
            run.commit(run.write(handover, 0, 0, ["quick"]))
            producer.send(rows)
            producer.finish(late.mark)

    with pytest.raises(KafkaSinkError):
        come_late()
    late.abort()
    assert run.open() == []
    run.await_rows(["quick"])


@_PROTOCOL_2
def test_progress_goes_with_a_topic_that_is_deleted(job: Callable[..., Job], kafka: LocalBroker) -> None:
    """A batch that is run again afterwards is written to the new topic."""
    run, later = job(), job()
    handover = run.take_over()
    run.commit(run.write(handover, 0, 0, ["old"]))
    assert run.take_over().role(BatchIdentity("query", 0), 0).value == "skip"
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    admin.delete_topics([run.scope.topic])[run.scope.topic].result(30)
    batch = BatchIdentity("query", 0)
    until(lambda: later.take_over().role(batch, 0) is not TaskRole.SKIP, "progress is gone", poll_s=0.1)
    kafka.create_topic(run.scope.topic, PARTITIONS)
    handover = later.take_over()
    later.commit(later.write(handover, 0, 0, ["new"]))
    later.await_rows(["new"])


def test_a_zombie_of_an_attempt_that_this_sink_has_aborted_writes_nothing_more(
    job: Callable[..., Job],
) -> None:
    """Its batch and its request for a partition arrive while the next attempt's transaction is open."""
    run = job()
    report = run.write(run.take_over(), 0, 0, ["first"])
    assert report.part is not None
    zombie = report.part.producer
    handover = run.take_over()
    slot, producer = run.run(task_attempt.begin_steps(run.scope, handover.driver_epoch, 0, 0))
    assert (slot, producer.producer_id) == (0, zombie.producer_id)
    with closing(RawProducer(run.servers, run.scope.task_id(0, 0))) as raw:
        for partition in (TopicPartition(run.scope.topic, number) for number in range(2)):
            assert raw.add(producer, partition) == "NONE"
            assert raw.add(zombie, partition) in _FENCED
            # Whether the first attempt has written to this partition or not.
            assert raw.produce(zombie, 1, partition, b"late") in _FENCED
            assert raw.produce(producer, 0, partition, b"row") == "NONE"
            assert raw.produce(zombie, 1, partition, b"late") in _FENCED
        assert raw.end(zombie, commit=True) in _FENCED
        assert raw.end(producer, commit=True) == "NONE"
    run.await_rows(["row", "row"])
