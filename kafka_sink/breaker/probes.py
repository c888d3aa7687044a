"""When a muted broker or partition is probed, and what a probe's outcome means.

A broker's probe is a request without rows. Only a partition's probe needs a record batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from kafka_sink.breaker.interface import SentBatch
from kafka_sink.breaker.outcomes import Health, has_response, health_of
from kafka_sink.breaker.states import BreakerState, LocalMutes, Mute, ProbeLease, Target
from kafka_sink.cluster.broker import Broker
from kafka_sink.model import TopicPartition
from kafka_sink.timing_bounds import HELD_MS


class ProbePolicy:
    """Lets probes through and ends mutes by their outcomes. The sender's thread.

    Targets that the coordinator has muted are probed only under its leases, others by this task's clock.
    ``covering`` returns the muted targets that cover a partition: its leader before itself. Brokers are
    asked whether they respond, muted or not, for the coordinator or the breaker class.
    """

    def __init__(
        self,
        mutes: LocalMutes,
        covering: Callable[[TopicPartition], list[Target]],
        brokers: Mapping[int, Broker],
    ) -> None:
        # Whether a request to the target has no response yet. Its response is as good as a probe's, so none
        # is sent.
        self.awaits_response: Callable[[Target], bool] = lambda _: False
        self._mutes = mutes
        self._covering = covering
        self._brokers = brokers
        # When a batch was last seen to wait for a target.
        self._held_ms: dict[Target, float] = {}
        # When the task last had rows of a topic that may go to any partition. Its thread replaces it.
        self._free_rows_ms: Mapping[str, float] = {}
        # By target, when this task's lease ends.
        self._leases: dict[Target, float] = {}
        # Targets whose lease also lets new rows go to the partition.
        self._trial_leases: set[Target] = set()
        # The partition whose batch probes a target, until the mute ends: its response may come late.
        self._batch_probes: dict[Target, TopicPartition] = {}
        # Whether a broker may have to be asked.
        self._asks = False
        self._failures: list[tuple[Target, str]] = []

    # -- the coordinator ----------------------------------------------------------------------------

    def grant(self, leases: Mapping[Target, ProbeLease]) -> None:
        for target, lease in leases.items():
            self._leases[target] = self._mutes.now_ms + lease.left_ms
            (self._trial_leases.add if lease.trial else self._trial_leases.discard)(target)

    def ask_broker(self, node_id: int) -> None:
        """The coordinator, or the breaker class, wants to know whether a broker responds to this task."""
        broker = self._brokers.get(node_id)
        if broker is not None:
            broker.is_to_be_asked = self._asks = True

    def on_coordinator_lost(self) -> None:
        """Drop the leases and the requests of the coordinator."""
        self._leases.clear()
        for broker in self._brokers.values():
            broker.is_to_be_asked = broker.is_asked = False

    def take_failures(self) -> list[tuple[Target, str]]:
        """Probes that failed since the last call, with their errors."""
        failures, self._failures = self._failures, []
        return failures

    # -- brokers: requests without rows ---------------------------------------------------------------

    def brokers_to_probe(self) -> list[int]:
        if not self._mutes.mutes and not self._asks:
            return []
        due = {target for target in self._mutes.mutes if isinstance(target, int) and self._is_due(target)}
        brokers = self._brokers.values()
        asked = {broker.id for broker in brokers if broker.is_to_be_asked}
        self._asks = bool(asked)
        # A broker gets one probe at a time, however long its response takes.
        return [*(due | asked) - {broker.id for broker in brokers if broker.awaits_probe}]

    def broker_probe_sent(self, node_id: int) -> None:
        broker = self._brokers[node_id]
        broker.awaits_probe = True
        broker.is_asked |= broker.is_to_be_asked
        broker.is_to_be_asked = False
        if self._is_due(node_id):
            self._begin(node_id)

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
        mute = self._mutes.mutes.get(node_id)
        if mute is not None:
            mute.last_error = str(cause)
            self._mutes.fail(node_id, str(cause), self._mutes.now_ms)
            self._failures.append((node_id, str(cause)))
        return False

    def connected(self, node_id: int) -> None:
        """A broker responded to a request without rows, perhaps the first one of a new connection."""
        if self._is_due(node_id):
            self._begin(node_id)
        self._mutes.recover(node_id, "it responds again")

    # -- partitions: record batches -------------------------------------------------------------------

    def may_probe(self, partition: TopicPartition) -> bool:
        covering = self._covering(partition)
        self._note_held(covering)
        return covering == [partition] and self._is_due(partition)

    def batches_sent(self, batches: Iterable[SentBatch]) -> None:
        """Batches go out. A batch is the probe if its partition is muted."""
        for partition, _ in batches if self._mutes.mutes else ():
            for target in self._covering(partition):
                # If everything is muted, mutes are ignored and batches go out. Such a batch is also the probe
                # of its broker.
                if self._is_due(target):
                    self._begin(target)
                    self._batch_probes[target] = partition

    def batches_done(self, batches: Iterable[SentBatch], exception: Exception | None) -> None:
        """Attempts of batches have ended; where one was a probe, its outcome counts."""
        for partition, _ in batches if self._mutes.mutes else ():
            self._batch_done(partition, exception)

    def _batch_done(self, partition: TopicPartition, exception: Exception | None) -> None:
        for target in self._covering(partition):
            mute = self._mutes.mutes.get(target)
            if mute is None:
                # The partition was unmuted together with its broker.
                continue
            if exception is not None:
                mute.last_error = str(exception)
            if self._batch_probes.get(target) == partition:
                self._batch_probe_done(mute, partition, exception)

    def _batch_probe_done(self, mute: Mute, partition: TopicPartition, exception: Exception | None) -> None:
        target, health = mute.target, health_of(exception)
        # A broker that responds is there, whatever it says of one partition.
        if health is Health.HEALTHY or (isinstance(target, int) and has_response(exception)):
            self._mutes.recover(target, "a probe got through")
            if health is Health.HEALTHY:
                self._mutes.unmute(partition, "a probe got through", own=True)
        elif health is Health.UNHEALTHY:
            self._mutes.fail(target, str(exception), self._mutes.now_ms)
            self._failures.append((target, str(exception)))
        elif mute.state is BreakerState.HALF_OPEN:
            self._mutes.expire(target, self._mutes.now_ms)

    def trials(self) -> frozenset[Target]:
        """Partitions whose probe may go while no batch waits that could be it: new rows may go there."""
        return frozenset(target for target in self._mutes.mutes if self._is_on_trial(target))

    def _is_on_trial(self, target: Target) -> bool:
        if not isinstance(target, TopicPartition) or self._covering(target) != [target]:
            return False
        if not self._is_due(target) or self._is_held(target) or self.awaits_response(target):
            return False
        if self._mutes.is_shared(target):
            return target in self._trial_leases
        # One more interval than a probe needs: a waiting batch would have been the probe by now.
        return self._mutes.is_due(target, self._mutes.now_ms - self._mutes.retry_interval_ms)

    # -- both ---------------------------------------------------------------------------------------

    def _is_due(self, target: Target) -> bool:
        if self._mutes.is_shared(target):
            mute = self._mutes.mutes.get(target)
            is_open = mute is not None and mute.state is BreakerState.OPEN
            return is_open and self._leases.get(target, -math.inf) > self._mutes.now_ms
        return self._mutes.is_due(target, self._mutes.now_ms)

    def _begin(self, target: Target) -> None:
        self._mutes.probe(target, self._mutes.now_ms)
        self._leases.pop(target, None)
        self._trial_leases.discard(target)

    def forget(self, target: Target) -> None:
        self._batch_probes.pop(target, None)
        self._leases.pop(target, None)
        self._held_ms.pop(target, None)

    # -- which muted targets a task has rows for: the coordinator grants probes by it ------------------

    def note_free_rows(self, topics: Iterable[str]) -> None:
        """The task has rows of these topics that may go to any partition. Called by its thread."""
        now_ms = self._mutes.now_ms
        lately = {topic: at for topic, at in self._free_rows_ms.items() if now_ms - at <= HELD_MS}
        self._free_rows_ms = {**lately, **dict.fromkeys(topics, now_ms)}

    def note_waiting(self, partitions: Iterable[TopicPartition]) -> None:
        """Batches of these partitions could go, but their brokers take none now.

        So a partition on trial has rows enough, and needs no new ones.
        """
        if self._mutes.mutes:
            for partition in partitions:
                self._note_held(self._covering(partition))

    def _note_held(self, targets: Iterable[Target]) -> None:
        self._held_ms.update(dict.fromkeys(targets, self._mutes.now_ms))

    def _is_held(self, target: Target) -> bool:
        return self._mutes.now_ms - self._held_ms.get(target, -math.inf) <= HELD_MS

    def held(self) -> list[Target]:
        """Muted targets that batches of this task wait for."""
        return [target for target in self._mutes.mutes if self._is_held(target)]

    def wanted(self) -> list[Target]:
        """Muted partitions that no batch of this task waits for, but that its rows could go to."""
        partitions = [target for target in self._mutes.mutes if isinstance(target, TopicPartition)]
        return [one for one in partitions if self._has_free_rows(one) and not self._is_held(one)]

    def _has_free_rows(self, target: TopicPartition) -> bool:
        return self._mutes.now_ms - self._free_rows_ms.get(target.topic, -math.inf) <= HELD_MS
