"""The batch lifecycle under any order of append, drain, response, error, split, expiry, mute and close."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kafka_sink.cluster.partition import BatchState, Partition, ProducerBatch
from kafka_sink.engine import accumulator as accumulator_module
from kafka_sink.engine import response_classifier
from kafka_sink.engine.accumulator import HOLD_MS, RecordAccumulator
from kafka_sink.engine.deliveries import TaskDeliveries
from kafka_sink.engine.identity import ProducerIdentity
from kafka_sink.errors import DeliveryError, IllegalTransitionError
from kafka_sink.model import TopicPartition
from kafka_sink.records import batch_header
from tests.support import lifecycle_model
from tests.support.effort import tries
from tests.support.fake_log import numbers_in
from tests.support.lifecycle_model import DELIVERY_TIMEOUT_MS, NODES, PARTITIONS, TOPIC, Model

# Refusals without an append, also of what was appended before; responses of unknown meaning; ends.
PASSING = (3, 5, 6, 19, 74)
LIES = (10, 45, 59)
UNREAD = ("lost", "late", "unsent")
REFUSED = PASSING + LIES
UNKNOWN = (-1, 7, 20, 56)
FINAL = (29, 87)

# A sender's step that may fall between the planning and the writing of rows.
STEPS: dict[str, Callable[[Model], None]] = {
    "nothing": lambda model: None,
    "send": Model.send,
    "arrive": lambda model: [model.arrive(node, 0, append=True) for node in range(NODES)] and None,  # type: ignore[dict-item]
    "respond": lambda model: [model.respond(node) for node in range(NODES)] and None,  # type: ignore[dict-item]
    "cut": lambda model: model.disconnect(0, unread="lost"),
    "expire": lambda model: setattr(model, "now", model.now + 4_000) or model.expire(),
    "fail all": Model.fail_all,
}


def test_batch_that_expires_while_held_fails_once_it_is_released() -> None:
    model = Model()
    model.append([0], 5, lambda: None)
    model.expire_while_held()
    assert not model.deliveries.has_failed
    model.now += HOLD_MS
    model.expire()
    assert model.deliveries.has_failed
    # Letting go of it just while it expires does not let it live on.
    model = Model()
    model.append([0], 5, lambda: None)
    model.now += DELIVERY_TIMEOUT_MS + 1
    batch, fail = next(iter(model.accumulator.live)), model.accumulator.fail

    def held_until_refused(batch: ProducerBatch, cause: Exception, *, taken: bool = False) -> bool:
        batch.held = True
        failed = fail(batch, cause, taken=taken)
        batch.held = False
        return failed

    model.accumulator.fail = held_until_refused  # type: ignore[method-assign]  # the task, just then
    model.expire()
    assert not batch.terminal
    assert model.responses.expires_ms == model.now + HOLD_MS
    model.accumulator.fail = fail  # type: ignore[method-assign]  # and its end
    model.now += HOLD_MS
    model.expire()
    assert batch.terminal


def walk(seed: int, steps: int = 120) -> Model:
    """A long run with faults that come in spells. The seed is all that a failure needs.

    In half of the runs brokers are honest: refusals are passing and true. Those must lose nothing at all.
    """
    chance = random.Random(seed)
    honest = chance.random() < 0.5
    model = Model(2_000 if honest else chance.choice([500, 2_000]))
    often = chance.choice([0.3, 1.0, 3.0])
    lies, ends = (0.0, 0.0) if honest else (often, chance.choice([0, 0, 1]))
    weighted: list[tuple[float, Callable[[], Any]]] = [
        (8, lambda: _append(model, chance)),
        (1, model.flush),
        (10, model.send),
        (10, lambda: model.arrive(_node(chance), 0, append=True)),
        (10, lambda: model.respond(_node(chance))),
        (3, lambda: setattr(model, "now", model.now + chance.choice([5, 20, 100]))),
        (1, model.expire),
        (0.5, lambda: _mute(model, chance)),
        (0.5, lambda: model.move_unwritten(_partition(chance), releases=model.next_row % 2 == 0)),
        (often, lambda: model.arrive(_node(chance), chance.choice(PASSING), append=False)),
        (
            often / 2,
            lambda: model.arrive(_node(chance), chance.choice(UNKNOWN), append=chance.random() < 0.5),
        ),
        (often / 2, lambda: model.disconnect(_node(chance), unread=chance.choice(UNREAD))),
        (often / 2, model.zombie),
        (often / 4, lambda: _move_leader(model, chance)),
        (lies, lambda: model.arrive(_node(chance), chance.choice(LIES), append=False)),
        (lies / 2, lambda: model.forget(_partition(chance))),
        (0.1 * ends, lambda: _append(model, chance, model.fail_all)),
        (0.3 * ends, model.expire_while_held),
        (0.1 * ends, lambda: model.arrive(_node(chance), chance.choice(FINAL), append=False)),
        (0.05 * ends, model.close),
    ]
    weights = [weight for weight, _ in weighted]
    for _ in range(steps):
        if model.closed or model.exhausted:
            break
        chance.choices(weighted, weights)[0][1]()
        model.check()
    if not model.closed and not model.exhausted:
        model.settle()
    assert not (honest and model.deliveries.has_failed), "passing faults cost the task"
    model.check_end()
    return model


def walk_many(*seeds: int) -> None:
    for seed in seeds:
        walk(seed)


def _node(chance: random.Random) -> int:
    return chance.randrange(NODES)


def _partition(chance: random.Random) -> TopicPartition:
    return TopicPartition(TOPIC, chance.randrange(PARTITIONS))


def _append(model: Model, chance: random.Random, step: Callable[[], Any] | None = None) -> None:
    rows = [chance.randrange(PARTITIONS) for _ in range(chance.randint(1, 6))]
    names = [name for name in STEPS if name not in ("fail all", "expire")]
    if step is None:
        steps = [partial(STEPS[chance.choice(names)], model) for _ in range(chance.randrange(3))]
    else:
        steps = [step]  # type: ignore[list-item]
    model.append(rows, chance.choice([5, 60, 300]), lambda: [one() for one in steps] and None)  # type: ignore[arg-type]


def _move_leader(model: Model, chance: random.Random) -> None:
    model.metadata.leaders[chance.randrange(PARTITIONS)] = chance.randrange(NODES)


def _mute(model: Model, chance: random.Random) -> None:
    partition = _partition(chance)
    if partition in model.muted:
        model.muted.discard(partition)
    else:
        model.muted.add(partition)


@pytest.mark.usefixtures("allocation_strategy")
@settings(max_examples=tries(30), deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(1_000, 2**32))
def test_no_order_of_events_loses_or_doubles_anything(seed: int) -> None:
    walk(seed)


@pytest.mark.usefixtures("allocation_strategy")
def test_long_runs_come_by_what_they_are_for() -> None:
    seen: Counter[str] = Counter()
    runs = max(20, tries(100))
    for seed in range(runs):
        model = walk(seed)
        deliveries = model.deliveries
        seen["rows"] += len(model.acknowledged)
        seen["moved"] += model.moved > 0
        seen["lost"] += deliveries.has_failed
        seen["splits"] += deliveries.counts().splits > 0
        seen["retries"] += deliveries.counts().retries > 0
        seen["restarts"] += model.identity.producer_epoch > 0
        seen["healthy after faults"] += deliveries.counts().retries > 0 and not deliveries.has_failed
    assert seen["rows"] > 48 * runs, seen
    assert min(seen.values()) >= runs // 20, seen


Bug = Callable[[pytest.MonkeyPatch], Any]


def _memory_goes_back_at_expiry(patch: pytest.MonkeyPatch) -> None:
    """KAFKA-19012: an expired batch's memory is reused while its request is on the way."""

    def release(self: RecordAccumulator, *batches: ProducerBatch) -> None:
        for batch in batches:
            if batch.terminal and batch in self.live:
                self.live.discard(batch)
                batch.buffer.release()

    patch.setattr(RecordAccumulator, "_release_locked", release)


