"""The names that a query or job gets where the options give none, and what only a commit's process may not
do."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kafka_sink.clock import wall_ms
from kafka_sink.errors import ConfigurationError
from kafka_sink.options import parse
from kafka_sink.spark_application import KEPT, SparkApplication, planning_for
from kafka_sink.transactions import planning
from kafka_sink.transactions.batch import AttemptReport, BatchOutcome, BatchRun, TaskHandover, TaskRole
from kafka_sink.transactions.decision import BatchIdentity, LastDecision, RowsDigest
from kafka_sink.transactions.driver import Ownership
from kafka_sink.transactions.operations import (
    EndTransaction,
    ProducerEpoch,
    Scope,
    TransactionSteps,
)
from kafka_sink.transactions.planning import Clients, PlannedTransactions

BASE = {"kafka.bootstrap.servers": "a:1", "topic": "t", "delivery.guarantee": "exactly-once"}
MINE: dict[str, Any] = {"transactional.id.prefix": "mine"}


def prefix(raw: dict[str, str] | None = None, *, is_streaming: bool = False, **options: str) -> str:
    planned = planning.plan(
        parse({**BASE, **options}).options, raw or {}, is_streaming=is_streaming, for_tasks=False
    )
    assert planned is not None
    return planned.scope.prefix


def by(run: Callable[..., Any], left_out: frozenset[int] = frozenset(), protocol: int = 2) -> Clients:
    """Clients that run the steps of planning, commit and abort by this."""
    client: Any = SimpleNamespace(
        run=lambda steps, *_, **__: run(steps),
        partitions=lambda *_: 1,
        protocol=protocol,
        left_out=left_out,
        known=None,
    )
    return lambda *_: nullcontext(client)


def take_over(name: str, clients: Clients, now_ms: float = 0.0) -> PlannedTransactions:
    """Plan a query's tasks."""
    options = parse({**BASE, "transactional.id.prefix": name}).options
    planned = planning.plan(
        options, {}, is_streaming=True, for_tasks=True, clients=clients, clock_ms=lambda: now_ms
    )
    assert planned is not None
    return planned


@pytest.fixture(autouse=True)
def _application(tmp_path: Path) -> Iterator[None]:
    with planning_for(SparkApplication(str(tmp_path), None, {})):
        yield


def test_jobs_of_an_application_take_its_names_in_turn_and_give_them_back() -> None:
    options = parse(BASE).options
    planned = planning.plan(options, {}, is_streaming=False, for_tasks=False)
    assert planned is not None
    first, second = planned.scope.prefix, prefix()
    assert first != second
    planning.commit(options, planned, [], by(lambda _: BatchOutcome()))
    assert prefix() == first
    assert prefix() not in (first, second)


@pytest.mark.parametrize("folders", ["", "/proc/none"])
def test_jobs_without_a_folder_share_no_name(folders: str) -> None:
    """Catches: a job took the name of a running one, of which another planning worker knew, and ended it."""
    with planning_for(SparkApplication(folders, None, {})):
        first = prefix()
        KEPT.clear()
        assert first != prefix()


def test_a_named_application_has_a_prefix_for_each_topic() -> None:
    one = prefix(txnAppId="app", txnVersion="1")
    assert one == prefix(txnAppId="app", txnVersion="2")
    assert one != prefix(txnAppId="app", txnVersion="1", topic="other")
    assert one != prefix(txnAppId="other", txnVersion="1")


def test_each_writer_under_one_prefix_has_names_of_its_own() -> None:
    """Catches: 64 writers shared a decision: the 65th was refused, and an incomplete batch stopped all."""
    mine = partial(prefix, **MINE)
    names = {mine(txnAppId=f"app-{number}", txnVersion="1") for number in range(200)}
    names |= {mine(txnAppId="app-0", txnVersion="1", topic="other"), mine(), mine(is_streaming=True)}
    assert len(names) == 203
    assert all(name.startswith("mine-") for name in names), "so that rights on the prefix fit"
    assert mine(txnAppId="app-0", txnVersion="2") in names
    assert mine() in names


