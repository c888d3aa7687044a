"""Limits the memory that rows for muted partitions hold; the task waits when it is reached."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Sequence

from kafka_sink.accumulator.record_accumulator import RecordAccumulator
from kafka_sink.clock import Clock
from kafka_sink.errors import DeliveryError
from kafka_sink.model import TopicPartition

_log = logging.getLogger(__name__)
# How often a waiting task looks whether the mute has ended: the end of a mute sends no signal.
_LOOK_MS = 50.0


class MutedMemoryLimit:
    """Used by the task's thread. ``limit_bytes`` of buffer.memory may be held by muted partitions.

    ``mutes`` gives the muted partitions and is false if there are none. ``explain`` says why one is muted.
    """

    def __init__(
        self,
        accumulator: RecordAccumulator,
        limit_bytes: int,
        mutes: Callable[[], Container[TopicPartition]],
        explain: Callable[[TopicPartition], str | None],
        clock_ms: Clock,
    ) -> None:
        self.mutes = mutes
        self.waited_ms = 0.0
        self._accumulator = accumulator
        self._limit_bytes = limit_bytes
        self._explain = explain
        self._clock_ms = clock_ms
        self._said = False

    def wait(self, needs: Sequence[tuple[TopicPartition, int]], check: Callable[[], None]) -> int:
        """How many of these runs may go, the first at least. A run is a partition and the bytes of its rows.

        Waits until enough memory is free or the first is no longer muted. The caller holds no lease, and no
        memory outside of batches. ``check`` raises when the task is lost. Raises DeliveryError naming
        the cause of the mute after delivery.timeout.ms.
        """
        if taken := self._may_go(needs):
            return taken
        partition = needs[0][0]
        started_ms = self._clock_ms()
        timeout_ms = self._accumulator.settings.delivery_timeout_ms
        self._say(partition)
        try:
            while not (taken := self._may_go(needs)):
                if self._clock_ms() - started_ms >= timeout_ms:
                    raise DeliveryError(
                        f"rows for {partition} waited kafka.delivery.timeout.ms = {timeout_ms:.0f} ms for a "
                        f"muted partition: {self._explain(partition)}"
                    )
                self._accumulator.await_change(_LOOK_MS / 1000)
                check()
        finally:
            self.waited_ms += self._clock_ms() - started_ms
        return taken

    def _may_go(self, needs: Sequence[tuple[TopicPartition, int]]) -> int:
        mutes = self.mutes()
        if not mutes:
            self._said = False
            return len(needs)
        held = self._accumulator.held_bytes(mutes)
        for taken, (partition, needed) in enumerate(needs):
            if partition not in mutes:
                continue
            # If no memory is held, one run may always go, however large it is.
            if held and held + needed > self._limit_bytes:
                return taken
            held += needed
        return len(needs)

    def _say(self, partition: TopicPartition) -> None:
        """Warn once per mute."""
        if self._said:
            return
        self._said = True
        _log.warning(
            "rows with a key or a partition column wait for %s, as such rows hold all that muted partitions "
            "may (%d bytes): %s. Where keys spread over all partitions this stops the task until the broker "
            "is back, for kafka.delivery.timeout.ms = %.0f ms at most. "
            "kafka.partitioner.spread.keys.when.muted=true sends rows with keys to other partitions "
            "meanwhile; rows of one key are then in several partitions",
            partition,
            self._limit_bytes,
            self._explain(partition),
            self._accumulator.settings.delivery_timeout_ms,
        )