def _held_does_not_count(patch: pytest.MonkeyPatch) -> None:
    """The sender fails a batch that the task writes into."""
    fail = RecordAccumulator.fail

    def failing(self: RecordAccumulator, batch: ProducerBatch, cause: Exception, **taken: bool) -> bool:
        batch.held = False
        return fail(self, batch, cause, **taken)

    patch.setattr(RecordAccumulator, "fail", failing)


def _retries_go_to_the_end(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Partition, "insert", lambda self, batch: self.batches.append(batch))


def _late_responses_count(patch: pytest.MonkeyPatch) -> None:
    """A completion after FAILED is taken for the first."""

    def move_to(batch: ProducerBatch, state: BatchState) -> bool:
        batch.state = state
        return True

    patch.setattr(ProducerBatch, "move_to", move_to)


def _anything_may_be_sent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ProducerIdentity, "may_send", lambda *arguments: True)


def _each_attempt_gets_a_new_sequence(patch: pytest.MonkeyPatch) -> None:
    assign = ProducerIdentity.assign

    def anew(self: ProducerIdentity, batch: ProducerBatch) -> None:
        if batch.attempts:
            batch.queue.unacknowledged.remove(batch)
            batch.sequence = batch_header.NO_SEQUENCE
        assign(self, batch)

    patch.setattr(ProducerIdentity, "assign", anew)


