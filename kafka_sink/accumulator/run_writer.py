"""What follows a plan: the part of a turn in which the task's thread encodes, writes and seals."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kafka_sink.accumulator.append_planner import AppendPlan, Segment
from kafka_sink.accumulator.lease import Lease
from kafka_sink.accumulator.producer_batch import BatchState, ProducerBatch
from kafka_sink.accumulator.record_accumulator import RecordAccumulator
from kafka_sink.accumulator.size_estimates import SizeEstimates
from kafka_sink.records import encoder
from kafka_sink.records.ordered_rows import OrderedRows
from kafka_sink.records.record_heads import Run

# Sealed batches go to the sender as soon as they have so many bytes of rows. To take the lock and wake the
# sender costs as much as to seal a batch of a few rows.
_GROUP_BYTES = 65_536


class RunWriter:
    """Carries out plans for one task thread. It takes the accumulator's lock only to end leases."""

    def __init__(
        self, accumulator: RecordAccumulator, estimates: SizeEstimates, wake_sender: Callable[[], None]
    ) -> None:
        self._accumulator = accumulator
        self._estimates = estimates
        self._wake_sender = wake_sender

    def write(self, plan: AppendPlan) -> None:
        """Writes the planned rows, seals what is full, and ends the plan's lease."""
        if plan.segments:
            _encode(plan.ordered, plan.segments)
        is_full = self._estimates.is_full
        with self._accumulator.planning() as queues:
            # One iteration per partition: for short runs, calls are most of the cost.
            for segment in plan.segments:
                batch = segment.batch
                if batch.state is BatchState.OPEN and (batch.buffer.overflowed or is_full(batch)):
                    # A batch that outgrew what was reserved for it goes early; a full batch need not wait for
                    # a row that it does not take.
                    plan.close(batch, queues)
                if batch.packing:
                    self._estimates.observe_packing(batch)
                if batch.state is BatchState.OPEN:
                    if batch.compresses_whole:
                        queues.count_raw(batch)
                    # A closed batch stays leased until it is sealed.
                    batch.lease = None
            # The sender sleeps until a batch that it knows is due, so new batches and batches that it found
            # leased must wake it.
            wake = plan.opened or queues.leased_batch_skipped
            queues.leased_batch_skipped = False
        self.seal(plan.full, plan.lease)
        if wake:
            self._wake_sender()

    def seal(self, closed: list[ProducerBatch], lease: Lease) -> None:
        """Seals batches and ends their leases: of a large batch at once, of small ones together."""
        group: list[ProducerBatch] = []
        held = 0
        for batch in closed:
            batch.seal()
            self._estimates.observe(batch)
            group.append(batch)
            held += batch.raw_bytes
            if held >= _GROUP_BYTES:
                self._give(group, lease)
                group, held = [], 0
        if group:
            self._give(group, lease)

    def _give(self, batches: list[ProducerBatch], lease: Lease) -> None:
        self._accumulator.end_leases(lease, batches)
        self._wake_sender()


def _encode(ordered: OrderedRows, segments: list[Segment]) -> None:
    """Encodes the rows of all segments, which are neighbours, in one pass."""
    first, last = segments[0].start, segments[-1].stop
    timestamps = ordered.timestamps(first, last)
    runs = [
        Run(segment.start - first, segment.stop - first, segment.base_offset, segment.batch.base_timestamp)
        for segment in segments
    ]
    if isinstance(timestamps, int):
        latest = [timestamps] * len(runs)
    else:
        latest = np.maximum.reduceat(timestamps, [run.start for run in runs]).tolist()
    encoded = encoder.encode(ordered.columns.slice(first, last), timestamps, runs)
    at = 0
    for segment, end, max_timestamp in zip(segments, encoded.ends, latest, strict=True):
        segment.batch.append(encoded.data[at:end], segment.stop - segment.start, max_timestamp)
        at = end
