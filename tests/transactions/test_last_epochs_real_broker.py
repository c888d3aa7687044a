"""A real broker gives an id another producer id after 32,766 epochs: crashes on each side of that."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from kafka_sink.clock import wall_ms
from kafka_sink.errors import TransactionError
from kafka_sink.options import parse
from kafka_sink.transactions import driver
from kafka_sink.transactions.batch import TaskHandover
from kafka_sink.transactions.client import PROTOCOL_1, TransactionClient
from kafka_sink.transactions.decision import BatchIdentity
from kafka_sink.transactions.operations import LAST_EPOCH, Scope, describe, init_producer
from local_kafka import LocalBroker
from tests.support.batches_by_hand import Job
from tests.support.effort import EFFORT
from tests.support.topics import messages
from tests.support.waiting import until

_STATE = "__transaction_state"
# TransactionLogKey: a version of two bytes, and the id behind its length. TransactionLogValue: a version, the
# producer id, and the epoch.
_NAME_AT = 4
_EPOCH_AT, _EPOCH_END = 10, 12
_TASKS = 2
# A batch uses up two epochs of an id or more, so each of its steps crosses the boundary from one of these.
_BEFORE = tuple(range(LAST_EPOCH - 4, LAST_EPOCH + 1))
# From the first epochs, the third one crosses it.
_BATCHES = 3 if EFFORT > 1 else 2


def complete(run: Job, number: int) -> None:
    """Nothing goes wrong."""
    handover = run.take_over()
    run.commit(*_written(run, handover, number))


def killed_before_the_decision(run: Job, number: int) -> None:
    _written(run, run.take_over(), number)
    complete(run, number)


def killed_after_the_decision(run: Job, number: int) -> None:
    run.decided(number, _TASKS)
    assert run.take_over().role(BatchIdentity("query", number), 0).value == "skip"


def aborted_before_the_decision(run: Job, number: int) -> None:
    """As Spark calls it for a batch that failed, with the driver epoch that planning got."""
    handover = run.take_over()
    _written(run, handover, number)
    ended = run.run(driver.abort(run.scope, handover.driver_epoch, wall_ms))
    assert ended is not None
    assert ended.aborted == _TASKS
    complete(run, number)


def aborted_after_the_decision(run: Job, number: int) -> None:
    """The commit failed behind its decision, and Spark calls the abort: it completes the batch."""
    handover = run.take_over()
    run.decide_only(handover, *_written(run, handover, number))
    ended = run.run(driver.abort(run.scope, handover.driver_epoch, wall_ms))
    if run.client.protocol == PROTOCOL_1 and handover.driver_epoch.epoch == LAST_EPOCH - 1:
        # Brokers cannot tell who has raised an epoch to the last one, so the next run completes it.
        assert ended is None
        run.take_over()
    else:
        assert ended is not None
        assert ended.completed == _TASKS
    assert run.open() == []


def replaced(run: Job, number: int) -> None:
    """Another driver takes over; the abort of the one before leaves its transactions alone."""
    former = run.take_over()
    handover = run.take_over()
    reports = _written(run, handover, number)
    assert run.run(driver.abort(run.scope, former.driver_epoch, wall_ms)) is None
    with pytest.raises(TransactionError, match="too late"):
        run.write(former, number, 0, ["of another driver"], slot=1)
    run.commit(*reports)


def beside_another_attempt(run: Job, number: int) -> None:
    """A speculative copy's transaction is aborted with the commit of its batch."""
    handover = run.take_over()
    reports = _written(run, handover, number)
    run.write(handover, number, 0, ["copy"], slot=1)
    assert run.commit(*reports).aborted == 1


def lost_after_the_decision(run: Job, number: int) -> None:
    """One task's transaction ends by its time-out; the next run writes just its rows again."""
    reports = run.decided(number, _TASKS)
    run.lose(reports[1])
    broken = run.take_over()
    assert broken.incomplete is not None
    assert broken.incomplete.missing == {1}
    mended = run.digested(broken, number, 0, b"%d-0" % number)
    run.commit(mended, run.write(broken, number, 1, [f"{number}-1"]))


def timed_out(run: Job, number: int) -> None:
    """Brokers abort the transactions of a batch before its decision. Started two epochs before the last, they
    do so under the last one (KAFKA-20090): planning ends ids that have no transaction, which is another."""
    if number == 0:
        reports = _written(run, run.take_over(), number)
        last = run.run(describe(run.scope.task_id(0, 0)))
        assert last[run.scope.task_id(0, 0)].producer.epoch == LAST_EPOCH
        run.await_end()
        with pytest.raises(TransactionError, match=r"kafka\.transaction\.timeout\.ms"):
            run.commit(*reports)
    complete(run, number)


# ``complete`` alone is a part of all of them.
_KINDS: tuple[Callable[[Job, int], None], ...] = (
    killed_before_the_decision,
    killed_after_the_decision,
    aborted_before_the_decision,
    aborted_after_the_decision,
    replaced,
    beside_another_attempt,
    lost_after_the_decision,
)


