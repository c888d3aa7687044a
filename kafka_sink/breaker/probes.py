"""When a muted broker or partition is probed, and what a probe's outcome means.

A broker's probe is a request without rows. Only a partition's probe needs a record batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from kafka_sink.breaker.failure_rate import Health, has_response, health_of
from kafka_sink.breaker.mutes import BreakerState, Mute, MuteTable, Target
from kafka_sink.clock import HELD_MS
from kafka_sink.cluster.broker import Broker
from kafka_sink.model import TopicPartition

if TYPE_CHECKING:
    from kafka_sink.engine.batch import ProducerBatch


class ProbePolicy:
    """Lets probes through and ends mutes by their outcomes. The sender's thread.

    Targets that the coordinator has muted are probed only with its permit, others by this task's clock.
    ``covering`` returns the mutes that cover a partition: its leader's before its own. Brokers are asked
    whether they respond, muted or not, for the coordinator or the breaker class.
    """

    def __init__(
        self,
        table: MuteTable,
        covering: Callable[[TopicPartition], list[Mute]],
        brokers: Mapping[int, Broker],
    ) -> None:
        self._table = table
        self._covering = covering
        self._brokers = brokers
        # When the task last had rows of a topic that may go to any partition. Its thread replaces it.
        self._free_rows_ms: Mapping[str, float] = {}
        # Whether a broker may have to be asked.
        self.asks = False
        self._failures: list[tuple[Target, str]] = []

    # -- the coordinator ----------------------------------------------------------------------------

    def ask_broker(self, node_id: int) -> None:
        """The coordinator, or the breaker class, wants to know whether a broker responds to this task."""
        broker = self._brokers.get(node_id)
        if broker is not None:
            broker.is_to_be_asked = self.asks = True

    def on_coordinator_lost(self) -> None:
        """Drop the coordinator's questions."""
        for broker in self._brokers.values():
            broker.is_to_be_asked = broker.is_asked = False

    def take_failures(self) -> list[tuple[Target, str]]:
        """Probes that failed since the last call, with their errors."""
        failures, self._failures = self._failures, []
        return failures

    # -- brokers: requests without rows ---------------------------------------------------------------

    def brokers_to_probe(self) -> list[int]:
        """Brokers that should get a request without rows now."""
        now_ms, mutes = self._table.now_ms, self._table.mutes.values()
        due = {one.target for one in mutes if isinstance(one.target, int) and one.is_due(now_ms)}
        brokers = self._brokers.values()
        asked = {broker.id for broker in brokers if broker.is_to_be_asked} if self.asks else set()
        self.asks = bool(asked)
        # A broker gets one probe at a time, however long its response takes.
        return [*(due | asked) - {broker.id for broker in brokers if broker.awaits_probe}]

    def broker_probe_sent(self, node_id: int) -> None:
        broker = self._brokers[node_id]
        broker.awaits_probe = True
        broker.is_asked |= broker.is_to_be_asked
        broker.is_to_be_asked = False
        self._begin_if_due(self._table.mutes.get(node_id))

    def broker_probe_done(self, node_id: int, cause: Exception | None) -> bool:
        """The request without rows has its response, or failed. A late response counts too.

        True if the coordinator asked for this response.
        """
        broker = self._brokers[node_id]
        was_asked = broker.is_asked
        broker.awaits_probe = broker.is_asked = False
        if has_response(cause):
            self.connected(node_id)
            return was_asked
        mute = self._table.mutes.get(node_id)
        if mute is not None:
            mute.last_error = str(cause)
            self._fail(mute, cause)
        return False

    def connected(self, node_id: int) -> None:
        """A broker responded to a request without rows, perhaps the first one of a new connection."""
        self._begin_if_due(self._table.mutes.get(node_id))
        self._table.recover(node_id, "it responds again")

    # -- partitions: record batches -------------------------------------------------------------------

    def may_probe(self, partition: TopicPartition) -> bool:
        """Whether one batch of a muted partition may go now."""
        covering = self._covering(partition)
        self._note_held(covering)
        return (
            len(covering) == 1 and covering[0].target == partition and covering[0].is_due(self._table.now_ms)
        )

    def batches_sent(self, batches: Iterable[ProducerBatch]) -> None:
        """Batches go out. A batch is the probe if its partition is muted."""
        for batch in batches if self._table.mutes else ():
            for mute in self._covering(batch.partition):
                # If everything is muted, mutes are ignored and batches go out. Such a batch is also the probe
                # of its broker.
                if self._begin_if_due(mute):
                    mute.probe = batch.partition

    def batches_done(self, batches: Iterable[ProducerBatch], exception: Exception | None) -> None:
        """Attempts of batches have ended; where one was a probe, its outcome counts."""
        for batch in batches if self._table.mutes else ():
            for mute in self._covering(batch.partition):
                if mute.target not in self._table.mutes:
                    # The partition was unmuted together with its broker.
                    continue
                if exception is not None:
                    mute.last_error = str(exception)
                if mute.probe == batch.partition:
                    self._batch_probe_done(mute, batch.partition, exception)

    def _batch_probe_done(self, mute: Mute, partition: TopicPartition, exception: Exception | None) -> None:
        target, health = mute.target, health_of(exception)
        # A broker that responds is there, whatever it says of one partition.
        if health is Health.HEALTHY or (isinstance(target, int) and has_response(exception)):
            self._table.recover(target, "a probe got through")
            if health is Health.HEALTHY:
                self._table.unmute(partition, "a probe got through", own=True)
        elif health is Health.UNHEALTHY:
            self._fail(mute, exception)
        elif mute.state is BreakerState.HALF_OPEN:
            self._table.expire(target, self._table.now_ms)

    def open_to_new_rows(self) -> frozenset[Target]:
        """Partitions whose probe may go while no batch waits that could be it: new rows may go there."""
        found = frozenset(mute.target for mute in self._table.mutes.values() if self._takes_new_rows(mute))
        # The response to a batch that is under way is as good as a probe's.
        return (
            found - {batch.partition for one in self._brokers.values() for batch in one.batches()}
            if found
            else found
        )

    def _takes_new_rows(self, mute: Mute) -> bool:
        target, now_ms = mute.target, self._table.now_ms
        if not isinstance(target, TopicPartition) or self._covering(target) != [mute]:
            return False
        if not mute.is_due(now_ms) or mute.is_held(now_ms):
            return False
        # One more interval than a probe needs: a waiting batch would have been the probe by now.
        return (
            mute.permits_new_rows if mute.is_shared else mute.is_due(now_ms - self._table.retry_interval_ms)
        )

    # -- both ---------------------------------------------------------------------------------------

    def _begin_if_due(self, mute: Mute | None) -> bool:
        if mute is None or not mute.is_due(self._table.now_ms):
            return False
        self._table.probe(mute.target, self._table.now_ms)
        mute.permit_ends_ms, mute.permits_new_rows = -math.inf, False
        return True

    def _fail(self, mute: Mute, cause: Exception | None) -> None:
        self._table.fail(mute.target, str(cause), self._table.now_ms)
        self._failures.append((mute.target, str(cause)))

    # -- which muted targets a task has rows for: the coordinator grants probes by it ------------------

    def note_free_rows(self, topics: Iterable[str]) -> None:
        """The task has rows of these topics that may go to any partition. Called by its thread."""
        now_ms = self._table.now_ms
        lately = {topic: at for topic, at in self._free_rows_ms.items() if now_ms - at <= HELD_MS}
        self._free_rows_ms = {**lately, **dict.fromkeys(topics, now_ms)}

    def note_waiting(self, partitions: Iterable[TopicPartition]) -> None:
        """Batches of these partitions could go, but their brokers take none now.

        So a partition that is open to new rows has rows enough.
        """
        if self._table.mutes:
            for partition in partitions:
                self._note_held(self._covering(partition))

    def _note_held(self, mutes: Iterable[Mute]) -> None:
        for mute in mutes:
            mute.held_ms = self._table.now_ms

    def held(self) -> list[Target]:
        """Muted targets that batches of this task wait for."""
        now_ms = self._table.now_ms
        return [mute.target for mute in self._table.mutes.values() if mute.is_held(now_ms)]

    def wanted(self) -> list[Target]:
        """Muted partitions that no batch of this task waits for, but that its rows could go to."""
        now_ms, found = self._table.now_ms, self._free_rows_ms
        return [
            target
            for target, mute in self._table.mutes.items()
            if isinstance(target, TopicPartition)
            and now_ms - found.get(target.topic, -math.inf) <= HELD_MS
            and not mute.is_held(now_ms)
        ]
