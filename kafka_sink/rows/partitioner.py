"""Which partition a row goes to: the column, the key's hash, or the sticky one (KIP-480, KIP-794)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_sink.errors import InvalidRowError
from kafka_sink.records.arrays import null_mask
from kafka_sink.rows.columns import NO_PARTITION
from kafka_sink.rows.murmur2 import partitions_for

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TopicView:
    """A topic as the partitioner sees it. ``available`` partitions have a leader and take new rows;
    where there is none, all are treated alike. ``muted`` partitions rest, while others are available."""

    name: str
    partition_count: int
    available: tuple[int, ...]
    muted: tuple[int, ...] = ()


# Queued batches by partition of a topic, as told by the accumulator.
QueueLoads = Callable[[str, int], Sequence[int]]


@dataclass(slots=True)
class _Sticky:
    partition: int
    bytes: int


class Partitioner:
    """Keeps each topic's sticky partition between units. Used by one task thread.

    ``sticky_bytes`` go to a partition before the next is chosen (batch.size, as in Kafka).
    ``spread_keys`` is partitioner.spread.keys.when.muted.
    """

    def __init__(
        self,
        *,
        sticky_bytes: int,
        ignore_keys: bool,
        adaptive: bool,
        random: Callable[[], float],
        spread_keys: bool = False,
    ) -> None:
        self._sticky_bytes = sticky_bytes
        self._spread_keys = spread_keys
        self._ignore_keys = ignore_keys
        self._adaptive = adaptive
        self._random = random
        self._sticky: dict[str, _Sticky] = {}

    def chooses(self, key: pa.Array | None, explicit: Int32s | None) -> bool:
        """Whether ``assign`` is free to choose the partition of any of these rows."""
        if explicit is not None and not bool((explicit < 0).any()):
            return False
        return key is None or self._ignore_keys or self._spread_keys or key.null_count > 0

    def assign(
        self,
        key: pa.Array | None,
        explicit: Int32s | None,
        sizes: Int64s,
        topic: TopicView,
        loads: QueueLoads,
    ) -> Int32s:
        """Partitions of rows of one topic. ``sizes`` are the rows' bytes, ``explicit`` the partition
        column (-1 where null). Raises InvalidRowError for a partition that the topic does not have."""
        if explicit is not None:
            wrong = int(np.count_nonzero(explicit >= topic.partition_count))
            if wrong:
                raise InvalidRowError(
                    f"Invalid partition: column 'partition' has {int(explicit.max())} in a row for topic "
                    f"{topic.name!r}, whose partitions are 0 to {topic.partition_count - 1} "
                    f"({wrong} of {len(explicit)} rows are out of range)"
                )
        keyed = None if self._ignore_keys else key
        result: Int32s
        if keyed is None:
            result = np.full(len(sizes), NO_PARTITION, dtype=np.int32)
        else:
            result = partitions_for(keyed, topic.partition_count)
            if self._spread_keys and topic.muted:
                _spread(result, keyed, topic)
            if keyed.null_count:
                result[null_mask(keyed)] = NO_PARTITION
        if explicit is not None:
            result = np.where(explicit >= 0, explicit, result)
        if keyed is None or keyed.null_count or explicit is not None:
            free = np.flatnonzero(result < 0)
            if len(free):
                result[free] = self._assign_sticky(sizes[free], topic, loads)
        return result

    def _assign_sticky(self, sizes: Int64s, topic: TopicView, loads: QueueLoads) -> Int32s:
        """One step per switch: as many rows as reach ``sticky_bytes`` stay together."""
        result = np.empty(len(sizes), dtype=np.int32)
        cumulated = np.cumsum(sizes)
        choices = topic.available or tuple(range(topic.partition_count))
        state = self._sticky.get(topic.name)
        if state is None or state.partition not in choices:
            state = self._sticky[topic.name] = _Sticky(self._choose(choices, topic, loads, None), 0)
        at, before = 0, 0
        while at < len(sizes):
            room = self._sticky_bytes - state.bytes
            # The row that crosses the limit still belongs to this partition.
            end = min(int(np.searchsorted(cumulated, before + room, side="left")) + 1, len(sizes))
            result[at:end] = state.partition
            state.bytes += int(cumulated[end - 1]) - before
            before = int(cumulated[end - 1])
            at = end
            if state.bytes >= self._sticky_bytes:
                state.partition = self._choose(choices, topic, loads, state.partition)
                state.bytes = 0
        return result

    def _choose(
        self, choices: tuple[int, ...], topic: TopicView, loads: QueueLoads, current: int | None
    ) -> int:
        """The next partition: likelier the shorter its queue (KIP-794), uniform where that is off."""
        if len(choices) == 1:
            return choices[0]
        if not self._adaptive:
            others = [choice for choice in choices if choice != current]
            return others[int(self._random() * len(others))]
        queued = loads(topic.name, topic.partition_count)
        longest = max(queued[choice] for choice in choices)
        weights = list(accumulate(longest + 1 - queued[choice] for choice in choices))
        return choices[bisect_right(weights, self._random() * weights[-1])]


def _spread(result: Int32s, keyed: pa.Array, topic: TopicView) -> None:
    """Rows of a muted partition go to others, equal keys together (KIP-693's trade: their order)."""
    resting = np.flatnonzero(np.isin(result, topic.muted))
    if len(resting) and topic.available:
        others = np.array(topic.available, dtype=np.int32)
        result[resting] = others[partitions_for(keyed.take(pa.array(resting)), len(others))]
