"""Decisions as text: cut into chunks, read among the chunks of older ones, and what they say of the past."""

from __future__ import annotations

import base64
import io
import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_sink.errors import ChangedBatchError, IncompleteBatchError, ProtocolError, TransactionError
from kafka_sink.model import TopicPartition
from kafka_sink.transactions import __main__ as tool
from kafka_sink.transactions.batch import TaskHandover, TaskRole
from kafka_sink.transactions.decision import (
    BatchIdentity,
    Decision,
    LastDecision,
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
from kafka_sink.transactions.operations import (
    FetchOffsets,
    ListOpen,
    OffsetKey,
    ProducerEpoch,
    Scope,
    TransactionSteps,
)

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
        ("an offset's metadata of somebody else", "another application, or another version, commit"),
        ("kc9 1 4 1 0 text", "another version"),
    ):
        for read in (decode, newest_head):
            with pytest.raises(ProtocolError, match=reason):
                read([text])
    assert decode([]) is None
    assert newest_head([]) is None


# The first word of each chunk. A hostile text must not be refused for its format alone.
FORMAT = encode(decision(1, 1), 4)[0].partition(" ")[0]
BODY = json.loads(msgspec.json.encode(decision(1, 1)))
PART, BEFORE = BODY["parts"][0], BODY["before"]


def chunk_of(data: bytes) -> str:
    return f"{FORMAT} 1 4 1 0 {base64.b85encode(zlib.compress(data, 9)).decode()}"


def changed(**values: object) -> str:
    return chunk_of(json.dumps(BODY | values, separators=(",", ":"), ensure_ascii=False).encode())


def without(name: str) -> str:
    body = {field: value for field, value in BODY.items() if field != name}
    return chunk_of(msgspec.json.encode(body))


HOSTILE = {
    "chunks without end": f"{FORMAT} 1 1 1000000000000 0 x",
    "no partitions": f"{FORMAT} 1 0 5 0 x",
    "not a number": f"{FORMAT} x 1 1 0 x",
    "digits that Python refuses to read": f"{FORMAT} {'9' * 5000} 1 1 0 x",
    "digits of another script": f"{FORMAT} \u0661 1 1 0 x",
    "not base64": f"{FORMAT} 1 1 1 0 \xe9",
    "not compressed": f"{FORMAT} 1 1 1 0 " + base64.b85encode(b"nothing").decode(),
    "large when decompressed": chunk_of(b'{"parts":[' + b"[0,0,0,0,0,0,0]," * (1 << 20) + b"0]}"),
    "nested": chunk_of(b"[" * 100_000),
    "nested in a field": chunk_of(b'{"parts":' + b"[" * 100_000),
    "nested in an unknown field": chunk_of(b'{"other":' + b"[" * 100_000),
    "another number than its chunk": changed(number=2),
    "no topic partitions": changed(partitions=0),
    "infinite number": changed(tasks=float("inf")),
    "text as task": changed(parts=[PART | {"task": "a"}]),
    "large task": changed(parts=[PART | {"task": 1 << 40}]),
    "large epoch": changed(parts=[PART | {"producer": [1, 1 << 15]}]),
    "large checksum": changed(parts=[PART | {"digest": PART["digest"] | {"checksum": 1 << 64}}]),
    "unknown outcome": changed(parts=[PART | {"outcome": 9}]),
    "no earlier numbers": without("before"),
    "no time": without("began_ms"),
    "no target": without("target"),
    "a part without an outcome": changed(parts=[{k: v for k, v in PART.items() if k != "outcome"}]),
    "an empty digest": changed(parts=[PART | {"digest": {}}]),
    "an unknown field": changed(other=1),
    "a field of a part that is unknown": changed(parts=[PART | {"other": 1}]),
    "texts as runs": changed(before=BEFORE | {"runs": [["a", "b"]]}),
    "backward run": changed(before=BEFORE | {"runs": [[5, 1]]}),
    "many runs": changed(before=BEFORE | {"runs": [[one, one] for one in range(0, 1000, 2)]}),
}


def cluster_with(texts: Mapping[str, str]) -> SimpleNamespace:
    """A client of a cluster where these prefixes have these decisions, and no transaction is open."""

    def run(steps: TransactionSteps[Any], *_: object) -> Any:
        results: tuple[Any, ...] | None = None
        try:
            while True:
                operations = next(steps) if results is None else steps.send(results)
                results = tuple(map(answer, operations))
        except StopIteration as end:
            return end.value

    def answer(operation: object) -> object:
        if isinstance(operation, FetchOffsets):
            place = TopicPartition("t", 0)
            return {
                OffsetKey(f"{prefix}-decision", place): text
                for prefix, text in texts.items()
                if f"{prefix}-decision" in operation.groups
            }
        return () if isinstance(operation, ListOpen) else {}

    return SimpleNamespace(run=run)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_decision_is_a_protocol_error_and_other_prefixes_are_still_listed(text: str) -> None:
    """Catches: `list` hung for 100 s or took gigabytes; one foreign text ended the whole list."""
    assert decode([changed()]) == decision(1, 1)
    with pytest.raises(ProtocolError):
        decode([text])
    out = io.StringIO()
    client = cluster_with({"a": text, "b": encode(decision(3, 2), 4)[0]})
    assert tool._list_prefixes(client, ["a", "b"], out) == 0  # type: ignore[arg-type]
    foreign, own = out.getvalue().splitlines()
    assert foreign.startswith("a: its decision cannot be read: ")
    assert foreign.isprintable()
    assert own == "b: batch 5 of query, 2 tasks, 2 transactions, 2 of them not committed; 0 transactions open"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=20,
)
TEXTS = st.one_of(
    st.text(max_size=60),
    st.tuples(*[st.integers(-3, 1 << 64) | st.text(max_size=3)] * 5).map(
        lambda fields: " ".join(map(str, (FORMAT, *fields)))
    ),
    st.dictionaries(st.sampled_from(list(BODY)), JSON, min_size=1, max_size=3).map(
        lambda changes: changed(**changes)
    ),
    st.binary(max_size=60).map(chunk_of),
)