def of_query(checkpoint: str | Path, **options: str) -> str:
    return prefix({"checkpointlocation": str(checkpoint)}, is_streaming=True, **options)


def checkpoint_of(folder: Path, query: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "metadata").write_text(json.dumps({"id": query}))
    return folder


def test_a_query_has_one_name_however_its_checkpoint_is_spelt(tmp_path: Path) -> None:
    """Catches: a batch was written twice, as its checkpoint with a scheme had other transactional ids."""
    ours = checkpoint_of(tmp_path / "a b" / "orders", "query-1")
    spelt = (
        *(ours, f"{ours}/", f"file:{ours}", f"file://{ours}", f"file://localhost{ours}/", f"FILE://{ours}"),
        *(f"{ours.parent}//orders", f"{ours.parent}/./other/../orders", os.path.relpath(ours)),
    )
    assert {of_query(one) for one in spelt} == {of_query(ours)}
    ours.rename(tmp_path / "moved")
    assert of_query(tmp_path / "moved") == of_query(checkpoint_of(tmp_path / "copy", "query-1"))
    assert of_query(tmp_path / "moved") != of_query(checkpoint_of(tmp_path / "b", "query-2"))
    remote = "hdfs://nn:8020/c/orders"
    assert {of_query(one) for one in ("HDFS://NN:8020/c/orders/", "hdfs://nn:8020//c/./orders", remote)} == {
        of_query(remote)
    }


@pytest.mark.parametrize(
    "text", ["/nowhere/orders", "file:///nowhere/orders", "orders", "//host/c", "hdfs:///c"]
)
def test_a_checkpoint_whose_file_system_is_not_known_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"checkpointLocation.*or set transactional\.id\.prefix"):
        of_query(text)
    assert of_query(text, **MINE) == of_query(f"{text}/", **MINE)


def test_two_queries_under_one_prefix_have_names_of_their_own(tmp_path: Path) -> None:
    """Catches: both were one writer, so one that was killed and started again wrote its batch twice."""
    named = partial(of_query, **MINE)
    first, second = (checkpoint_of(tmp_path / one, one) for one in ("first", "second"))
    remote = "hdfs://nn:8020/c/orders"
    assert len({named(first), named(second), named(remote), named(f"{remote}2"), "mine-query"}) == 5
    assert named(first).startswith("mine-")
    before = named(first)
    first.rename(tmp_path / "moved")
    assert named(tmp_path / "moved") == before
    # A checkpoint that is deleted is another query's.
    assert named(checkpoint_of(tmp_path / "first", "third")) != before


def test_a_checkpoint_that_is_here_and_cannot_be_read_is_refused_with_a_prefix_too(tmp_path: Path) -> None:
    """Catches: it had another name than in the run before, so a batch was written twice."""
    checkpoint = checkpoint_of(tmp_path / "orders", "query-1")
    (checkpoint / "metadata").write_text("{")
    with pytest.raises(ConfigurationError, match=r"'metadata' cannot be read here"):
        of_query(checkpoint, **MINE)
    # The same path in Spark's default file system, of which this host may have one by chance.
    (checkpoint / "metadata").unlink()
    assert of_query(checkpoint, **MINE) == of_query(f"{checkpoint}/", **MINE)


def test_a_batch_that_may_be_there_twice_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    doubted = by(lambda _: BatchOutcome(doubt="batch 0 may be there twice"))
    planning.commit(parse(BASE).options, PlannedTransactions(Scope("p", "t", 1)), [], doubted)
    assert warnings_in(caplog) == ["kafka-chunked: batch 0 may be there twice"]


