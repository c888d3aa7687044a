"""How batches end: the one place where a batch succeeds, fails or waits for its next attempt."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial

from kafka_sink.accumulator.producer_batch import BatchState, ProducerBatch
from kafka_sink.accumulator.record_accumulator import RecordAccumulator
from kafka_sink.errors import DeliveryError
from kafka_sink.sending.node_metrics import NodeMetricsRecorder
from kafka_sink.sending.task_deliveries import TaskDeliveries, Written

_log = logging.getLogger(__name__)


class BatchCompletion:
    """Used by the sender's thread. ``deliveries`` and ``nodes`` are replaced between tasks, when no batch is
    left."""

    def __init__(self, accumulator: RecordAccumulator) -> None:
        self.deliveries = TaskDeliveries()
        self.nodes = NodeMetricsRecorder()
        self._accumulator = accumulator
        # Batches that were sent and have no response yet, by identity. They expire like queued batches, but
        # keep their memory until the response, because the socket may still read it.
        self._in_flight: dict[int, ProducerBatch] = {}

    def in_flight(self) -> Collection[ProducerBatch]:
        """Batches that were sent and have no response yet."""
        return self._in_flight.values()

    def sent(self, node_id: int, batches: Collection[ProducerBatch], now_ms: float) -> None:
        """A Produce request with these batches goes out."""
        if _log.isEnabledFor(logging.DEBUG):
            size = sum(batch.size for batch in batches)
            _log.debug("broker %d: request with %d batch(es) of %d bytes", node_id, len(batches), size)
        self.deliveries.sent([now_ms - batch.created_ms for batch in batches if batch.attempts == 1])
        for batch in batches:
            self._in_flight[id(batch)] = batch

    def end_attempt(self, batch: ProducerBatch) -> None:
        """The batch is no longer in flight: it has a response, or will get none."""
        self._in_flight.pop(id(batch), None)

    def succeed(self, batches: Sequence[tuple[ProducerBatch, int, int]], *, confirmed: bool) -> None:
        """Brokers have these batches: each with its base offset and log append time, -1 where unknown."""
        written = [
            (
                batch,
                Written(
                    batch.partition,
                    batch.record_count,
                    batch.raw_bytes,
                    batch.size,
                    base_offset,
                    log_append_time_ms,
                    confirmed,
                    batch.letters,
                ),
            )
            for batch, base_offset, log_append_time_ms in batches
        ]
        self._accumulator.succeed(written, self.deliveries.acknowledged)

    def refuse(self, batch: ProducerBatch, cause: Exception) -> None:
        """A response, or the lack of one, ends the batch as failed."""
        self._accumulator.finish(batch, BatchState.FAILED, self._record_failure(batch, cause))

    def fail(self, batch: ProducerBatch, cause: Exception) -> bool:
        """Fails a batch without a response, wherever it is; False where it is leased or has ended."""
        return self._accumulator.fail(batch, self._record_failure(batch, cause))

    def retry(self, batch: ProducerBatch, at_ms: float) -> None:
        """Queues the batch again, for an attempt at ``at_ms`` or later."""
        self.deliveries.count(retries=1)
        self._accumulator.reenqueue(batch, at_ms)

    def hold(self, batch: ProducerBatch) -> None:
        """Queues the batch again. It is not to be sent."""
        self._accumulator.reenqueue(batch, 0.0)

    def replace(self, batch: ProducerBatch, pieces: Collection[ProducerBatch]) -> None:
        """Queues the pieces of a batch that was too large in its place."""
        self.deliveries.count(splits=1)
        self._accumulator.reenqueue_split(batch, [*pieces])

    def shrink(self, batch: ProducerBatch, pieces: Collection[ProducerBatch]) -> None:
        """Queues what is left of a batch without the records that became dead letters."""
        self._accumulator.reenqueue_split(batch, [*pieces])

    def fail_all(self, cause: Exception) -> None:
        """Fails every batch: the producer cannot go on (authentication failed, no producer id)."""
        self.deliveries.failed(None, 0, cause)
        for batch in [*self._accumulator.queued_batches_snapshot(), *self._in_flight.values()]:
            self.fail(batch, cause)

    def abort_incomplete(self, *, end_leases: bool) -> None:
        """Fails what is left and gives its memory back. Only after the connections are closed."""
        closed = DeliveryError("the producer was closed")

        def record(batch: ProducerBatch) -> None:
            self.deliveries.failed(batch.partition, _rows(batch), closed)

        self._in_flight.clear()
        self._accumulator.abort_incomplete(record, end_leases=end_leases)

    def _record_failure(self, batch: ProducerBatch, cause: Exception) -> Callable[[], None]:
        return partial(self.deliveries.failed, batch.partition, _rows(batch), cause)


def _rows(batch: ProducerBatch) -> int:
    """The task's rows that end with the batch. Dead letters are none: their rows are counted as skipped."""
    return 0 if batch.letters else batch.record_count
