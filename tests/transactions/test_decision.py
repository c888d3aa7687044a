"""Decisions as text: cut into chunks, read among the chunks of older ones, and what they say of the past."""

from __future__ import annotations

import dataclasses

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_sink.errors import IncompleteBatchError, ProtocolError, TransactionError
from kafka_sink.transactions.batch import Duty, Handover
from kafka_sink.transactions.decision import (
    BatchIdentity,
    Decision,
    Part,
    RowsDigest,
    decode,
    encode,
    newest_head,
    next_decision,
    repaired,
)
from kafka_sink.transactions.digest import RunningDigest
from kafka_sink.transactions.driver import Ownership
from kafka_sink.transactions.operations import ProducerEpoch
from kafka_sink.transactions.scope import Scope, task_id_pattern

# A broker refuses 4,096 bytes and more (offset.metadata.max.bytes).
_REFUSED_BYTES = 4096
SCOPE = Scope("p", "t", 4)


def part(task: int) -> Part:
    return Part(
        task, 0, ProducerEpoch(1000 + task, task % 7), RowsDigest(task * 13, task * 999, task * 77777)
    )


def decision(number: int, tasks: int, batch: int = 5) -> Decision:
    identity = BatchIdentity("query", batch)
    parts = tuple(map(part, range(tasks)))
    return Decision(number, identity, tasks, parts, "t", 4, {"query": batch}, batch - 1)


@pytest.mark.parametrize("tasks", [0, 1, 50, 3000])
def test_a_decision_survives_as_chunks_that_brokers_take(tasks: int) -> None:
    chunks = encode(decision(3, tasks), 4)
    assert all(len(chunk.encode()) < _REFUSED_BYTES for chunk in chunks)
    assert decode(reversed(chunks)) == decision(3, tasks)


def test_the_latest_decision_counts_and_left_over_chunks_of_older_ones_do_not() -> None:
    long, short = encode(decision(7, 3000), 4), encode(decision(8, 2), 6)
    left = [*short, *long[len(short) :]]
    assert decode(left) == decision(8, 2)
    head = newest_head(left)
    assert head is not None
    assert (head.number, head.partitions, head.chunks) == (8, 6, len(short))


def test_a_decision_with_a_chunk_missing_is_not_taken_for_another() -> None:
    chunks = encode(decision(7, 3000), 4)
    with pytest.raises(ProtocolError, match="decision 7"):
        decode(chunks[1:])
    with pytest.raises(ProtocolError, match="does something else use its groups"):
        decode(["an offset's metadata of somebody else"])


def test_nothing_recorded_is_no_decision() -> None:
    assert decode([]) is None
    assert newest_head([]) is None


def test_progress_is_kept_of_other_writers_and_goes_back_by_one() -> None:
    first = next_decision(SCOPE, None, BatchIdentity("a", 4), 1, [part(0)])
    second = next_decision(SCOPE, first, BatchIdentity("b", 9), 1, [part(0)])
    third = next_decision(SCOPE, second, BatchIdentity("a", 5), 1, [part(0)])
    assert third.progress == {"a": 5, "b": 9}
    assert third.progress_before() == {"a": 4, "b": 9}
    assert third.covers(BatchIdentity("a", 3))
    assert not third.covers(BatchIdentity("a", 6))
    assert not third.covers(BatchIdentity("c", 0))
    again = next_decision(SCOPE, third, BatchIdentity("a", 5), 2, [part(1)])
    assert again.progress_before() == {"a": 4, "b": 9}


def test_a_repair_replaces_the_missing_parts_and_no_others() -> None:
    anew = dataclasses.replace(part(1), producer=ProducerEpoch(77, 7))
    mended = repaired(decision(3, 3), [anew])
    assert mended.parts == (part(0), anew, part(2))
    assert mended.number == 4


def test_what_tasks_do_follows_from_what_planning_found() -> None:
    claim = ProducerEpoch(1, 1)
    fresh, done, later = (BatchIdentity("query", number) for number in (6, 5, 7))
    whole = Handover.of(SCOPE, Ownership(claim, decision(1, 3)), 0)
    assert [whole.duty(batch, 0) for batch in (fresh, done)] == [Duty.WRITE, Duty.SKIP]
    broken = Handover.of(SCOPE, Ownership(claim, decision(1, 3), frozenset({1})), 0)
    assert [broken.duty(done, task) for task in range(3)] == [Duty.COMPARE, Duty.WRITE, Duty.COMPARE]
    with pytest.raises(IncompleteBatchError, match=r"task 1 .* rewrite .* --prefix p --topic t'"):
        broken.duty(later, 0)
    empty = Handover.of(SCOPE, Ownership(claim, decision(1, 0)), 0)
    assert empty.duty(done, 0) is Duty.SKIP
    unseen = Handover.of(SCOPE, Ownership(claim, decision(1, 3), frozenset({0, 1, 2})), 0)
    assert unseen.duty(done, 0) is Duty.WRITE
    assert unseen.duty(BatchIdentity("query", 4), 0) is Duty.SKIP