def test_a_query_without_a_checkpoint_needs_a_prefix() -> None:
    assert prefix({}, is_streaming=True, **MINE) == "mine-query"
    with pytest.raises(ConfigurationError, match=r"transactional\.id\.prefix"):
        prefix(is_streaming=True)
    with pytest.raises(ConfigurationError, match="a streaming query identifies its batches itself"):
        of_query("/c", txnAppId="app", txnVersion="1")


def test_the_log_names_a_prefix_once_in_an_application(caplog: pytest.LogCaptureFixture) -> None:
    """Catches: nobody knew under which --prefix to look for what a query had left open."""
    clients = by(lambda _: Ownership(ProducerEpoch(1, 0)))
    for name in ("orders", "orders", "clicks"):
        take_over(name, clients)
    assert [line.partition("prefix ")[2] for line in caplog.messages] == [
        "'orders-query', and records progress for topic 't'",
        "'clicks-query', and records progress for topic 't'",
    ]
    with planning_for(SparkApplication("", None, {})):
        for _ in "ab":
            take_over("other", clients)
    assert len(caplog.messages) == 3, "it would be named in every micro-batch"


def micro_batch(clients: Clients, topic: str = "t", *, is_repeated: bool = True) -> TaskHandover | None:
    """The handover from planning to the tasks of a micro-batch."""
    options = parse({**BASE, "topic": topic, "transactional.id.prefix": "p"}).options
    planned = planning.plan(
        options, {}, is_streaming=True, for_tasks=True, is_repeated=is_repeated, clients=clients
    )
    return planned.handover


def test_planning_asks_no_broker_right_after_a_commit_that_left_nothing_open(tmp_path: Path) -> None:
    """The note of a commit serves one planning, and only while it is fresh.

    Catches: after an abort, and behind a write that took over, a micro-batch got an epoch that was over;
    brokers that had joined were never asked what is open; and Kafka 3 showed the last decision too late.
    """
    ours, taken = ProducerEpoch(1, 7), ProducerEpoch(1, 9)
    scope = Scope("p-query", "t", 1, "t")
    handover = TaskHandover(ours, LastDecision(3, "query x"), taken_over_ms=int(wall_ms()))
    run = BatchRun(BatchIdentity.of_query("x", 2), scope, handover)
    report = AttemptReport(run, 0, TaskRole.WRITE, RowsDigest(), None)
    asks = by(lambda _: Ownership(taken))

    def committed(
        left_out: frozenset[int] = frozenset(), protocol: int = 2, handover: TaskHandover = handover
    ) -> None:
        outcome = by(lambda _: BatchOutcome(next_handover=handover), left_out, protocol)
        planning.commit(parse(BASE).options, PlannedTransactions(scope), [report], outcome)

    def epoch_of(topic: str = "t", *, is_repeated: bool = True) -> ProducerEpoch:
        given = micro_batch(asks, topic, is_repeated=is_repeated)
        assert given is not None
        return given.driver_epoch

    committed()
    assert [epoch_of(), epoch_of()] == [ours, taken]
    committed(left_out=frozenset({1}))
    assert epoch_of() == taken
    committed()
    assert epoch_of("other") == taken
    committed(protocol=1)
    assert epoch_of() == taken
    committed(handover=replace(handover, taken_over_ms=handover.taken_over_ms - 3_600_000))
    assert epoch_of() == taken
    committed()
    planning.abort(parse(BASE).options, PlannedTransactions(scope), by(lambda _: None))
    assert epoch_of() == taken
    committed()
    assert [epoch_of(is_repeated=False), epoch_of()] == [taken, taken]
    committed()
    for note in tmp_path.iterdir():
        os.utime(note, times=(time.time() - 3600,) * 2)
    assert epoch_of() == taken


def test_rows_that_name_their_topics_need_a_topic_for_progress() -> None:
    options = parse({name: value for name, value in BASE.items() if name != "topic"}).options
    with pytest.raises(ConfigurationError, match=r"transaction\.progress\.topic"):
        planning.plan(options, {}, is_streaming=False, for_tasks=True)


