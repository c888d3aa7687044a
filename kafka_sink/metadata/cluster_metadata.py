"""The metadata of a task or the coordinator: the sender refreshes it, the task waits for topics it lacks.

Also the producer's own rack (KIP-1123).
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from kafka_sink.clock import Clock
from kafka_sink.cluster.broker import Broker
from kafka_sink.errors import (
    MetadataTimeoutError,
    MissingPartitionError,
    TopicRefusedError,
)
from kafka_sink.kafka_errors import INVALID_TOPIC_EXCEPTION, TOPIC_AUTHORIZATION_FAILED, error_of
from kafka_sink.metadata.cache import MetadataCache
from kafka_sink.metadata.topic_state import MetadataSnapshot
from kafka_sink.model import MetadataUpdate, Node, TopicMetadata, TopicPartition
from kafka_sink.timing_bounds import HINT_WAIT_MS

if TYPE_CHECKING:
    from kafka_sink.network.client import NetworkClient

_log = logging.getLogger(__name__)
# What to say of the errors that no task waits out (``KafkaError.final_for_topic``).
_FINAL_TOPIC_ERRORS = {
    INVALID_TOPIC_EXCEPTION: "the topic name is invalid (INVALID_TOPIC_EXCEPTION)",
    TOPIC_AUTHORIZATION_FAILED: "not authorized to access the topic (TOPIC_AUTHORIZATION_FAILED)",
}
_CHECK_MS = 100.0
_NO_PARTITIONS: Mapping[str, int] = {}


class HintSource:
    """Where snapshots may come from, for topics that it knows or fetches for many tasks. This one knows
    nothing. Methods never block; any thread calls them."""

    def ask(self, topics: Iterable[str]) -> bool:
        """Ask for topics that are needed now; False where the source is not there.

        Otherwise it calls ``import_hints`` with the topics, or ``release`` when they will not come.
        """
        return False

    def note_use(self, topics: Iterable[str]) -> None:
        """Rows are written to these topics."""

    def report_stale(self, topic: str) -> None:
        """A response showed that a topic's metadata is old."""

    def report_leader(
        self, partition: TopicPartition, leader: int, epoch: int, topic_id: bytes | None
    ) -> None:
        """A response showed that a partition's leader is old, and named the new one."""

    def fetched(self, topics: tuple[str, ...], update: MetadataUpdate | None) -> None:
        """The response to a request that included these topics for others; None if there was none."""


