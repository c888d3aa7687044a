"""With errors.tolerance=all: takes rows that can never be written out of a table, as dead letters.

While all rows are valid this costs nothing: the errors that would fail the task name the invalid rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_sink import timing_bounds
from kafka_sink.clock import Clock
from kafka_sink.dead_letters.collector import DeadLetters
from kafka_sink.errors import (
    InvalidRowError,
    MetadataTimeoutError,
    MissingPartitionError,
    TopicRefusedError,
)
from kafka_sink.metadata.cluster_metadata import ClusterMetadata
from kafka_sink.model import TopicMetadata
from kafka_sink.records.arrays import indices
from kafka_sink.records.ordered_rows import OrderedRows
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.rows.columns import RowBatch
from kafka_sink.rows.ordering import partitions_needed
from kafka_sink.rows.refused_columns import rows_of_table

# Brokers learn of an added partition one by one. After this time a partition that is still unknown does not
# exist.
PARTITION_WAIT_MS = 5000.0
_LOOK_MS = 100.0

Order = Callable[[ColumnPlan, pa.Table], OrderedRows]


class RowRejection:
    """Used by the task's thread. ``max_block_ms`` is max.block.ms, ``max_age_ms`` metadata.max.age.ms."""

    def __init__(
        self,
        dead_letters: DeadLetters,
        cluster: ClusterMetadata,
        clock_ms: Clock,
        max_block_ms: float,
        max_age_ms: float,
    ) -> None:
        self._dead_letters = dead_letters
        self._cluster = cluster
        self._clock_ms = clock_ms
        self._max_block_ms = max_block_ms
        self._max_age_ms = max_age_ms
        # Until when a topic is known to have no more than so many partitions.
        self._confirmed: dict[str, tuple[int, float]] = {}

    def order(self, plan: ColumnPlan, table: pa.RecordBatch | pa.Table, order: Order) -> OrderedRows | None:
        """``order`` of the valid rows; None if there are none.

        Raises what ``order`` raises about anything but rows, and TooManyDeadLettersError.
        """
        left = table if isinstance(table, pa.Table) else pa.Table.from_batches([table])
        while left.num_rows:
            try:
                return order(plan, left)
            except InvalidRowError as error:
                if error.rows is None or not error.rows.any():
                    raise
                self._dead_letters.add(rows_of_table(plan, left, error))
                left = left.take(indices(np.flatnonzero(~error.rows)))
        return None

    def await_topics(self, rows: RowBatch, check: Callable[[], None]) -> dict[str, TopicMetadata]:
        """Metadata of the rows' topics. Waits for missing partitions for 5 s, for those of all topics at
        once, and again only after metadata.max.age.ms. A topic that is not authorized is asked for as long.

        Raises MetadataTimeoutError after max.block.ms, InvalidRowError with the rows for a topic that can
        never be written or a partition that does not exist.
        """
        try:
            topics = self._cluster.await_topics(
                rows.topics,
                self._max_block_ms,
                check,
                refusal_wait_ms=min(timing_bounds.REFUSED_TOPIC_MS, self._max_block_ms / 2),
            )
        except TopicRefusedError as error:
            error.rows = _rows_of(rows, error.topic)
            raise
        needed = partitions_needed(rows)
        doubtful = {name: count for name, count in needed.items() if self._is_doubtful(topics[name], count)}
        if doubtful:
            topics |= self._await_partitions(doubtful, check)
        for name, count in needed.items():
            exists = len(topics[name].partitions)
            if count > exists and rows.partition is not None:
                reason = f"topic {name!r} has only partitions 0 to {exists - 1}"
                missing = _rows_of(rows, name) & (rows.partition >= exists)
                raise MissingPartitionError(reason, missing)
        return topics

    def _await_partitions(
        self, needed: dict[str, int], check: Callable[[], None]
    ) -> dict[str, TopicMetadata]:
        """Metadata of these topics, with all partitions or newer than this call.

        Raises MetadataTimeoutError after max.block.ms without any.
        """
        started_ms = self._clock_ms()
        with suppress(MissingPartitionError):
            # One wait for all of them.
            wait_ms = min(PARTITION_WAIT_MS, self._max_block_ms)
            return self._cluster.await_topics(needed, wait_ms, check, needed)
        # Only a broker's response shows that there is no such partition.
        while old := [name for name in needed if self._age_ms(name) > self._clock_ms() - started_ms]:
            if self._clock_ms() - started_ms >= self._max_block_ms:
                raise MetadataTimeoutError(
                    f"no broker said within kafka.max.block.ms = {self._max_block_ms:.0f} ms whether topic "
                    f"{old[0]!r} has the partitions that rows name"
                )
            check()
            with suppress(MissingPartitionError):
                self._cluster.await_topics(old, _LOOK_MS, check, needed)
        found = {name: self._cluster.topic(name) for name in needed}
        until_ms = self._clock_ms() + self._max_age_ms
        for name, topic in found.items():
            if topic is not None:
                self._confirmed[name] = (len(topic.partitions), until_ms)
        return {name: topic for name, topic in found.items() if topic is not None}

    def _age_ms(self, topic: str) -> float:
        """How old the topic's metadata is."""
        known = self._cluster.snapshot([topic], self._clock_ms()).topics
        return known[0].age_ms if known else math.inf

    def _is_doubtful(self, topic: TopicMetadata, needed: int) -> bool:
        """Whether the topic is known with fewer partitions, and this was not confirmed recently."""
        exists = len(topic.partitions)
        count, until_ms = self._confirmed.get(topic.name, (0, 0.0))
        return needed > exists and not (count == exists and self._clock_ms() < until_ms)


def _rows_of(rows: RowBatch, topic: str) -> npt.NDArray[np.bool_]:
    if rows.topic_index is None:
        return np.ones(rows.num_rows, dtype=np.bool_)
    mask: npt.NDArray[np.bool_] = rows.topic_index == rows.topics.index(topic)
    return mask