def aborted_under() -> list[ProducerEpoch]:
    """The driver epochs with which a process that did not plan the write begins to abort it."""
    driver_epochs: list[ProducerEpoch] = []

    def run(steps: TransactionSteps[Any]) -> None:
        (first,) = next(steps)
        assert isinstance(first, EndTransaction)
        driver_epochs.append(first.producer)

    planning.abort(parse(BASE).options, PlannedTransactions(Scope("p-query", "t", 1)), by(run))
    return driver_epochs


def test_an_abort_in_another_process_knows_what_planning_took(tmp_path: Path) -> None:
    """Catches: an abort did nothing after the clock was set back, so readers waited for the timeout."""
    assert aborted_under() == []
    for epoch in (7, 9):
        take_over("p", by(lambda _, epoch=epoch: Ownership(ProducerEpoch(5, epoch))))
    assert aborted_under() == [ProducerEpoch(5, 9)]
    for note in tmp_path.iterdir():
        os.utime(note, times=(time.time() + 3600,) * 2)
    assert aborted_under() == [ProducerEpoch(5, 9)]


def test_notes_of_another_version_count_as_absent(tmp_path: Path) -> None:
    """Catches: after an upgrade, one planning and one abort failed with msgspec's own error."""
    scope, options = Scope("p-query", "t", 1, "t"), parse(BASE).options
    handover = TaskHandover(ProducerEpoch(1, 7), taken_over_ms=int(wall_ms()))
    run = BatchRun(BatchIdentity.of_query("x", 2), scope, handover)
    report = AttemptReport(run, 0, TaskRole.WRITE, RowsDigest(), None)
    outcome = by(lambda _: BatchOutcome(next_handover=handover))
    planning.commit(options, PlannedTransactions(scope), [report], outcome)
    for note in tmp_path.iterdir():
        note.write_text('{"epoch": 7}')
    given = micro_batch(by(lambda _: Ownership(ProducerEpoch(1, 9))))
    assert given is not None
    assert given.driver_epoch == ProducerEpoch(1, 9)
    assert aborted_under() == [ProducerEpoch(1, 9)]
    for note in tmp_path.iterdir():
        note.write_text('{"epoch": 9}')
    assert aborted_under() == []


def test_options_that_contradict_or_have_no_effect_are_refused() -> None:
    without = {"kafka.bootstrap.servers": "a:1"}
    no_effect = r"no effect without delivery\.guarantee=exactly-once"
    for raw, reason in (
        (BASE | {"kafka.acks": "1"}, "needs kafka.acks=all"),
        (BASE | {"kafka.enable.idempotence": "false"}, "needs idempotence"),
        (BASE | {"txnAppId": "a"}, "txnVersion"),
        (without | MINE, no_effect),
        (without | {"txnAppId": "a", "txnVersion": "1"}, no_effect),
        (without | {"transaction.progress.topic": "p"}, no_effect),
    ):
        with pytest.raises(ConfigurationError, match=reason):
            parse(raw)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]


def test_a_batch_that_took_half_the_time_that_brokers_allow_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Catches: no word before brokers abort a slow query's batches, one after the other."""
    planned = PlannedTransactions(Scope("p", "t", 1), None, TaskHandover(ProducerEpoch(1, 0)))
    options = parse({**BASE, "kafka.transaction.timeout.ms": "60000"}).options
    for began_ms, open_ms in ((7_000_000, 29_000), (7_000_000, 31_000), (-1, 31_000)):
        outcome = BatchOutcome(committed=2, began_ms=began_ms)
        clients = by(lambda _, outcome=outcome: outcome)
        planning.commit(options, planned, [], clients, lambda at=7_000_000.0 + open_ms: at)
    (line,) = warnings_in(caplog)
    assert "open for 31 s" in line
    assert "kafka.transaction.timeout.ms = 60000" in line
