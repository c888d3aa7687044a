"""Decisions as text: cut into chunks, read among the chunks of older ones, and what they say of the past."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_sink.errors import ChangedBatchError, IncompleteBatchError, ProtocolError
from kafka_sink.transactions.batch import TaskHandover, TaskRole
from kafka_sink.transactions.decision import (
    BatchIdentity,
    Decision,
    Outcome,
    Part,
    RowsDigest,
    WrittenNumbers,
    decode,
    encode,
    newest_head,
    next_decision,
    recorded,
    repaired,
)
from kafka_sink.transactions.driver import Ownership
from kafka_sink.transactions.operations import ProducerEpoch, Scope

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
    before = WrittenNumbers(batch - 1, RowsDigest(4, 5, 6), ((0, batch - 1),), -1)
    return Decision(number, identity, tasks, parts, "t", 4, before)


def lost(decided: Decision, *tasks: int) -> Decision:
    return recorded(decided, dict.fromkeys(tasks, Outcome.LOST))


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
    for text, reason in (
        ("an offset's metadata of somebody else", "does something else, or a later version, use"),
        ("kc9 1 4 1 0 text", "a later version"),
        *(
            (f"kc{n} 1 4 1 0 text", "earlier version of kafka-chunked.*another transactional")
            for n in (1, 2, 3)
        ),
    ):
        for read in (decode, newest_head):
            with pytest.raises(ProtocolError, match=reason):
                read([text])
    assert decode([]) is None
    assert newest_head([]) is None


def test_a_decision_that_is_lost_entirely_is_left_out_of_what_was_written() -> None:
    """Catches: the next decision took it for written all the same, and its rows were nowhere."""
    first = next_decision(SCOPE, None, app(4), 2, [part(0), part(1)])
    second = next_decision(SCOPE, first, app(5), 2, [part(0), part(2)])
    assert str(second.before) == "4"
    assert str(second.written) == "4 to 5"
    third = next_decision(SCOPE, lost(second, 0, 2), app(7), 1, [part(0)])
    assert str(third.written) == "4, 7"
    assert not third.covers(app(5))
    partly = next_decision(SCOPE, lost(second, 0), app(7), 1, [part(0)])
    assert str(partly.written) == "4 to 5, 7"
    empty = next_decision(SCOPE, first, app(5), 2, [])
    assert str(empty.written) == "4 to 5", "an empty version is written"
    assert not empty.is_lost


def test_rows_of_the_last_two_batches_that_were_written_are_known() -> None:
    decided = next_decision(SCOPE, None, app(4), 1, [part(1)])
    for version in (5, 6):
        decided = next_decision(SCOPE, decided, app(version), 1, [part(version)])
    assert [decided.digest_of_batch(version) for version in (4, 5, 6, 7)] == [
        *(None, part(5).digest, part(6).digest, None)
    ]
    decided = lost(decided, 6)
    assert [decided.digest_of_batch(version) for version in (4, 5, 6)] == [None, part(5).digest, None]


def test_a_repair_replaces_the_missing_parts_and_no_others() -> None:
    anew = replace(part(1), producer=ProducerEpoch(77, 7))
    mended = repaired(decision(3, 3), [anew])
    assert mended.parts == (part(0), anew, part(2))
    assert mended.number == 4


def test_what_tasks_do_follows_from_what_planning_found() -> None:
    driver_epoch = ProducerEpoch(1, 1)
    fresh, done, later = (BatchIdentity("query", number) for number in (6, 5, 7))
    whole = TaskHandover.of(SCOPE, Ownership(driver_epoch, decision(1, 3)), 0)
    assert [whole.role(batch, 0) for batch in (fresh, done)] == [TaskRole.WRITE, TaskRole.SKIP]
    broken = TaskHandover.of(SCOPE, Ownership(driver_epoch, lost(decision(1, 3), 1)), 0)
    assert [broken.role(done, task) for task in range(3)] == [
        TaskRole.COMPARE,
        TaskRole.WRITE,
        TaskRole.COMPARE,
    ]
    with pytest.raises(IncompleteBatchError, match=r"task 1 .* rewrite .* --prefix p --topic t'"):
        broken.role(later, 0)
    empty = TaskHandover.of(SCOPE, Ownership(driver_epoch, decision(1, 0)), 0)
    assert empty.role(done, 0) is TaskRole.SKIP
    unseen = TaskHandover.of(SCOPE, Ownership(driver_epoch, lost(decision(1, 3), 0, 1, 2)), 0)
    assert unseen.role(done, 0) is TaskRole.WRITE
    assert unseen.role(BatchIdentity("query", 4), 0) is TaskRole.SKIP


def app(version: int) -> BatchIdentity:
    return BatchIdentity.of_application("nightly", "t", version)


def handover(last: Decision | None) -> TaskHandover:
    return TaskHandover.of(SCOPE, Ownership(ProducerEpoch(1, 1), last), 0)


def test_a_version_of_which_nobody_knows_whether_it_was_written_is_refused() -> None:
    last = None
    for version in range(0, 400, 2):
        last = next_decision(SCOPE, last, app(version), 1, [part(1)])
    given = handover(last)
    assert given.role(app(200), 0) is TaskRole.SKIP, "one of the last hundred"
    assert given.role(app(201), 0) is TaskRole.WRITE
    for version in (198, 197):
        with pytest.raises(ChangedBatchError, match=r"is not known.*another txnAppId"):
            given.role(app(version), 0)
    assert last is not None
    assert next_decision(SCOPE, last, app(197), 1, ()).covers(app(197)), "it will be asked for again"


def test_a_query_that_goes_back_before_its_last_batch_is_refused() -> None:
    """Catches: batches of a checkpoint that was rewound or deleted were skipped, and their rows were lost."""
    last = ours = None
    for number in (5, 6):
        last = next_decision(SCOPE, last, BatchIdentity.of_query("one", number), 1, [part(1)])
        ours = next_decision(SCOPE, ours, app(number), 1, [part(1)])
    given = handover(last)
    assert given.role(BatchIdentity.of_query("one", 6), 0) is TaskRole.SKIP
    for number in (5, 4):
        with pytest.raises(ChangedBatchError, match="Spark does not go back"):
            given.role(BatchIdentity.of_query("one", number), 0)
        with pytest.raises(ChangedBatchError, match="another txnAppId"):
            handover(ours).role(app(number), 0, in_query=True)
    assert handover(ours).role(app(5), 0) is TaskRole.SKIP, "a job may run an earlier version again"
    assert handover(ours).role(app(6), 0, in_query=True) is TaskRole.SKIP


def test_a_checkpoint_may_be_deleted_any_number_of_times_and_an_old_copy_is_not_taken_for_new() -> None:
    """Catches: the 65th query on a path was refused, and a copy of the first doubled its batch."""
    last = None
    for name in range(200):
        query = BatchIdentity.of_query(f"id-{name}", 0)
        assert handover(last).role(query, 0) is TaskRole.WRITE
        last = next_decision(SCOPE, last, query, 1, [part(1)])
        last = next_decision(SCOPE, last, replace(query, number=1), 1, [part(1)])
    assert last is not None
    assert decode(encode(last, 4)) == last
    assert len(encode(last, 4)) == 1
    with pytest.raises(
        ChangedBatchError, match=r"query id-199 has written under the same name.*prefix of its"
    ):
        handover(last).role(BatchIdentity.of_query("id-0", 1), 0)
    assert handover(None).role(BatchIdentity.of_query("id-0", 1), 0) is TaskRole.WRITE, (
        "nobody has written yet"
    )


@settings(deadline=None)
@given(st.lists(st.integers(0, 12), max_size=30))
def test_written_numbers_are_those_of_a_set(added: list[int]) -> None:
    written, numbers = WrittenNumbers(), set[int]()
    for number in added:
        written, numbers = written.plus(number, RowsDigest(number)), numbers | {number}
        assert (written.last, written.digest.rows) == (number, number)
        assert {one for one in range(14) if one in written} == numbers
        assert written.highest == max(numbers)
        assert len(written.runs) == sum(one - 1 not in numbers for one in numbers)
