"""How many rows a batch takes and how much memory they need, as learnt from the batches before it."""

from __future__ import annotations

from kafka_sink.accumulator.batch_limits import BatchLimits, BatchSizeLimits
from kafka_sink.accumulator.batch_queues import TooLargeBatch
from kafka_sink.accumulator.producer_batch import ProducerBatch, projected_size
from kafka_sink.accumulator.record_accumulator import AccumulatorSettings
from kafka_sink.records import batch_header, encoder
from kafka_sink.records.compression import PACKER, BlockCodec, CompressionRatios, WholeCodec
from kafka_sink.records.ordered_rows import OrderedRows

# A whole-batch codec joins a batch's raw rows once, outside the pool: that copy must stay small.
_WHOLE_RAW_LIMIT = 4 << 20


class SizeEstimates:
    """Limits and compression ratios by topic; used by the task's thread alone. Sizes are bytes."""

    def __init__(
        self,
        settings: AccumulatorSettings,
        codec: BlockCodec | WholeCodec | None,
        size_limits: BatchSizeLimits,
    ) -> None:
        self._compression = settings.compression
        self._codec = codec
        self._size_limits = size_limits
        batch_size = settings.batch_size
        raw_limit = max(batch_size, _WHOLE_RAW_LIMIT) if isinstance(codec, WholeCodec) else None
        self._default = BatchLimits(batch_size, raw_limit)
        # The lowest of all topics' limits so far.
        self._lowest_limit = batch_size
        # By topic; lower ones where brokers refused a batch within batch.size.
        self._by_topic: dict[str, BatchLimits] = {}
        self._ratios = CompressionRatios()
        # What packed rows of a topic shrank to last.
        self._packed_ratios: dict[str, float] = {}

    # -- learning -----------------------------------------------------------------------------------

    def observe(self, batch: ProducerBatch) -> None:
        """Learn the compression ratio of a sealed batch."""
        if self._codec is None:
            return
        self._ratios.observe(batch.partition.topic, batch.compression, batch.observed_ratio)

    def observe_packing(self, batch: ProducerBatch) -> None:
        """Learn the ratio of a batch's packed blocks."""
        self._packed_ratios[batch.partition.topic] = batch.packed_ratio

    def learn_from(self, refused: list[TooLargeBatch]) -> None:
        """As Kafka's producer does, starts over with the estimate that proved too low; and takes over the
        topic's limit, which may be lower now."""
        for batch in refused:
            self._ratios.relearn(batch.topic, self._compression, batch.ratio)
            self._by_topic.pop(batch.topic, None)

    # -- asking -------------------------------------------------------------------------------------

    def ratio(self, topic: str) -> float:
        """Compressed bytes per raw byte."""
        return 1.0 if self._codec is None else self._ratios.estimate(topic, self._compression)

    def packed_ratio(self, topic: str) -> float:
        """What PACKER's blocks of the topic's rows shrink to."""
        return self._packed_ratios.get(topic, 1.0)

    def limits_of(self, topic: str) -> BatchLimits:
        """The limits of the topic's batches."""
        found = self._by_topic.get(topic)
        if found is None:
            limit = self._size_limits.of(topic)
            found = self._default
            if limit != found.write_limit:
                found = BatchLimits(limit, found.raw_limit)
                self._lowest_limit = min(self._lowest_limit, limit)
            self._by_topic[topic] = found
        return found

    def rows_that_fit(self, ordered: OrderedRows, start: int, stop: int, batch: ProducerBatch) -> int:
        """First row from ``start`` on that an open batch does not take."""
        return self.limits_of(batch.partition.topic).rows_that_fit(
            ordered,
            start,
            stop,
            raw_bytes=batch.raw_bytes,
            record_count=batch.record_count,
            base_timestamp=batch.base_timestamp,
            factor=self._factor(batch.ratio),
        )

    def rows_for_new_batch(self, ordered: OrderedRows, start: int, stop: int, topic: str) -> int:
        """First row from ``start`` on that a new batch does not take."""
        return self.limits_of(topic).rows_that_fit(
            ordered,
            start,
            stop,
            raw_bytes=0,
            record_count=0,
            base_timestamp=ordered.timestamp(start),
            factor=self._factor(self.ratio(topic)),
        )

    def is_full(self, batch: ProducerBatch) -> bool:
        """Whether an open batch takes no further row, however small."""
        # Most batches are far from it: runs are short where partitions are many.
        if 2 * batch.raw_bytes < self._lowest_limit:
            return False
        return self.limits_of(batch.partition.topic).reached(
            raw_bytes=batch.raw_bytes, record_count=batch.record_count, factor=self._factor(batch.ratio)
        )

    def room_in(self, batch: ProducerBatch, row_bytes: float) -> float:
        """Bytes of rows of about ``row_bytes`` that an open batch still takes."""
        return self.limits_of(batch.partition.topic).room(
            raw_bytes=batch.raw_bytes, factor=self._factor(batch.ratio), row_bytes=row_bytes
        )

    def room_in_new_batch(self, topic: str, row_bytes: float) -> float:
        """Bytes of rows of about ``row_bytes`` that a new batch takes."""
        factor = self._factor(self.ratio(topic))
        return self.limits_of(topic).room(raw_bytes=0, factor=factor, row_bytes=row_bytes)

    def new_batch_bytes(self, ordered: OrderedRows, start: int, stop: int, topic: str) -> int:
        """Bytes that a new batch will hold with rows ``start`` to ``stop``, which it has room for. With a
        whole-batch codec they are held raw."""
        if self._codec is None:
            return ordered.exact_hold(start, stop, self.limits_of(topic).write_limit)
        added = ordered.bound(start, stop)
        if isinstance(self._codec, BlockCodec):
            body = batch_header.SIZE + len(self._codec.prologue)
            return projected_size(self._codec, self.ratio(topic), body, added)
        return batch_header.SIZE + added

    def new_batch_bytes_of_run(self, topic: str, rows: int, bound: int, largest_bound: int) -> int | None:
        """As ``new_batch_bytes`` for a run of ``bound`` bytes at most that a new batch surely takes whole, by
        bounds alone; None where it may not."""
        limits, codec = self.limits_of(topic), self._codec
        size = batch_header.SIZE + bound
        if rows > encoder.MAX_RECORDS_PER_BATCH:
            return None
        if codec is None:
            return size if size <= limits.write_limit else None
        ratio = self.ratio(topic)
        if not isinstance(codec, BlockCodec) or size * max(1.0, self._factor(ratio)) + largest_bound > (
            limits.write_limit
        ):
            return None
        return projected_size(codec, ratio, batch_header.SIZE + len(codec.prologue), bound)

    def packed_bytes(self, added: int, topic: str) -> int:
        """Bytes that a new batch will hold which packs ``added`` raw bytes."""
        return projected_size(PACKER, self.packed_ratio(topic), batch_header.SIZE, added)

    def _factor(self, ratio: float) -> float:
        return 1.0 if self._codec is None else ratio * CompressionRatios.SAFETY