@settings(deadline=None)
@given(st.lists(st.integers(0, 700), min_size=1, max_size=6))
def test_a_digest_does_not_depend_on_where_batches_end(sizes: list[int]) -> None:
    values = [f"value-{number}" if number % 5 else None for number in range(sum(sizes))]
    whole = RunningDigest([0])
    whole.update(pa.record_batch({"value": pa.array(values, pa.string())}))
    pieces = RunningDigest([0])
    at = 0
    for size in sizes:
        pieces.update(pa.record_batch({"value": pa.array(values[at : at + size], pa.large_string())}))
        at += size
    assert pieces.result() == whole.result()
    assert whole.result().rows == sum(sizes)


def test_a_digest_differs_for_other_rows_and_another_order() -> None:
    def of(values: list[bytes]) -> RowsDigest:
        digest = RunningDigest([0])
        digest.update(pa.record_batch({"value": pa.array(values, pa.binary())}))
        return digest.result()

    rows = [b"%05d" % number for number in range(1000)]
    assert of(rows) != of(rows[1:] + rows[:1])
    assert of(rows) != of(rows[:-1])
    assert of(rows) != of([*rows[:-1], b"1"])


def test_keys_stay_within_the_partitions_there_are() -> None:
    scope = Scope("p", "t", 3)
    keys = [scope.mark_key(task) for task in range(7)]
    assert len(set(keys)) == 7
    assert {key.partition.partition for key in keys} == {0, 1, 2}
    assert {key.group for key in keys} == {"p-tasks", "p-tasks-1", "p-tasks-2"}
    assert scope.decision_groups(1) == scope.decision_groups(3) == ("p-decision",)
    assert scope.decision_groups(4) == ("p-decision", "p-decision-1")


def test_the_pattern_of_ids_takes_no_other_prefix() -> None:
    import re

    pattern = task_id_pattern("a.b")
    assert re.match(pattern, Scope("a.b", "t", 1).task_id(3, 0))
    assert not re.match(pattern, Scope("a-b", "t", 1).task_id(3, 0))
    assert not re.match(pattern, Scope("a.b-task-1", "t", 1).task_id(3, 0))
    assert not re.match(pattern, Scope("a.b", "t", 1).driver_id)


def test_no_application_that_shares_a_prefix_is_forgotten() -> None:
    """Catches: a version that is written again because many others were written since."""
    found = next_decision(SCOPE, None, BatchIdentity.of_application("app 0", "t", 7), 0, ())
    for number in range(1, 64):
        found = next_decision(SCOPE, found, BatchIdentity.of_application(f"app {number}", "t", 1), 0, ())
        found = next_decision(SCOPE, found, BatchIdentity.of_unnamed_job(), 0, ())
    assert found.covers(BatchIdentity.of_application("app 0", "t", 7))
    assert len([name for name in found.progress if name.startswith("job ")]) == 1
    assert decode(encode(found, 4)) == found
    with pytest.raises(TransactionError, match=r"app 64/t is not committed.*prefix of their own"):
        next_decision(SCOPE, found, BatchIdentity.of_application("app 64", "t", 1), 0, ())
    assert next_decision(SCOPE, found, BatchIdentity.of_application("app 0", "t", 8), 0, ()).covers(
        BatchIdentity.of_application("app 0", "t", 8)
    )


def test_no_application_is_mistaken_for_an_unnamed_job() -> None:
    """Catches: a txnAppId that begins with "job " was forgotten by the next decision, and written again."""
    mine = BatchIdentity.of_application("job nightly", "t", 7)
    found = next_decision(SCOPE, None, mine, 0, ())
    found = next_decision(SCOPE, found, BatchIdentity.of_unnamed_job(), 0, ())
    assert found.covers(mine)
    assert not next_decision(SCOPE, found, BatchIdentity.of_query("one", 0), 0, ()).covers(
        BatchIdentity.of_unnamed_job()
    )


def test_a_checkpoint_may_be_deleted_any_number_of_times() -> None:
    """Catches: the 65th query on a path was refused, as each new checkpoint makes another query of it."""
    app = BatchIdentity.of_application("app", "t", 1)
    found = next_decision(SCOPE, None, app, 0, ())
    for number in range(200):
        found = next_decision(SCOPE, found, BatchIdentity.of_query(f"id-{number}", 0), 0, ())
    assert found.covers(app)
    assert found.covers(BatchIdentity.of_query("id-199", 0))
    assert found.covers(BatchIdentity.of_query("id-150", 0))
    assert not found.covers(BatchIdentity.of_query("id-100", 0))
    assert decode(encode(found, 4)) == found
