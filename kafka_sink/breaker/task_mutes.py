"""The mutes of one task: what the task avoids, when targets are probed, and what a probe's outcome means.

The probe of a broker is a request without rows. Only the probe of a partition needs a record batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Set

from kafka_sink.breaker.mutes import NO_EVIDENCE, NOTHING_MUTED, Evidence, Mute, MuteChange, MutedPartitions
from kafka_sink.clock import WAITED_FOR_MS
from kafka_sink.cluster.broker import Broker
from kafka_sink.cluster.partition import Partition, ProducerBatch
from kafka_sink.cluster.producer_metadata import ProducerMetadata
from kafka_sink.model import NO_LEADER, PartitionMetadata, Target, TopicPartition
from kafka_sink.outcomes import Health, has_response, health_of

# The loss of the coordinator delays probes at most once in this many retry intervals.
_DELAYS_APART = 5


class TaskMutes:
    """The mutes of a task and of the coordinator, by target, with the changes that were not taken yet.

    Only the sender's thread calls it. The caller sets ``now_ms`` (monotonic) first, because the KIP's calls
    contain no time. Any thread may read ``mutes``. A target that the coordinator has muted is probed only
    with its permit, any other target by this task's clock. A broker may also be sent a request without rows
    although it is not muted, because the coordinator or the breaker class asked for it.

    The sender and the partitioner follow ``avoided``. The sender's thread replaces it, so any thread may read
    it. If no partition would be left, it is empty, and the sender goes on as if nothing were muted.
    """

    def __init__(
        self,
        cluster: ProducerMetadata,
        retry_interval_ms: float,
        partition: Callable[[TopicPartition], Partition | None],
    ) -> None:
        """``retry_interval_ms``: mute.retry.interval. ``partition`` returns the producer's own object."""
        self.retry_interval_ms = retry_interval_ms
        self.partition = partition
        self.mutes: dict[Target, Mute] = {}
        self.avoided = NOTHING_MUTED
        # Increases whenever a target is muted or unmuted.
        self.version = 0
        # The number of muted partitions at the last ``publish``.
        self.muted_count = 0
        self.now_ms = 0.0
        # How many mutes this producer's breaker class has decided, and how many probes were sent.
        self.own_trips = self.probes = 0
        self._cluster = cluster
        self._brokers: Mapping[int, Broker] = cluster.brokers
        # The versions of mutes and metadata from which the view was built, and the targets that it left out.
        self._seen = (-1, -1)
        self._open: Mapping[TopicPartition, float] = {}
        # Maps a partition to the muted broker that leads it, or that led it when a leader was last known.
        self._led_by: Mapping[TopicPartition, int] = {}
        # When the loss of the coordinator last delayed probes.
        self._delayed_ms = -math.inf
        self._changes: list[MuteChange] = []
        self._closed = False
        # For each topic, when the task last had rows that may go to any partition. The task's thread replaces
        # the mapping, so that the sender's thread can read it without a lock.
        self._movable_rows_ms: Mapping[str, float] = {}

    def mute(self, target: Target, reason: str, evidence: Evidence = NO_EVIDENCE, *, own: bool) -> None:
        """Mute a target unless it is muted. ``own`` means that this producer's breaker class decided it."""
        if self._closed or target in self.mutes:
            return
        retry_at_ms = self.now_ms + self.retry_interval_ms
        own_evidence = evidence if own else None
        self.mutes[target] = Mute(target, reason, self.now_ms, retry_at_ms, own_evidence=own_evidence)
        self.version += 1
        self.own_trips += own
        self._changes.append(MuteChange(target, True, reason, own, evidence))

    def unmute(self, target: Target, reason: str, *, own: bool) -> None:
        if self.mutes.pop(target, None) is None:
            return
        self.version += 1
        self._changes.append(MuteChange(target, False, reason, own))
        # Forget the failures until now, so that they do not mute the recovered partitions again.
        led: Iterable[TopicPartition] = (name for name, node in self._led_by.items() if node == target)
        for name in (target,) if isinstance(target, TopicPartition) else led:
            partition = self.partition(name)
            if partition is not None:
                partition.outcomes.forget()

    @property
    def has_changes(self) -> bool:
        return bool(self._changes)

    def take_changes(self) -> list[MuteChange]:
        """The mutes and unmutes since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def close(self) -> None:
        self._closed = True
        self.mutes.clear()
        self.avoided = NOTHING_MUTED

    def covering(self, partition: TopicPartition) -> list[Mute]:
        """The mutes that apply to a partition: its leader's, then its own. Any thread may call it."""
        mutes = (self.mutes.get(target) for target in (self.leader_id(partition), partition))
        return [mute for mute in mutes if mute is not None]

    def leader_id(self, partition: TopicPartition) -> int:
        """The leader of a partition. If there is none, the muted broker that led it last.

        A broker that is gone for long loses its leadership. The partition is then as unavailable as before.
        """
        info = self._cluster.leader(partition)
        if info is None or info.leader == NO_LEADER:
            return self._led_by.get(partition, NO_LEADER)
        return info.leader

    def partitions(self, *topics: str) -> Iterator[tuple[TopicPartition, PartitionMetadata]]:
        """The partitions of these topics, or of all topics in use."""
        for name in topics or self._cluster.names():
            topic = self._cluster.topic(name)
            for info in () if topic is None else topic.partitions:
                yield TopicPartition(name, info.partition), info

    def publish(self) -> MutedPartitions:
        """Bring ``avoided`` up to date. Called in each pass of the sender."""
        open_to_new: dict[TopicPartition, float] = {}
        if self.mutes:
            for mute in self.mutes.values():
                if mute.probe_ends_ms <= self.now_ms:
                    mute.end_probe(self.now_ms)
            open_to_new = {name: self._open.get(name, self.now_ms) for name in self.open_to_new_rows()}
        seen = (self.version, self._cluster.version)
        if seen != self._seen or open_to_new != self._open:
            self._seen, self._open = seen, open_to_new
            self.avoided = self._build()
        return self.avoided

    def _build(self) -> MutedPartitions:
        """Count the muted partitions, record which of them muted brokers lead, and return what to avoid."""
        mutes = self.mutes
        led_by: dict[TopicPartition, int] = {}
        muted = known = available = 0
        for partition, info in self.partitions() if mutes else ():
            known += 1
            node_id = self.leader_id(partition)
            if node_id in mutes:
                led_by[partition] = node_id
            if node_id in mutes or partition in mutes:
                muted += 1
            elif info.leader >= 0:
                available += 1
        self._led_by, self.muted_count = led_by, muted
        # Mutes also apply before any metadata has arrived.
        if not mutes or (known and not available):
            return NOTHING_MUTED
        avoided = mutes.keys() - self._open.keys()
        return MutedPartitions(
            {target for target in avoided if isinstance(target, int)},
            led_by.keys() | {target for target in avoided if isinstance(target, TopicPartition)},
            self._cluster.leader,
            self._open,
        )

    def refresh_leaderless(self, now_ms: float) -> None:
        """Make the client fetch metadata again for topics that have a partition without a leader."""
        for name in self._cluster.names():
            if any(info.leader < 0 for _, info in self.partitions(name)):
                self._cluster.mark_stale(name, now_ms)

    def shared(self) -> dict[Target, str]:
        """The coordinator's mutes, with their reasons."""
        return {mute.target: mute.reason for mute in self.mutes.values() if mute.is_shared}

    def apply_shared(self, muted: Mapping[Target, str]) -> None:
        """Replace the coordinator's mutes by these, which are all of them, with their reasons.

        A mute of this task that the coordinator does not know, or does not share, stays.
        """
        for mute in list(self.mutes.values()):
            if mute.is_shared and mute.target not in muted:
                self.unmute(mute.target, "another task's batch succeeded", own=False)
        for target, reason in muted.items():
            self.mute(target, reason, own=False)
            if target in self.mutes:
                self.mutes[target].is_shared = True

    def permit(self, targets: Iterable[Target], *, new_rows: bool) -> None:
        """Allow one probe of each target within an interval, because the coordinator permits it to this task.

        ``new_rows``: no task has a batch for the partition, so new rows may go to it until one is sent.
        """
        for mute in filter(None, map(self.mutes.get, targets)):
            mute.permit_ends_ms, mute.permits_new_rows = self.now_ms + self.retry_interval_ms, new_rows

    def on_coordinator_lost(self) -> None:
        """Keep the coordinator's mutes as this task's own.

        They are probed one interval later, because until now other tasks probed, a new coordinator may soon
        be there, and all tasks lose it at once. One that comes and goes must not delay probes each time.
        """
        shared = [mute for mute in self.mutes.values() if mute.is_shared]
        if shared and self.now_ms - self._delayed_ms > _DELAYS_APART * self.retry_interval_ms:
            self._delayed_ms = self.now_ms
            for mute in shared:
                mute.retry_at_ms = self.now_ms + self.retry_interval_ms
        for mute in self.mutes.values():
            mute.is_shared = mute.permits_new_rows = False
            mute.permit_ends_ms = -math.inf

    def mutes_to_report(self) -> list[MuteChange]:
        """All mutes, for a coordinator that may be new."""
        return [mute.ongoing(self.now_ms) for mute in self.mutes.values()]

    def take_failures(self) -> list[Target]:
        """The muted targets whose probes have failed since the last call."""
        failed = [mute for mute in self.mutes.values() if mute.probe_failed]
        for mute in failed:
            mute.probe_failed = False
        return [mute.target for mute in failed]

    # -- brokers: requests without rows ---------------------------------------------------------------

    def brokers_to_probe(self) -> list[int]:
        """The brokers that should get a request without rows now."""
        mutes = self.mutes.values()
        due = {mute.target for mute in mutes if isinstance(mute.target, int) and mute.is_due(self.now_ms)}
        brokers = self._brokers.values()
        asked = {broker.id for broker in brokers if broker.is_to_be_asked}
        # A broker gets one probe at a time, even if its response takes long.
        return [*(due | asked) - {broker.id for broker in brokers if broker.awaits_probe}]

    def on_broker_probe_sent(self, node_id: int) -> None:
        broker = self._brokers[node_id]
        broker.awaits_probe, broker.is_to_be_asked = True, False
        self._begin_if_due(self.mutes.get(node_id))

    def on_broker_probe_done(self, node_id: int, cause: Exception | None) -> None:
        """Record that the request without rows has its response, or has failed."""
        self._brokers[node_id].awaits_probe = False
        mute = self.mutes.get(node_id)
        if has_response(cause):
            self.on_connected(node_id)
        elif mute is not None:
            self._probe_failed(mute, cause)

    def on_connected(self, node_id: int) -> None:
        """Record that a broker responded to a request without rows, such as a connection's first one."""
        self._begin_if_due(self.mutes.get(node_id))
        self.unmute(node_id, "it responds again", own=True)

    # -- partitions: record batches -------------------------------------------------------------------

    def may_probe(self, partition: TopicPartition) -> bool:
        """Whether one batch of a muted partition may be sent now."""
        covering = self.covering(partition)
        self._mark_waiting(covering)
        return len(covering) == 1 and covering[0].target == partition and covering[0].is_due(self.now_ms)

    def on_batches_sent(self, batches: Iterable[ProducerBatch]) -> None:
        """Record that batches are sent. If a batch's partition is muted, the batch is the probe."""
        for batch in batches if self.mutes else ():
            for mute in self.covering(batch.topic_partition):
                # If everything is muted, batches are sent. Such a batch is also the probe of its broker.
                if self._begin_if_due(mute):
                    mute.probe = batch.topic_partition

    def on_batches_done(self, batches: Iterable[ProducerBatch], exception: Exception | None) -> None:
        """Record that attempts of batches have ended. If one of them was a probe, its outcome counts."""
        for batch in batches if self.mutes else ():
            for mute in self.covering(batch.topic_partition):
                if exception is not None:
                    mute.last_error = str(exception)
                if mute.probe == batch.topic_partition:
                    self._batch_probe_done(mute, batch.topic_partition, exception)

    def _batch_probe_done(self, mute: Mute, partition: TopicPartition, exception: Exception | None) -> None:
        target, health = mute.target, health_of(exception)
        # A broker that responds is reachable, even if it reports an error about one partition.
        if health is Health.HEALTHY or (isinstance(target, int) and has_response(exception)):
            self.unmute(target, "a probe succeeded", own=True)
            if health is Health.HEALTHY:
                self.unmute(partition, "a probe succeeded", own=True)
        elif health is Health.UNHEALTHY:
            self._probe_failed(mute, exception)
        elif mute.is_probed:
            mute.end_probe(self.now_ms)

    def _begin_if_due(self, mute: Mute | None) -> bool:
        if mute is None or not mute.is_due(self.now_ms):
            return False
        mute.probe_ends_ms = self.now_ms + self.retry_interval_ms
        self.probes += 1
        mute.permit_ends_ms, mute.permits_new_rows = -math.inf, False
        return True

    def next_change_ms(self) -> float:
        """Milliseconds until a probe may be sent or counts as lost, or infinity."""
        times = (m.probe_ends_ms if m.is_probed else m.retry_at_ms for m in self.mutes.values())
        return min((at for at in times if at > self.now_ms), default=math.inf) - self.now_ms

    def _probe_failed(self, mute: Mute, cause: Exception | None) -> None:
        mute.last_error, mute.probe_failed = str(cause), True
        if mute.is_probed:
            mute.end_probe(self.now_ms + self.retry_interval_ms)

    # -- which muted targets a task has rows for --------------------------------------------------------

    def open_to_new_rows(self) -> Set[TopicPartition]:
        """The partitions that no batch waits for, and for which the next keyless rows are the probe."""
        targets = {
            target
            for target in self.mutes
            if isinstance(target, TopicPartition) and self._takes_new_rows(target)
        }
        if not targets:
            return targets
        # The response to a batch that is in flight is as good as that of a probe.
        return targets - {
            batch.topic_partition for broker in self._brokers.values() for batch in broker.batches_in_flight()
        }

    def _takes_new_rows(self, target: TopicPartition) -> bool:
        mute = self.mutes[target]
        if self.covering(target) != [mute] or not mute.is_due(self.now_ms):
            return False
        return not mute.is_waited_for(self.now_ms) and (mute.permits_new_rows or not mute.is_shared)

    def on_movable_rows(self, topics: Iterable[str]) -> None:
        """The task has rows of these topics that may go to any partition. The task's thread calls this."""
        now_ms = self.now_ms
        lately = {topic: at for topic, at in self._movable_rows_ms.items() if now_ms - at <= WAITED_FOR_MS}
        self._movable_rows_ms = {**lately, **dict.fromkeys(topics, now_ms)}

    def on_waiting(self, partitions: Iterable[TopicPartition]) -> None:
        """Record that batches of these partitions could be sent, but that their brokers accept none now.

        A partition that is open to new rows therefore has enough rows.
        """
        for partition in partitions if self.mutes else ():
            self._mark_waiting(self.covering(partition))

    def _mark_waiting(self, mutes: Iterable[Mute]) -> None:
        for mute in mutes:
            mute.waited_for_ms = self.now_ms

    def waited_for(self) -> list[Target]:
        """The muted targets for which batches of this task wait."""
        return [mute.target for mute in self.mutes.values() if mute.is_waited_for(self.now_ms)]

    def acceptable(self) -> list[Target]:
        """The muted partitions for which no batch of this task waits, but to which its rows could go."""
        return [
            target
            for target, mute in self.mutes.items()
            if isinstance(target, TopicPartition)
            and self._has_movable_rows(target)
            and not mute.is_waited_for(self.now_ms)
        ]

    def _has_movable_rows(self, target: TopicPartition) -> bool:
        return self.now_ms - self._movable_rows_ms.get(target.topic, -math.inf) <= WAITED_FOR_MS

    def return_permits(self) -> list[Target]:
        """End the coordinator's permits for which this task has no rows, and return their targets.

        Another task may have rows for them.
        """
        returned: list[Target] = []
        for target, mute in self.mutes.items():
            if not isinstance(target, TopicPartition) or mute.permit_ends_ms <= self.now_ms or mute.is_probed:
                continue
            can_take_rows = mute.permits_new_rows and self._has_movable_rows(target)
            if not (can_take_rows or mute.is_waited_for(self.now_ms)):
                mute.permit_ends_ms, mute.permits_new_rows = -math.inf, False
                returned.append(target)
        return returned