def _unknown_outcomes_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    """A batch whose response was lost counts as surely not written."""
    original = response_classifier.classify_failure

    def forgetful(cause: Exception, **_: object) -> response_classifier.Verdict:
        return original(cause, possibly_sent=False)

    patch.setattr(response_classifier, "classify_failure", forgetful)


def _pieces_get_no_sequence(patch: pytest.MonkeyPatch) -> None:
    """The pieces of a split batch are numbered after what was sent behind it."""

    def on_split(self: Partition, batch: ProducerBatch, _pieces: list[ProducerBatch]) -> None:
        self.unacknowledged.remove(batch)

    patch.setattr(Partition, "on_split", on_split)


def _split_parents_keep_their_memory(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(accumulator_module, "TERMINAL", frozenset({BatchState.SUCCEEDED, BatchState.FAILED}))


def _muted_partitions_are_sent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lifecycle_model, "split_off_muted", lambda *arguments: {})


def _a_close_forgets_what_is_in_flight(patch: pytest.MonkeyPatch) -> None:
    def abort_incomplete(self: RecordAccumulator, cause: Exception, **_: object) -> None:
        for queue in self.partitions.values():
            for batch in list(queue.batches):
                self.fail(batch, cause)

    patch.setattr(RecordAccumulator, "abort_incomplete", abort_incomplete)


def _expired_batches_vanish(patch: pytest.MonkeyPatch) -> None:
    """Rows are dropped without a word."""
    patch.setattr(TaskDeliveries, "on_failed", lambda *arguments: None)


def _what_was_sent_moves(patch: pytest.MonkeyPatch) -> None:
    """A batch that may have been written goes to another partition, too."""
    patch.setattr(ProducerBatch, "can_move", property(lambda batch: batch.is_movable))


BUGS: list[Bug] = [
    _what_was_sent_moves,
    _memory_goes_back_at_expiry,
    _held_does_not_count,
    _retries_go_to_the_end,
    _late_responses_count,
    _anything_may_be_sent,
    _each_attempt_gets_a_new_sequence,
    _unknown_outcomes_are_forgotten,
    _pieces_get_no_sequence,
    _split_parents_keep_their_memory,
    _muted_partitions_are_sent,
    _a_close_forgets_what_is_in_flight,
    _expired_batches_vanish,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__.strip("_"))
def test_an_injected_bug_is_found(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    # An invariant of the model, or the batch's own guard.
    with pytest.raises((AssertionError, IllegalTransitionError)):
        # First those that find what is rarest.
        walk_many(214, 136, 68, *range(60))


def _a_second_batch_in_doubt_behind_one_that_was_refused() -> Model:
    """Rarer than what runs by chance come by: the broker forgets, refuses a batch and takes the next."""
    model = Model()
    for _ in range(3):
        model.append([0], 5, lambda: None)
        model.flush()
        model.send()
        if model.next_row == 1:
            model.arrive(0, 0, append=True)
            model.respond(0)
    assert len(model.pending) == 2
    model.forget(TopicPartition(TOPIC, 0))
    model.arrive(0, 19, append=False)
    model.arrive(0, 0, append=True)
    model.respond(0)
    model.disconnect(0, unread="lost")
    model.now += 500
    model.send()
    model.arrive(0, 0, append=True)
    model.respond(0)
    model.now += 500
    model.send()
    return model


def test_no_restart_while_a_batch_of_the_partition_is_in_doubt() -> None:
    model = _a_second_batch_in_doubt_behind_one_that_was_refused()
    model.settle()
    with pytest.raises(DeliveryError, match=r"the leader lost its state.*\[1 rows acknowledged, 1 failed"):
        model.deliveries.raise_failure(model.next_row, model.accumulator.unacknowledged_records())
    assert [
        row for batch in model.logs[TopicPartition(TOPIC, 0)].batches for row in numbers_in(batch.data)
    ] == [0, 2]
    model.check_end()