def _cases() -> Iterator[tuple[int, Callable[[Job, int], None], int]]:
    """Transaction protocol, kind and epoch; all epochs only where there is time (tests/support/effort.py)."""
    for number, kind in enumerate(_KINDS, start=1):
        yield from ((1, kind, epoch) for epoch in _BEFORE[-3 if EFFORT > 1 else -1 :])
        one = -1 - number % 2
        yield from ((2, kind, epoch) for epoch in (_BEFORE if EFFORT > 1 else _BEFORE[one:][:1]))
    yield 2, timed_out, LAST_EPOCH - 2


_CASES = [*_cases()]


def _written(run: Job, handover: TaskHandover, number: int) -> list[Any]:
    return [run.write(handover, number, index, [f"{number}-{index}"]) for index in range(_TASKS)]


def set_epochs(broker: LocalBroker, epochs: Mapping[str, int]) -> None:
    """Bring ids, which have been initialised, to these epochs, and start the broker again.

    It takes the last record that the coordinator itself has written of each id, and writes it again with
    another epoch; the coordinator reads it when it starts. As nothing was written under the epochs in
    between, that is the state in which InitProducerId, called as often, leaves an id.
    """
    records = _last_records(broker)
    # Only a client of this name may write to topics of brokers themselves.
    producer = Producer(
        {"bootstrap.servers": broker.bootstrap_servers, "client.id": "__admin_client", "log_level": 0}
    )
    for name, epoch in epochs.items():
        partition, key, value = records[name]
        changed = value[:_EPOCH_AT] + epoch.to_bytes(2, "big") + value[_EPOCH_END:]
        producer.produce(_STATE, changed, key, partition)
    assert producer.flush(30) == 0
    del producer  # before the broker goes, which it would try to reach
    broker.stop(0)
    broker.start(0)
    _await_coordinator(broker)


def _last_records(broker: LocalBroker) -> dict[str, tuple[int, bytes, bytes]]:
    """By transactional id: partition, key and value."""
    found: dict[str, tuple[int, bytes, bytes]] = {}
    for message in messages(broker.bootstrap_servers, _STATE):
        key, value = message.key(), message.value()
        if value is not None and key is not None:
            raw = key if isinstance(key, bytes) else key.encode()
            found[raw[_NAME_AT:].decode()] = message.partition() or 0, raw, bytes(value)
    return found


def _await_coordinator(broker: LocalBroker) -> None:
    """A broker that has just started may have no partitions of that topic yet."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    until(lambda: _STATE in admin.list_topics(timeout=30).topics, "its partitions", poll_s=0.05)


@pytest.fixture(scope="module")
def near_the_end(
    _programs: None, request: pytest.FixtureRequest
) -> Iterator[Callable[[int], Callable[[str, int], Job]]]:
    """By protocol, makes jobs, on a broker that is started again once, whatever the order of the tests."""
    with ExitStack() as stack:

        @functools.cache
        def by(protocol: int) -> Callable[[str, int], Job]:
            kafka: LocalBroker = request.getfixturevalue("broker" if protocol == 2 else "old_broker")
            return stack.enter_context(_near_the_end(kafka, protocol))

        yield by


@contextmanager
def _near_the_end(kafka: LocalBroker, protocol: int) -> Iterator[Callable[[str, int], Job]]:
    """Makes the job of a kind and an epoch, on a broker where all of them are near their last epochs."""
    with ExitStack() as clients:

        def make(kind: str, epoch: int) -> Job:
            topic = f"last-epochs-{kind}-{epoch}"
            raw = {"kafka.bootstrap.servers": kafka.bootstrap_servers, "topic": topic}
            if kind == timed_out.__name__:
                raw["kafka.transaction.timeout.ms"] = "10000"
            options = parse({**raw, "delivery.guarantee": "exactly-once"}).options
            client = clients.enter_context(closing(TransactionClient(options)))
            return Job(options, client, Scope(f"prefix-{topic}", topic, 2), clients)

        epochs = {}
        for kind, epoch in [case[1:] for case in _CASES if case[0] == protocol]:
            run = make(kind.__name__, epoch)
            kafka.create_topic(run.scope.topic, 2)
            ids = [run.scope.driver_id, *(run.scope.task_id(index, 0) for index in range(_TASKS))]
            ids.append(run.scope.task_id(0, 1))
            for name in ids:
                run.run(init_producer(name))
                epochs[name] = epoch
            run.client.close()
        set_epochs(kafka, epochs)
        yield make


@pytest.mark.parametrize(
    ("protocol", "kind", "epoch"),
    _CASES,
    ids=[f"protocol {protocol}, {kind.__name__}, {epoch}" for protocol, kind, epoch in _CASES],
)
def test_each_row_is_written_once_past_the_last_epoch(
    near_the_end: Callable[[int], Callable[[str, int], Job]],
    protocol: int,
    kind: Callable[[Job, int], None],
    epoch: int,
) -> None:
    run = near_the_end(protocol)(kind.__name__, epoch)
    ids = (run.scope.driver_id, run.scope.task_id(0, 0), run.scope.task_id(1, 0))
    before = run.run(describe(*ids))
    assert {one.producer.epoch for one in before.values()} == {epoch}
    for number in range(_BATCHES):
        kind(run, number)
        assert run.open() == []
    run.await_rows(sorted(f"{number}-{index}" for number in range(_BATCHES) for index in range(_TASKS)))
    after = run.run(describe(*ids))
    assert all(after[name].producer.producer_id != before[name].producer.producer_id for name in ids)
    assert all(after[name].producer.epoch < _BATCHES * 8 for name in ids)
