"""The task's exclusive hold on batches while it writes into them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kafka_sink.accumulator.producer_batch import ProducerBatch


class Lease:
    """Batches that the task's thread writes into during one turn.

    The sender neither sends nor fails a batch whose ``lease`` is set. The accumulator's lock is held while
    batches are added and given up, unless no other thread knows of them. A turn that an exception ends keeps
    its lease: those batches may lack rows, and only ``RecordAccumulator.abort_incomplete`` ends it.
    """

    __slots__ = ()

    def add(self, batch: ProducerBatch) -> None:
        """The batch belongs to the task from now on."""
        batch.lease = self

    def end(self, batch: ProducerBatch) -> None:
        """The sender may have the batch."""
        if batch.lease is self:
            batch.lease = None
