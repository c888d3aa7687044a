"""Fills one Produce request with ready batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kafka_sink.accumulator.batch_queues import PartitionQueue
from kafka_sink.accumulator.producer_batch import BatchState, ProducerBatch
from kafka_sink.accumulator.record_accumulator import RecordAccumulator
from kafka_sink.model import TopicPartition


def fill_request(
    accumulator: RecordAccumulator,
    node: int,
    queues: Sequence[PartitionQueue],
    max_bytes: int,
    may_send: Callable[[ProducerBatch], bool],
    split_if_too_large: Callable[[ProducerBatch], bool],
) -> list[ProducerBatch]:
    """Sealed batches for one request to a broker: one for each partition, ``max_bytes`` in total.

    Only the first batch may exceed that. An open batch is chosen by its estimated compressed size. Once it is
    sealed, its true size decides whether more batches fit or the last ones go back to their queues.
    ``split_if_too_large`` may put the pieces of a batch into its queue instead.
    """
    taken: dict[TopicPartition, ProducerBatch] = {}
    filled = 0

    def may_go(batch: ProducerBatch) -> bool:
        return batch.partition not in taken and may_send(batch)

    while filled < max_bytes:
        more = accumulator.drain(node, queues, max_bytes, may_go, filled)
        estimated = [batch for batch in more if batch.state is BatchState.CLOSED]
        for batch in estimated:
            batch.seal()
        whole = [batch for batch in more if not split_if_too_large(batch)]
        for at, batch in enumerate(whole):
            if taken and filled + batch.size > max_bytes:
                accumulator.put_back(whole[at:])
                return list(taken.values())
            taken[batch.partition] = batch
            filled += batch.size
        if not estimated and len(whole) == len(more):
            break
    return list(taken.values())
