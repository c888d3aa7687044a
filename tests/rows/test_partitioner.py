"""Which partition a row goes to; the murmur2 oracle is in tests/records/test_batch_header.py."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterable
from itertools import groupby, pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from kafka_sink.errors import InvalidRowError
from kafka_sink.model import PartitionMetadata, TopicMetadata, TopicPartition
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.rows.columns import extract
from kafka_sink.rows.murmur2 import partitions_for
from kafka_sink.rows.partitioner import BatchCapacity, Partitioner, QueueLoads, choices_of
from tests.support.topic_metadata import topic_of

SIZES = np.full(1000, 100, dtype=np.int64)


class Batches:
    """Open batches by partition: they take what rows of a given size fill them with, and close when full."""

    def __init__(self, size: float = 5000) -> None:
        self.size = size
        self.open: dict[int, float] = {}

    def capacity(self, partition: TopicPartition, row_bytes: float) -> BatchCapacity:
        held = self.open.get(partition.partition)
        return BatchCapacity(None if held is None else self.size - held, self.size)

    def append(self, partitions: Iterable[int], row_bytes: float) -> None:
        for partition in partitions:
            held = self.open.get(partition, 0.0) + row_bytes
            if held > self.size:
                held = row_bytes
            self.open[partition] = held
            if held == self.size:
                del self.open[partition]


def partitioner(
    *,
    ignore_keys: bool = False,
    adaptive: bool = False,
    seed: int = 1,
    batches: Batches | None = None,
    loads: QueueLoads | None = None,
) -> Partitioner:
    return Partitioner(
        capacity=(batches or Batches()).capacity,
        loads=loads or idle,
        ignore_keys=ignore_keys,
        adaptive=adaptive,
        random=random.Random(seed).random,
    )


def topic(count: int = 4) -> TopicMetadata:
    return topic_of("t", None, tuple(PartitionMetadata("t", number, 0, 0) for number in range(count)))


def idle(_topic: str, count: int) -> list[int]:
    return [0] * count


def assigned(
    of: Partitioner,
    key: pa.Array | None,
    explicit: npt.NDArray[np.int32] | None,
    sizes: npt.NDArray[np.int64],
    count: int = 4,
    available: tuple[int, ...] | None = None,
) -> npt.NDArray[np.int32]:
    """Partitions of rows for a topic with ``count``, all of which are available by default."""
    found = tuple(range(count)) if available is None else available
    return of.assign(key, explicit, sizes, topic(count), found)


def test_column_before_key_before_sticky() -> None:
    key = pa.array([b"a", b"a", None, None, b""] * 200, pa.binary())
    explicit = np.array([3, -1, 2, -1, -1] * 200, dtype=np.int32)
    found = assigned(partitioner(), key, explicit, SIZES)
    hashed = partitions_for(key, 4)
    assert set(found[0::5]) == {3}
    assert set(found[2::5]) == {2}
    assert (found[1::5] == hashed[1::5]).all()
    assert (found[4::5] == hashed[4::5]).all(), "an empty key is a key"
    assert ((found >= 0) & (found < 4)).all()
    # Keys can be ignored.
    key = pa.array([b"same"] * 1000, pa.binary())
    assert len(set(assigned(partitioner(ignore_keys=True), key, None, SIZES).tolist())) > 1


def test_a_partition_out_of_range_is_refused_with_its_count() -> None:
    explicit = np.array([0, 4, 9, -1] * 250, dtype=np.int32)
    with pytest.raises(InvalidRowError, match=r"has 9 in a row for topic 't'.*0 to 3 \(500 of 1000"):
        assigned(partitioner(), None, explicit, SIZES)


def runs(found: Iterable[int]) -> list[int]:
    """How many rows in a row went to one partition."""
    return [len(list(group)) for _, group in groupby(found)]


def test_keyless_rows_stick_to_the_end_of_a_batch_over_calls() -> None:
    batches = Batches()
    one = partitioner(batches=batches)
    found: list[int] = []
    for _ in range(10):
        chosen = assigned(one, None, None, SIZES[:130]).tolist()
        batches.append(chosen, 100)
        found += chosen
    assert runs(found) == [50] * 26, "50 rows of 100 bytes make 5000"
    # Rows that are larger than a batch get one each.
    assert runs(assigned(partitioner(batches=Batches(50)), None, None, SIZES[:20])) == [1] * 20


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        pytest.param(4000.0, [60, 60], id="10 rows fill the open batch, 50 more are a batch's worth"),
        pytest.param(100.0, [49, 49], id="one that is nearly empty is a batch's worth"),
    ],
)
def test_a_batch_that_was_begun_is_filled_before_one_of_its_own(held: float, expected: list[int]) -> None:
    batches = Batches()
    batches.open = dict.fromkeys(range(4), held)
    found = assigned(partitioner(batches=batches), None, None, SIZES[: 4 * expected[0]])
    assert runs(found)[:2] == expected


def test_rows_whose_batches_go_before_they_are_full_move_on_within_two_batches_worth() -> None:
    batches = Batches()
    one = partitioner(batches=batches)
    found: list[int] = []
    for _ in range(400):
        found += assigned(one, None, None, SIZES[:7]).tolist()
        batches.open.clear()  # linger is over
    assert 45 <= min(runs(found)[:-1]) <= max(runs(found)) <= 100


def test_keyless_rows_spread_evenly() -> None:
    found = assigned(partitioner(), None, None, np.full(100_000, 100, dtype=np.int64), 8)
    counts = Counter(found.tolist())
    assert set(counts) == set(range(8))
    assert max(counts.values()) < 1.3 * min(counts.values())
    # A longer queue gets less.
    loads = [0, 0, 9, 0]
    sizes = np.full(100_000, 100, dtype=np.int64)
    found = assigned(partitioner(adaptive=True, loads=lambda *_: loads), None, None, sizes)
    counts = Counter(found.tolist())
    assert counts[2] < 0.2 * counts[0]


def test_a_partition_that_became_unavailable_is_left_at_once() -> None:
    one = partitioner()
    first = int(assigned(one, None, None, SIZES[:1])[0])
    others = tuple(number for number in range(4) if number != first)
    found = assigned(one, None, None, SIZES, available=others)
    assert first not in found
    # With none available all are alike.
    found = assigned(partitioner(), None, None, SIZES, available=())
    assert len(set(found.tolist())) > 1


@pytest.mark.parametrize("counts", [(1, 1, 1), (1, 4, 7), (8, 2, 16)])
def test_rows_of_several_topics_go_where_those_of_each_topic_alone_would_go(counts: tuple[int, ...]) -> None:
    chance = random.Random(7)
    index = np.array([chance.randrange(len(counts)) for _ in SIZES], dtype=np.int32)
    key = pa.array([chance.randbytes(chance.randrange(20)) for _ in SIZES], pa.binary())
    found = partitioner().by_key(key, None, np.array(counts, dtype=np.int32), index, muted=False)
    assert found is not None
    for topic, count in enumerate(counts):
        mine = np.flatnonzero(index == topic)
        alone = assigned(partitioner(), key.take(pa.array(mine)), None, SIZES[mine], count)
        assert (found[mine] == alone).all()


def test_keys_do_not_decide_alone_where_rows_lack_one_or_name_a_partition() -> None:
    counts, index = np.array([4, 4], dtype=np.int32), np.array([0, 1], dtype=np.int32)
    key = pa.array([b"a", b"b"], pa.binary())
    one = partitioner()
    assert one.by_key(key, None, counts, index, muted=True) is not None, "mutes move no keys by default"
    assert one.by_key(pa.array([b"a", None], pa.binary()), None, counts, index, muted=False) is None
    assert one.by_key(None, None, counts, index, muted=False) is None
    assert one.by_key(key, np.array([0, -1], dtype=np.int32), counts, index, muted=False) is None
    assert partitioner(ignore_keys=True).by_key(key, None, counts, index, muted=False) is None


def test_thousands_of_topics_hash_their_keys_at_once() -> None:
    """Hashing topic by topic was a third of what a task takes for batches of a few rows."""
    names = [f"t{number}" for number in range(300)]
    infos = {name: (PartitionMetadata(name, 0, 0), PartitionMetadata(name, 1, 0)) for name in names}
    topics = {name: topic_of(name, None, found) for name, found in infos.items()}
    plan = ColumnPlan.of([("topic", "string"), ("key", "binary"), ("value", "binary")], None)
    keys = pa.array([b"%d" % number for number in range(600)], pa.binary())
    rows = extract(plan, pa.table({"topic": names * 2, "key": keys, "value": keys}), 0)
    with patch("kafka_sink.rows.partitioner.partitions_for", wraps=partitions_for) as hashed:
        ordered = partitioner().order(rows, topics, 0)
    assert [len(call.args[0]) for call in hashed.call_args_list] == [600]
    assert len(ordered) == 600
    homes = partitions_for(keys, 2).tolist()
    assert {TopicPartition(name, home) for name, home in zip(names * 2, homes, strict=True)} == {
        *ordered.partitions
    }


def test_muted_partitions_are_split_off_in_linear_time() -> None:
    """A look at all that are muted for each partition would take seconds."""
    muted = frozenset(TopicPartition("t", number) for number in range(15_000))
    wide = topic(30_000)
    started = time.thread_time()
    found = choices_of(wide, (), muted, ())
    assert time.thread_time() - started < 0.5
    assert (len(found.available), len(found.muted)) == (15_000, 15_000)


@pytest.mark.parametrize("rows", [5, 2000])
def test_the_next_rows_without_a_key_are_the_probe_of_a_muted_partition_once(rows: int) -> None:
    """Catches: at 20 kB/s a probe came 43 s after a mute, for an interval of 1.5 s: by chance, and only when
    the sticky partition had got its 512 KiB."""
    values = pa.record_batch({"value": pa.array([b"x" * 100] * rows, pa.binary())})
    table = extract(ColumnPlan.of([("value", "binary")], "t"), values, 0)
    topics, due, again = {"t": topic()}, TopicPartition("t", 2), TopicPartition("t", 3)
    one = partitioner(adaptive=True)

    def sent(**choice: Any) -> Counter[int]:
        ordered = one.order(table, topics, 0, **choice)
        sizes = [stop - start for start, stop in pairwise(ordered.starts)]
        return Counter({place.partition: size for place, size in zip(ordered.partitions, sizes, strict=True)})

    sent()
    assert 0 < sent(probes={due: 1.0})[2] <= 50, "a batch's worth"
    for _ in range(10):
        assert not sent(probes={due: 1.0})[2], "until it is probed again"
    assert sent(probes={due: 2.0, again: 2.0}, near={1})[2]
    assert sent(probes={due: 2.0, again: 2.0}, near={1})[3] or rows > 5
    assert not sent(muted={due}, probes={due: 3.0})[2], "as another thread has just changed them"


def test_rows_stay_in_the_rack_while_it_has_a_leader_that_takes_them() -> None:
    """Catches: rows for another zone without need, and rows that avoid their zone's last way out."""
    led = topic_of("t", None, tuple(PartitionMetadata("t", number, number % 3) for number in range(6)))
    values = pa.record_batch({"value": pa.array([b"x" * 100] * 2000, pa.binary())})
    rows = extract(ColumnPlan.of([("value", "binary")], "t"), values, 0)

    def chosen(near: set[int], muted: Iterable[int] = (), unavailable: Iterable[int] = ()) -> set[int]:
        mutes = {TopicPartition("t", number) for number in muted}
        one = partitioner(adaptive=True)
        ordered = one.order(rows, {"t": led}, 0, frozenset(unavailable), mutes, frozenset(near))
        return {place.partition for place in ordered.partitions}

    assert chosen(near=set()) == {0, 1, 2, 3, 4, 5}
    assert chosen(near={1}) == {1, 4}
    assert chosen(near={1}, muted={4}) == {1}
    assert chosen(near={1}, muted={1, 4}) == {0, 2, 3, 5}
    assert chosen(near={1}, unavailable={1}) == {0, 2, 3, 5}
    assert chosen(near={9}) == {0, 1, 2, 3, 4, 5}
