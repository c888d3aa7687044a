"""Chooses each row's partition: from its column, by its key's hash, or the sticky one (KIP-480, KIP-794)."""

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

# The size of a timestamp delta of up to an hour and a half.
_DELTA_BYTES = 3


class Choices(NamedTuple):
    """The partitions of a topic to which new rows may go.

    ``available`` partitions have a leader and accept new rows; if it is empty, all partitions do. ``muted``
    partitions get no new rows. It is empty if nothing else is available, because they are then used. Each of
    ``probes`` is muted as well, but gets the rows of one sticky batch, which show whether it works again.
    """

    available: tuple[int, ...]
    muted: tuple[int, ...] = ()
    probes: tuple[int, ...] = ()


def choices_of(
    topic: TopicMetadata,
    unavailable: Collection[int],
    muted: Container[TopicPartition],
    near: Container[int],
    probes: Container[TopicPartition] = (),
) -> Choices:
    """The available partitions, without those that are muted or led by an unavailable broker. If ``near``
    brokers lead some of them, only those are returned. If none would be left, mutes are ignored."""
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
    due: tuple[int, ...] = ()
    if probes:
        due = tuple(number for number in available if TopicPartition(topic.name, number) in probes)
        avoided = frozenset(due)
        available = [number for number in available if number not in avoided] or available
    preferred = [number for number in available if leaders[number] in near]
    return Choices(tuple(preferred or available), resting, due)


class BatchCapacity(NamedTuple):
    """How many uncompressed bytes of records fit, according to the estimated compression ratio. ``open`` is
    how many fit the partition's open batch; None if no batch is open. ``new`` is for a new batch."""

    open: float | None
    new: float


# Returns the number of queued batches of each partition of a topic. The accumulator provides it.
QueueLoads = Callable[[str, int], Sequence[int]]


# Returns how many bytes of rows of a given average size fit the batches of a partition.
CapacityOf = Callable[[TopicPartition, float], BatchCapacity]
# The sticky partition changes at the end of a batch. Before that it gets at least (because estimates are not
# exact to the row) and at most this many batches' worth of rows.
_MIN_BATCHES = 0.9
_MAX_BATCHES = 2.0
_NO_PROBES: Mapping[TopicPartition, float] = {}


@dataclass(slots=True)
class _StickyPartition:
    """A topic's current partition. ``batches_given`` is how many batches' worth of rows it has got."""

    partition: int
    batches_given: float = 0.0


