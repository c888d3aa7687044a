"""Which partition a row goes to: the column, the key's hash, or the sticky one (KIP-480, KIP-794)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from kafka_sink.errors import InvalidRowError
from kafka_sink.model import TopicMetadata, TopicPartition
from kafka_sink.records.arrays import Int32s, indices, null_mask
from kafka_sink.records.ordered_rows import OrderedRows
from kafka_sink.records.record_columns import Ints, RecordColumns
from kafka_sink.rows.columns import NO_PARTITION, RowBatch
from kafka_sink.rows.murmur2 import partitions_for
from kafka_sink.rows.ordering import by_partition, stable_order

# Bytes of a timestamp delta of up to an hour and a half.
_DELTA_BYTES = 3


class Choices(NamedTuple):
    """Partitions of a topic that new rows may go to.

    ``available`` ones have a leader and take new rows; if there are none, all partitions do. ``muted`` ones
    get no new rows; they are listed only if others are available.
    """

    available: tuple[int, ...]
    muted: tuple[int, ...] = ()


def choices_of(
    topic: TopicMetadata,
    unavailable: Collection[int],
    muted: Container[TopicPartition],
    near: Container[int],
) -> Choices:
    """Without partitions that are muted, or led by an unavailable broker; of the others those that ``near``
    brokers lead, if there are any."""
    leaders = topic.partitions.leaders
    available = [number for number, leader in enumerate(leaders) if leader >= 0 and leader not in unavailable]
    resting: tuple[int, ...] = ()
    if muted:
        resting = tuple(n for n in range(len(leaders)) if TopicPartition(topic.name, n) in muted)
        avoided = frozenset(resting)
        others = [number for number in available if number not in avoided]
        if others:
            available = others
        else:
            resting = ()
    return Choices(tuple([number for number in available if leaders[number] in near] or available), resting)


class BatchCapacity(NamedTuple):
    """How many uncompressed bytes of records fit, by the estimated compression ratio.

    ``open`` is for the partition's open batch, None if it has no open batch. ``new`` is for a new batch.
    """

    open: float | None
    new: float


# Queued batches by partition of a topic, from the accumulator.
QueueLoads = Callable[[str, int], Sequence[int]]


# How many bytes of rows of a given average size a partition's batches still take.
CapacityOf = Callable[[TopicPartition, float], BatchCapacity]
# A sticky partition changes at the end of a batch, after this many batches' worth of rows at least (estimates
# are not exact to the row) and at most.
_MIN_BATCHES = 0.9
_MAX_BATCHES = 2.0


@dataclass(slots=True)
class _StickyPartition:
    """A topic's current partition. ``batches_given``: batches' worth of rows that it got so far."""

    partition: int
    batches_given: float = 0.0


class Partitioner:
    """Keeps each topic's sticky partition between tables. Used by one task thread.

    A partition gets a batch's worth of rows, by the estimate of what they compress to, and then up to that
    batch's end, but never more than two batches' worth (Kafka's BuiltInPartitioner). ``capacity`` says
    how much a batch still takes.
    ``spread_keys`` is partitioner.spread.keys.when.muted.
    """

    def __init__(
        self,
        *,
        capacity: CapacityOf,
        loads: QueueLoads,
        ignore_keys: bool,
        adaptive: bool,
        random: Callable[[], float],
        spread_keys: bool = False,
    ) -> None:
        self._capacity = capacity
        self._loads = loads
        self._spread_keys = spread_keys
        self._ignore_keys = ignore_keys
        self._adaptive = adaptive
        self._random = random
        self._sticky: dict[str, _StickyPartition] = {}

    def chooses(self, key: pa.Array | None, explicit: Int32s | None) -> tuple[bool, bool]:
        """Whether ``assign`` is free to choose the partition of any of these rows; and whether nothing else
        decides where they go, so that all of them may move."""
        fewest = most = True
        if explicit is not None:
            chosen = explicit < 0
            fewest, most = bool(chosen.all()), bool(chosen.any())
        if key is None or self._ignore_keys:
            return most, fewest
        return most and (self._spread_keys or key.null_count > 0), fewest and key.null_count == len(key)

    def order(
        self,
        rows: RowBatch,
        topics: Mapping[str, TopicMetadata],
        now_ms: int,
        unavailable: Collection[int] = (),
        muted: Container[TopicPartition] = (),
        near: Container[int] = (),
    ) -> OrderedRows:
        """Assign partitions and order the rows by them; rows of one partition keep their order.

        ``now_ms`` is the wall clock, the timestamp of rows without one. Rows without keys avoid partitions
        that are ``muted`` or led by an ``unavailable`` broker, if others are left, and of those prefer the
        ones led by ``near`` brokers. Raises InvalidRowError for a partition that does not exist.
        """
        columns = RecordColumns.of(rows.key, rows.value, rows.headers)
        counts = np.array([len(topics[name].partitions.leaders) for name in rows.topics], dtype=np.int32)
        bases = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=bases[1:])
        slots: Int32s | None = None
        if rows.topic_index is not None:
            slots = self.by_key(rows.key, rows.partition, counts, rows.topic_index, muted=bool(muted))
            if slots is not None:
                slots += bases[rows.topic_index]
        chooses, free = self.chooses(rows.key, rows.partition)
        found: list[Choices] = []
        # Those of thousands of topics cost more than their rows, which need them only for muted partitions.
        if slots is None or muted:
            found = [choices_of(topics[name], unavailable, muted, near) for name in rows.topics]
        if slots is None:
            # An upper bound, so that a batch takes what its partition is given. Only a free choice needs it.
            sizes = (columns.upper_bounds(_DELTA_BYTES) if chooses else columns.value_lengths).numbers()
            of = [topics[name] for name in rows.topics]
            if rows.topic_index is None:
                slots = self.assign(rows.key, rows.partition, sizes, of[0], *found[0])
            else:
                slots = self._slots(rows, rows.topic_index, sizes, of, found, bases)
        resting = [int(bases[i]) + number for i, choices in enumerate(found) for number in choices.muted]
        return by_partition(rows, columns, slots, bases, resting, now_ms=now_ms, free=free)

    def by_key(
        self,
        key: pa.Array | None,
        explicit: Int32s | None,
        partition_counts: Int32s,
        topic_index: Int32s,
        *,
        muted: bool,
    ) -> Int32s | None:
        """Partitions of rows of several topics, chosen by key alone; None if something else plays a part.

        Row i belongs to topic ``topic_index[i]``, which has so many partitions. ``muted``: whether any is.
        """
        if key is None or self._ignore_keys or key.null_count or explicit is not None:
            return None
        if self._spread_keys and muted:
            return None
        if int(partition_counts.max()) == 1:
            return np.zeros(len(key), dtype=np.int32)
        return partitions_for(key, partition_counts[topic_index])

    def _slots(
        self,
        rows: RowBatch,
        topic_index: Int32s,
        sizes: Ints,
        topics: list[TopicMetadata],
        choices: list[Choices],
        bases: Int32s,
    ) -> Int32s:
        """One number per row, which identifies its topic and partition."""
        order = stable_order(topic_index, len(topics))
        key = None if rows.key is None else rows.key.take(indices(order))
        ends = np.cumsum(np.bincount(topic_index, minlength=len(topics)))
        slots = np.empty(rows.num_rows, dtype=np.int32)
        start = 0
        for index, end in enumerate(ends.tolist()):
            if start == end:
                continue
            chosen = order[start:end]
            assigned = self.assign(
                None if key is None else key.slice(start, end - start),
                None if rows.partition is None else rows.partition[chosen],
                sizes[chosen],
                topics[index],
                *choices[index],
            )
            slots[chosen] = assigned + int(bases[index])
            start = end
        return slots

    def assign(
        self,
        key: pa.Array | None,
        explicit: Int32s | None,
        sizes: Ints,
        topic: TopicMetadata,
        available: tuple[int, ...],
        muted: tuple[int, ...] = (),
    ) -> Int32s:
        """Partitions of rows of one topic. ``sizes`` are their records' bytes, ``explicit`` the partition
        column (-1 where null). ``available`` and ``muted`` are as in ``Choices``. Raises InvalidRowError for
        a partition that the topic does not have."""
        count = len(topic.partitions.leaders)
        if explicit is not None:
            wrong = int(np.count_nonzero(explicit >= count))
            if wrong:
                raise InvalidRowError(
                    f"Invalid partition: column 'partition' has {int(explicit.max())} in a row for topic "
                    f"{topic.name!r}, whose partitions are 0 to {count - 1} "
                    f"({wrong} of {len(explicit)} rows are out of range)"
                )
        keyed = None if self._ignore_keys else key
        result: Int32s
        if keyed is None:
            result = np.full(len(sizes), NO_PARTITION, dtype=np.int32)
        else:
            result = partitions_for(keyed, count)
            if self._spread_keys and muted:
                _spread(result, keyed, available, muted)
            if keyed.null_count:
                result[null_mask(keyed)] = NO_PARTITION
        if explicit is not None:
            result = np.where(explicit >= 0, explicit, result)
        if keyed is None or keyed.null_count or explicit is not None:
            free = np.flatnonzero(result < 0)
            if len(free):
                result[free] = self._assign_sticky(sizes[free], topic.name, count, available)
        return result

    def _assign_sticky(self, sizes: Ints, topic: str, count: int, available: tuple[int, ...]) -> Int32s:
        """Partitions of rows without a key. Each step gives one partition rows up to a batch's end, then
        switches to the next."""
        result = np.empty(len(sizes), dtype=np.int32)
        cumulated = np.cumsum(sizes, dtype=np.int64)
        row_bytes = float(cumulated[-1]) / len(sizes)
        choices = available or tuple(range(count))
        state = self._sticky.get(topic)
        if state is None or state.partition not in choices:
            state = self._sticky[topic] = _StickyPartition(self._choose(choices, topic, count, None))
        ended: set[int] = set()
        at, before = 0, 0
        while at < len(sizes):
            capacity = self._capacity(TopicPartition(topic, state.partition), row_bytes)
            if state.partition in ended:
                # The rows before them in this table fill the batch that is open.
                capacity = BatchCapacity(None, capacity.new)
            limit = before + _bytes_before_switch(state.batches_given, capacity)
            end = int(np.searchsorted(cumulated, limit, side="right"))
            if end == at and not state.batches_given:
                end = at + 1  # A row larger than a batch.
            if end > at:
                result[at:end] = state.partition
                state.batches_given += (int(cumulated[end - 1]) - before) / max(capacity.new, 1.0)
                before, at = int(cumulated[end - 1]), end
            if at < len(sizes):
                ended.add(state.partition)
                state.partition = self._choose(choices, topic, count, state.partition)
                state.batches_given = 0.0
        return result

    def _choose(self, choices: tuple[int, ...], topic: str, count: int, current: int | None) -> int:
        """The next partition: likelier the shorter its queue (KIP-794), or all alike if that is off."""
        if len(choices) == 1:
            return choices[0]
        if not self._adaptive:
            others = [choice for choice in choices if choice != current]
            return others[int(self._random() * len(others))]
        queued = self._loads(topic, count)
        longest = max(queued[choice] for choice in choices)
        weights = list(accumulate(longest + 1 - queued[choice] for choice in choices))
        return choices[bisect_right(weights, self._random() * weights[-1])]


def _bytes_before_switch(batches_given: float, capacity: BatchCapacity) -> float:
    """How many more bytes the sticky partition gets before it changes; 0 if it changes now.

    They end where a batch ends: the open one or, if that would be less than ``_MIN_BATCHES``, the next.
    """
    if capacity.open is None and batches_given >= _MIN_BATCHES:
        return 0.0
    to_end = capacity.new if capacity.open is None else capacity.open
    if batches_given * capacity.new + to_end < _MIN_BATCHES * capacity.new:
        to_end += capacity.new
    return max(0.0, min(to_end, (_MAX_BATCHES - batches_given) * capacity.new))


def _spread(result: Int32s, keyed: pa.Array, available: tuple[int, ...], muted: tuple[int, ...]) -> None:
    """Rows of a muted partition go to others, equal keys together (KIP-693's trade: their order)."""
    affected = np.flatnonzero(np.isin(result, muted))
    if len(affected) and available:
        others = np.array(available, dtype=np.int32)
        result[affected] = others[partitions_for(keyed.take(pa.array(affected)), len(others))]