@settings(deadline=None)
@given(st.lists(TEXTS, min_size=1, max_size=3))
def test_any_text_is_a_decision_within_bounds_or_a_protocol_error(texts: list[str]) -> None:
    try:
        found = decode(texts)
    except ProtocolError:
        return
    assert found is not None
    assert decode(encode(found, 4)) == found
    assert str(found.batch).isprintable()
    assert {part.task for part in found.parts} <= set(range(1 << 31))
    assert all(found.marker_key(SCOPE, part).partition.partition < found.partitions for part in found.parts)


def test_decision_holds_100_000_transactions() -> None:
    part = Part(100_000, 0, ProducerEpoch(1 << 20, 9), RowsDigest(1 << 20, 1 << 30, (1 << 64) - 1))
    decided = replace(decision(3, 2), parts=(part,) * 100_000)
    assert decode(encode(decided, 4)) == decided


def test_decision_refuses_more_transactions_than_can_be_read_again() -> None:
    part = Part(1 << 20, 3, ProducerEpoch(1 << 50, 32_000), RowsDigest(1 << 50, 1 << 60, (1 << 64) - 1))
    with pytest.raises(TransactionError, match=r"100,000 transactions.*with fewer tasks"):
        encode(replace(decision(3, 2), parts=(part,) * 100_000), 4)


def test_a_decision_that_is_lost_entirely_is_left_out_of_what_was_written() -> None:
    """Catches: the next decision took it for written all the same, and its rows were nowhere."""
    first = after(None, app(4), 2, [part(0), part(1)])
    second = after(first, app(5), 2, [part(0), part(2)])
    assert str(second.before) == "4"
    assert str(second.written) == "4 to 5"
    third = after(lost(second, 0, 2), app(7), 1, [part(0)])
    assert str(third.written) == "4, 7"
    assert not third.covers(app(5))
    partly = after(lost(second, 0), app(7), 1, [part(0)])
    assert str(partly.written) == "4 to 5, 7"
    empty = after(first, app(5), 2, [])
    assert str(empty.written) == "4 to 5", "an empty version is written"
    assert not empty.is_lost


def test_rows_of_the_last_two_batches_that_were_written_are_known() -> None:
    decided = after(None, app(4), 1, [part(1)])
    for version in (5, 6):
        decided = after(decided, app(version), 1, [part(version)])
    numbers = [decided.numbers_up_to(version) for version in (4, 5, 6, 7)]
    assert [known and known.digest for known in numbers] == [None, part(5).digest, part(6).digest, None]
    decided = lost(decided, 6)
    numbers = [decided.numbers_up_to(version) for version in (4, 5, 6)]
    assert [known and known.digest for known in numbers] == [None, part(5).digest, None]


def test_a_repair_replaces_the_missing_parts_and_no_others() -> None:
    anew = replace(part(1), producer=ProducerEpoch(77, 7))
    mended = repaired(SCOPE, decision(3, 3), [anew])
    assert mended.parts == (part(0), anew, part(2))
    assert mended.number == 4


def test_task_role_follows_from_the_state_that_planning_found() -> None:
    driver_epoch = ProducerEpoch(1, 1)
    fresh, done, later = (BatchIdentity("query", number) for number in (6, 5, 7))
    whole = TaskHandover.of(SCOPE, Ownership(driver_epoch, decision(1, 3)), 0)
    assert [whole.role(batch, 0) for batch in (fresh, done)] == [TaskRole.WRITE, TaskRole.SKIP]
    broken = TaskHandover.of(SCOPE, Ownership(driver_epoch, lost(decision(1, 3), 1)), 0)
    assert [broken.role(done, task) for task in range(3)] == [
        TaskRole.SKIP,
        TaskRole.WRITE,
        TaskRole.SKIP,
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


def after(last: Decision | None, batch: BatchIdentity, tasks: int, parts: Iterable[Part]) -> Decision:
    return next_decision(SCOPE, LastDecision() if last is None else last.summary, batch, tasks, parts)


def handover(last: Decision | None) -> TaskHandover:
    return TaskHandover.of(SCOPE, Ownership(ProducerEpoch(1, 1), last), 0)


def test_a_version_of_which_nobody_knows_whether_it_was_written_is_refused() -> None:
    last = None
    for version in range(0, 400, 2):
        last = after(last, app(version), 1, [part(1)])
    given = handover(last)
    assert given.role(app(200), 0) is TaskRole.SKIP, "one of the last hundred"
    assert given.role(app(201), 0) is TaskRole.WRITE
    for version in (198, 197):
        with pytest.raises(ChangedBatchError, match=r"is not known.*another txnAppId"):
            given.role(app(version), 0)
    assert last is not None
    assert after(last, app(197), 1, ()).covers(app(197)), "it will be asked for again"


def test_a_query_that_goes_back_before_its_last_batch_is_refused() -> None:
    """Catches: batches of a checkpoint that was rewound or deleted were skipped, and their rows were lost."""
    last = ours = None
    for number in (5, 6):
        last = after(last, BatchIdentity.of_query("one", number), 1, [part(1)])
        ours = after(ours, app(number), 1, [part(1)])
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
        last = after(last, query, 1, [part(1)])
        last = after(last, replace(query, number=1), 1, [part(1)])
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
