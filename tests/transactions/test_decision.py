"""Decisions as text: cut into chunks, read among the chunks of older ones, and what they say of the past."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_sink.errors import ChangedBatchError, IncompleteBatchError, ProtocolError, TransactionError
from kafka_sink.transactions.batch import Duty, Handover
from kafka_sink.transactions.decision import (
    BatchIdentity,
    Decision,
    Part,
    RowsDigest,
    Written,
    decode,
    encode,
    newest_head,
    next_decision,
    repaired,
)
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
    written = Written(batch, RowsDigest.total(one.digest for one in parts), ((0, batch),))
    return Decision(number, identity, tasks, parts, "t", 4, {"query": written})


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
    with pytest.raises(ProtocolError, match="does something else, or another version, use"):
        decode(["an offset's metadata of somebody else"])


def test_nothing_recorded_is_no_decision() -> None:
    assert decode([]) is None
    assert newest_head([]) is None


def test_progress_is_kept_of_other_writers_and_goes_back_by_one() -> None:
    first = next_decision(SCOPE, None, BatchIdentity("a", 4), 1, [part(0)])
    second = next_decision(SCOPE, first, BatchIdentity("b", 9), 1, [part(0)])
    third = next_decision(SCOPE, second, BatchIdentity("a", 5), 1, [part(0)])
    assert [str(third.progress[name]) for name in "ab"] == ["4 to 5", "9"]
    assert [str(third.progress_before()[name]) for name in "ab"] == ["4", "9"]
    assert not third.covers(BatchIdentity("a", 3))
    assert not third.covers(BatchIdentity("a", 6))
    assert not third.covers(BatchIdentity("c", 0))
    again = next_decision(SCOPE, third, BatchIdentity("a", 5), 2, [part(1)])
    assert [str(again.progress_before()[name]) for name in "ab"] == ["4", "9"]
    assert again.progress["a"].digest == part(1).digest


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


def app(version: int) -> BatchIdentity:
    return BatchIdentity.of_application("nightly", "t", version)


def handover(last: Decision | None) -> Handover:
    return Handover.of(SCOPE, Ownership(ProducerEpoch(1, 1), last), 0)


def test_a_lower_version_that_was_never_written_is_written() -> None:
    """Catches: a backfill was skipped as "written before", and its rows were lost."""
    last = next_decision(SCOPE, None, app(20260131), 1, [part(1)])
    assert handover(last).duty(app(20260130), 0) is Duty.WRITE
    last = next_decision(SCOPE, last, app(20260130), 1, [part(2)])
    found = decode(encode(last, 4))
    assert found == last
    assert [handover(found).duty(app(20260100 + day), 0) for day in (29, 30, 31, 32)] == [
        *(Duty.WRITE, Duty.SKIP, Duty.SKIP, Duty.WRITE)
    ]


def test_a_version_of_which_nobody_knows_whether_it_was_written_is_refused() -> None:
    last = None
    for version in range(0, 400, 2):
        last = next_decision(SCOPE, last, app(version), 1, [part(1)])
    given = handover(last)
    assert given.duty(app(200), 0) is Duty.SKIP, "one of the last hundred"
    assert given.duty(app(201), 0) is Duty.WRITE
    for version in (198, 197):
        with pytest.raises(ChangedBatchError, match=r"is not known.*another txnAppId"):
            given.duty(app(version), 0)
    assert last is not None
    assert next_decision(SCOPE, last, app(197), 1, ()).covers(app(197)), "it will be asked for again"


def test_a_query_that_goes_back_before_its_last_batch_is_refused() -> None:
    """Catches: batches of a checkpoint that was rewound or deleted were skipped, and their rows were lost."""
    last = None
    for number in (5, 6):
        last = next_decision(SCOPE, last, BatchIdentity.of_query("one", number), 1, [part(1)])
        last = next_decision(SCOPE, last, app(number), 1, [part(1)])
    given = handover(last)
    assert given.duty(BatchIdentity.of_query("one", 6), 0) is Duty.SKIP
    for number in (5, 4):
        with pytest.raises(ChangedBatchError, match="Spark does not go back"):
            given.duty(BatchIdentity.of_query("one", number), 0)
        with pytest.raises(ChangedBatchError, match="another txnAppId"):
            given.duty(app(number), 0, in_query=True)
    assert given.duty(app(5), 0) is Duty.SKIP, "a job may run an earlier version again"
    assert given.duty(app(6), 0, in_query=True) is Duty.SKIP


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=30))
def test_written_numbers_are_those_of_a_set(changes: list[tuple[int, bool]]) -> None:
    written, numbers = Written(-1), set[int]()
    for number, is_more in changes:
        if is_more:
            written, numbers = written.plus(number, RowsDigest(number)), numbers | {number}
        else:
            written, numbers = written.minus(number), numbers - {number}
        assert {one for one in range(14) if one in written} == numbers
        assert written.highest == max(numbers, default=-1)
        assert len(written.runs) == sum(one - 1 not in numbers for one in numbers)


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