class ClusterMetadata(MetadataCache):
    """A MetadataCache that can be waited for, and that exchanges what it knows with ``hints``.

    Methods that end in "_locked" need the lock. ``hints.ask`` is called under it, so it must not wait for
    another thread. ``random`` and ``bounds`` are MetadataCache's.
    """

    def __init__(
        self,
        clock_ms: Clock,
        wake_sender: Callable[[], None],
        describe_brokers: Callable[[], str],
        random: Callable[[], float],
        **bounds: float,
    ) -> None:
        super().__init__(random=random, **bounds)
        self._describe_brokers = describe_brokers
        self._clock_ms = clock_ms
        self._wake_sender = wake_sender
        self._updated = threading.Condition(self._lock)
        self._held_until_max_ms = math.inf
        self.hints = HintSource()
        # Filled by the sender's thread.
        self.brokers: dict[int, Broker] = {}
        # Whoever names an address gets the rows, where any host on the internet may have a trusted
        # certificate.
        self.confirmed_nodes_only = False

    # -- the task's thread ------------------------------------------------------------------------

    def await_topics(
        self,
        topics: Iterable[str],
        timeout_ms: float,
        check: Callable[[], None],
        partitions: Mapping[str, int] = _NO_PARTITIONS,
        unauthorized_wait_ms: float = 0.0,
    ) -> dict[str, TopicMetadata]:
        """Wait for the metadata of all these topics; one request asks for those that are unknown.

        ``partitions``: how many partitions a topic needs for rows that name theirs. A topic known with fewer
        may have got more since, so this waits for newer metadata, as Kafka's producer does.
        ``unauthorized_wait_ms``: a topic is asked for again until brokers have said for this long that it is
        not authorized, as they say so while they load their ACLs. Raises
        MetadataTimeoutError naming the topics and the last error after ``timeout_ms`` (max.block.ms),
        TopicRefusedError for a topic that can never be written, MissingPartitionError after ``timeout_ms``
        for a partition that does not exist.
        """
        wanted = tuple(topics)
        deadline = self._clock_ms() + timeout_ms
        self.hints.note_use(wanted)
        asked = False
        stale: set[str] = set()
        while True:
            with self._lock:
                now_ms = self._clock_ms()
                self.note_use(wanted, now_ms)
                missing, short = self._lacking_locked(wanted, partitions)
                if not missing and not short:
                    found = {name: self.topic(name) for name in wanted}
                    break
                self._raise_final_locked(missing, unauthorized_wait_ms, now_ms)
                left = deadline - now_ms
                if left <= 0:
                    raise self._lack_error_locked(missing, short, partitions, timeout_ms)
                if missing and not asked and self.hints.ask(missing):
                    # Leaves brokers time to respond in case the source does not.
                    self._held_until_max_ms = now_ms + timeout_ms / 2
                    # Under the lock, so that the source's response cannot come before the deferral begins.
                    self.hold(now_ms + HINT_WAIT_MS)
                asked = asked or bool(missing)
                for name in short:
                    super().mark_stale(name, now_ms)
            self._report_stale(set(short) - stale)
            stale.update(short)
            self._wake_sender()
            check()
            with self._lock:
                if self._lacking_locked(wanted, partitions) == (missing, short):
                    self._updated.wait(min(left, _CHECK_MS) / 1000)
        # Once more: the source may have fetched the topic before its partitions were added.
        self._report_stale(stale)
        return {name: metadata for name, metadata in found.items() if metadata is not None}

    def _lacking_locked(
        self, topics: Iterable[str], partitions: Mapping[str, int]
    ) -> tuple[list[str], list[str]]:
        missing: list[str] = []
        short: list[str] = []
        for name in topics:
            metadata = self.topic(name)
            if metadata is None:
                missing.append(name)
            elif partitions and len(metadata.partitions) < partitions.get(name, 0):
                short.append(name)
        return missing, short

    def _report_stale(self, topics: Iterable[str]) -> None:
        for name in topics:
            self.hints.report_stale(name)

    def _lack_error_locked(
        self, missing: list[str], short: list[str], partitions: Mapping[str, int], timeout_ms: float
    ) -> MetadataTimeoutError | MissingPartitionError:
        if missing:
            return MetadataTimeoutError(self._explain_locked(missing, timeout_ms))
        metadata = self.topic(short[0])
        count = 0 if metadata is None else len(metadata.partitions)
        return MissingPartitionError(
            f"Invalid partition: column 'partition' has {partitions[short[0]] - 1} in a row for topic "
            f"{short[0]!r}, whose partitions are 0 to {count - 1}, and no other came within "
            f"kafka.max.block.ms = {timeout_ms:.0f} ms. Add partitions to the topic, mend the column (null "
            "leaves the choice to the key), or set errors.tolerance=all to skip such rows"
        )

    def _raise_final_locked(self, topics: list[str], unauthorized_wait_ms: float, now_ms: float) -> None:
        for name in topics:
            code = self.topic_error(name) or 0
            reason = _FINAL_TOPIC_ERRORS.get(code)
            if code == TOPIC_AUTHORIZATION_FAILED and self.error_lasts_ms(name) < unauthorized_wait_ms:
                super().mark_stale(name, now_ms)
            elif reason is not None:
                raise TopicRefusedError(f"topic {name!r} cannot be written: {reason}", name)

    def _explain_locked(self, missing: list[str], timeout_ms: float) -> str:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        errors = {self.topic_error(name) for name in missing}
        reasons = ", ".join(_describe(code) for code in errors if code is not None) or "no response"
        return (
            f"no metadata for topic {shown} within kafka.max.block.ms = {timeout_ms:.0f} ms "
            f"({reasons}; brokers: {self._describe_brokers()}). "
            "Create the topic, or check kafka.bootstrap.servers and that the brokers can be reached"
        )

    # -- hints, from any thread -------------------------------------------------------------------

    def import_hints(self, snapshot: MetadataSnapshot, now_ms: float) -> int:
        """Merge what another cache of the same cluster knows; return how many topics were news.

        With ``confirmed_nodes_only``, drop it where it names a broker's address that no broker has named.
        """
        with self._lock:
            if self.confirmed_nodes_only and not set(snapshot.nodes) <= set(self.nodes().values()):
                return 0
            news = self.import_snapshot(snapshot, now_ms)
            self._updated.notify_all()
        if news:
            self._wake_sender()
        return news

    def fetch(self, topics: Iterable[str]) -> None:
        super().fetch(topics)
        self._wake_sender()

    def hold(self, until_ms: float) -> None:
        """Send no request before this time, but wait no longer than half of the task's timeout."""
        self.defer_requests(min(until_ms, self._held_until_max_ms))

    def release(self, now_ms: float) -> None:
        """No hints will come: ask brokers."""
        self.hold(now_ms)
        self._wake_sender()

    def share_refreshes(self, shared: bool) -> None:
        # What is dropped would not be refreshed.
        super().share_refreshes(shared and not self.confirmed_nodes_only)
        self._wake_sender()

    def describe_lookup_error(self, name: str) -> str | None:
        code = self.lookup_error(name)
        return None if code is None else _describe(code)

    # -- the sender's thread ----------------------------------------------------------------------

    def broker(self, node_id: int, network: NetworkClient) -> Broker:
        """What is known of a broker; made at first use."""
        found = self.brokers.get(node_id)
        if found is None:
            found = self.brokers[node_id] = Broker(node_id, network)
            found.node = self.nodes().get(node_id)
        return found

    def on_response(self, update: MetadataUpdate, requested: Collection[str], now_ms: float) -> bool:
        """As MetadataCache's. Wakes the waiting task."""
        with self._lock:
            known = self.cluster_id
            fetched, self._fetching = self._fetching, ()
            switched = super().on_response(update, requested, now_ms)
            self._updated.notify_all()
        if fetched:
            self.hints.fetched(fetched, update)
        if switched:
            _log.warning("brokers of cluster %s respond, instead of %s", update.cluster_id, known)
        return switched

    def on_failure(self, now_ms: float) -> None:
        with self._lock:
            fetched, self._fetching = self._fetching, ()
            super().on_failure(now_ms)
        if fetched:
            self.hints.fetched(fetched, None)

    def mark_stale(self, topic: str, now_ms: float) -> None:
        super().mark_stale(topic, now_ms)
        self.hints.report_stale(topic)

    def leader_hint(
        self,
        partition: TopicPartition,
        leader: int,
        epoch: int,
        nodes: Iterable[Node],
        topic_id: bytes | None = None,
    ) -> bool:
        news = super().leader_hint(partition, leader, epoch, nodes, topic_id)
        if news:
            self.hints.report_leader(partition, leader, epoch, topic_id)
        return news


def _describe(code: int) -> str:
    return _FINAL_TOPIC_ERRORS.get(code) or error_of(code).name


# As Kafka's EnvVarConfigProvider is written.
_VARIABLE = re.compile(r"\$\{env:([^}]+)\}")


class ClientRack:
    """``rack`` is kafka.client.rack, ``nodes`` returns the brokers by id. ``name`` is "" without a rack."""

    def __init__(
        self, rack: str, nodes: Callable[[], Mapping[int, Node]], environ: Mapping[str, str]
    ) -> None:
        self._nodes = nodes
        found = _VARIABLE.fullmatch(rack)
        self.name = rack if found is None else environ.get(found[1], "")
        if found is not None and not self.name:
            _log.warning(
                "kafka.client.rack=%s: this executor has no variable %s, so it prefers no rack",
                rack,
                found[1],
            )

    def brokers(self) -> frozenset[int]:
        if not self.name:
            return frozenset()
        return frozenset(node.id for node in self._nodes().values() if node.rack == self.name)

    def is_other(self, node_id: int) -> bool:
        node = self._nodes().get(node_id)
        return node is not None and node.rack is not None and node.rack != self.name