class Partitioner:
    """Assigns partitions to rows, and keeps each topic's sticky partition. For one task's thread.

    A partition gets rows for one batch, according to the estimated compression, and then up to the end of
    that batch, but never more than for two batches (as in Kafka's BuiltInPartitioner). ``capacity`` returns
    how many rows still fit a batch. ``spread_keys`` is the option partitioner.spread.keys.when.muted.
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
        # ``MutedPartitions.probes``, and those of them that have got their rows.
        self._probes: Mapping[TopicPartition, float] = {}
        self._probed: dict[TopicPartition, float] = {}

    def chooses(self, key: pa.Array | None, explicit: Int32s | None) -> tuple[bool, bool]:
        """Whether ``assign`` may choose the partitions of some of these rows, and whether of all. In the
        second case nothing else decides where the rows go, so that all may move elsewhere."""
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
        probes: Mapping[TopicPartition, float] = _NO_PROBES,
    ) -> OrderedRows:
        """Assign partitions and order the rows by partition. The rows of one partition keep their order.

        ``now_ms`` is the wall clock, the timestamp of rows without one. Rows without keys avoid partitions
        that are ``muted`` or led by an ``unavailable`` broker, if there are other partitions, and prefer
        partitions led by ``near`` brokers. The first of these rows, up to a batch's worth, go to one of the
        ``probes`` (see ``MutedPartitions``). Raises InvalidRowError for a partition that does not exist.
        """
        self._probes = probes
        self._probed = {name: number for name, number in self._probed.items() if probes.get(name) == number}
        columns = RecordColumns.of(rows.key, rows.value, rows.headers)
        counts = np.array([len(topics[name].partitions.leaders) for name in rows.topics], dtype=np.int32)
        bases = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=bases[1:])
        slots: Int32s | None = None
        if rows.topic_index is not None:
            slots = self.by_key(rows.key, rows.partition, counts, rows.topic_index, muted=bool(muted))
            if slots is not None:
                slots += bases[rows.topic_index]
        chooses, are_movable = self.chooses(rows.key, rows.partition)
        choices_of_topics: list[Choices] = []
        # With thousands of topics, the choices cost more than the rows. With keys, only mutes need them.
        if slots is None or muted:
            choices_of_topics = [
                choices_of(topics[name], unavailable, muted, near, probes) for name in rows.topics
            ]
        if slots is None:
            # Sizes are upper bounds, so that rows fit the batch. Only a choice needs them.
            sizes = (columns.upper_bounds(_DELTA_BYTES) if chooses else columns.value_lengths).numbers()
            of = [topics[name] for name in rows.topics]
            if rows.topic_index is None:
                slots = self.assign(rows.key, rows.partition, sizes, of[0], *choices_of_topics[0])
            else:
                slots = self._slots(rows, rows.topic_index, sizes, of, choices_of_topics, bases)
        resting = [
            int(bases[i]) + number for i, choices in enumerate(choices_of_topics) for number in choices.muted
        ]
        return by_partition(rows, columns, slots, bases, resting, now_ms=now_ms, are_movable=are_movable)

    def by_key(
        self,
        key: pa.Array | None,
        explicit: Int32s | None,
        partition_counts: Int32s,
        topic_index: Int32s,
        *,
        muted: bool,
    ) -> Int32s | None:
        """The partitions of rows of several topics if only their keys decide; None otherwise.

        Row i belongs to topic ``topic_index[i]``, and ``partition_counts`` has the number of partitions of
        each topic. ``muted`` is whether any partition is muted.
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
        """A number for each row that identifies its topic and partition."""
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
        probes: tuple[int, ...] = (),
    ) -> Int32s:
        """The partitions of rows of one topic.

        ``sizes`` are the sizes of the rows' records. ``explicit`` is the partition column, with -1 for null.
        ``available``, ``muted`` and ``probes`` are those of ``Choices``. Raises InvalidRowError for a
        partition that the topic does not have.
        """
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
        if keyed is None and explicit is None:
            return self._assign_sticky(sizes, topic.name, count, available, probes)
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
                result[free] = self._assign_sticky(sizes[free], topic.name, count, available, probes)
        return result

    def _assign_sticky(
        self, sizes: Ints, topic: str, count: int, available: tuple[int, ...], probes: tuple[int, ...]
    ) -> Int32s:
        """The partitions of rows without a key.

        Each step gives one partition rows up to the end of a batch, and then chooses the next partition. A
        probe that is due comes first, so that even a few rows probe a muted partition in time.
        """
        result = np.empty(len(sizes), dtype=np.int32)
        cumulated = np.cumsum(sizes, dtype=np.int64)
        row_bytes = float(cumulated[-1]) / len(sizes)
        choices = available or tuple(range(count))
        state = self._sticky.get(topic)
        probe = self._next_probe(topic, probes)
        if probe is not None:
            state = self._sticky[topic] = _StickyPartition(probe)
        elif state is None or state.partition not in choices:
            state = self._sticky[topic] = _StickyPartition(self._choose(choices, topic, count, None))
        ended: set[int] = set()
        at, before = 0, 0
        while at < len(sizes):
            capacity = self._capacity(TopicPartition(topic, state.partition), row_bytes)
            if state.partition in ended:
                # Earlier rows of this table already fill the partition's open batch.
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
                probe = self._next_probe(topic, probes)
                state.partition = (
                    self._choose(choices, topic, count, state.partition) if probe is None else probe
                )
                state.batches_given = 0.0
        return result

    def _next_probe(self, topic: str, probes: tuple[int, ...]) -> int | None:
        """A muted partition that gets the next rows; it gets no others before its next probe."""
        for number in probes:
            name = TopicPartition(topic, number)
            if name not in self._probed:
                self._probed[name] = self._probes[name]
                return number
        return None

    def _choose(self, choices: tuple[int, ...], topic: str, count: int, current: int | None) -> int:
        """Choose the next partition: likelier a short queue (KIP-794), unless switched off."""
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
    """How many more bytes the sticky partition gets before it changes; 0 if it changes now. They end where a
    batch ends: at the end of the open batch or, below ``_MIN_BATCHES``, of the next."""
    if capacity.open is None and batches_given >= _MIN_BATCHES:
        return 0.0
    to_end = capacity.new if capacity.open is None else capacity.open
    if batches_given * capacity.new + to_end < _MIN_BATCHES * capacity.new:
        to_end += capacity.new
    return max(0.0, min(to_end, (_MAX_BATCHES - batches_given) * capacity.new))


def _spread(result: Int32s, keyed: pa.Array, available: tuple[int, ...], muted: tuple[int, ...]) -> None:
    """Send rows of muted partitions to other partitions; equal keys stay together, out of order (KIP-693)."""
    affected = np.flatnonzero(np.isin(result, muted))
    if len(affected) and available:
        others = np.array(available, dtype=np.int32)
        result[affected] = others[partitions_for(keyed.take(pa.array(affected)), len(others))]
