"""The metadata cache of a task: the task's thread waits for topics, and the sender's thread uses brokers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from kafka_sink.clock import COORDINATOR_WAIT_MS, Clock
from kafka_sink.cluster.broker import Broker
from kafka_sink.cluster.metadata import FINAL_TOPIC_ERRORS, ClusterMetadata
from kafka_sink.errors import MetadataTimeoutError, MissingPartitionError, TopicRefusedError
from kafka_sink.kafka_errors import TOPIC_AUTHORIZATION_FAILED
from kafka_sink.model import TopicMetadata
from kafka_sink.network.client import NetworkClient
from kafka_sink.options import SinkOptions
from kafka_sink.printable import first_of
from kafka_sink.security.settings import SecuritySettings

# How often a wait calls ``check``.
_CHECK_MS = 100.0
_NO_PARTITIONS: Mapping[str, int] = {}


class ProducerMetadata(ClusterMetadata):
    """A cache that the task's sender refreshes. It also has the producer's ``Broker`` objects."""

    def __init__(self, options: SinkOptions, clock_ms: Clock, network: NetworkClient) -> None:
        super().__init__(options)
        self._clock_ms = clock_ms
        self._network = network
        # With public certificate authorities any host can present a trusted certificate, so an address that
        # another task reported could divert the rows.
        tls = SecuritySettings.from_options(options).tls
        self.confirmed_nodes_only = tls is not None and tls.trust is None
        # The ``Broker`` objects by id. Only the sender's thread adds and removes brokers. Other threads
        # iterate over a copy.
        self.brokers: dict[int, Broker] = {}

    def _wake_sender(self) -> None:
        self._network.wakeup()

    # -- the task's thread ------------------------------------------------------------------------

    def await_topics(
        self,
        topics: Iterable[str],
        timeout_ms: float,
        check: Callable[[], None],
        partitions: Mapping[str, int] = _NO_PARTITIONS,
        unauthorized_wait_ms: float = 0.0,
    ) -> dict[str, TopicMetadata]:
        """Wait for the metadata of all these topics. One request asks for all unknown topics.

        Args:
            topics: The names of the topics.
            timeout_ms: How long to wait at most (max.block.ms).
            check: Called while waiting. It raises if the task has failed.
            partitions: The number of partitions that a topic needs for rows that specify theirs. A topic
                known with fewer partitions may have more by now, so this waits for newer metadata, as Kafka's
                producer does.
            unauthorized_wait_ms: How long to keep asking for a topic after TOPIC_AUTHORIZATION_FAILED, which
                brokers also return while they load their ACLs.

        Raises:
            MetadataTimeoutError: The metadata did not arrive in time. It contains the topics and the last
                error.
            TopicRefusedError: A topic can never be written.
            MissingPartitionError: A partition still did not exist after ``timeout_ms``.
        """
        wanted = tuple(topics)
        deadline_ms = self._clock_ms() + timeout_ms
        if self.coordinator is not None:
            self.coordinator.on_use(wanted)
        asked = False
        stale: set[str] = set()
        while True:
            with self._lock:
                now_ms = self._clock_ms()
                self.on_use(wanted, now_ms)
                missing, short = self._lacking(wanted, partitions)
                if not missing and not short:
                    known = {name: metadata for name in wanted if (metadata := self.topic(name)) is not None}
                    break
                self._raise_final_locked(missing, unauthorized_wait_ms, now_ms)
                if now_ms >= deadline_ms:
                    raise self._lack_error(missing, short, partitions, timeout_ms)
                if missing and not asked:
                    self._ask_others_locked(missing, timeout_ms, now_ms)
                    asked = True
                for name in short:
                    self._mark_stale_locked(name, now_ms)
                version = self.version
            self._report_stale(short.keys() - stale)
            stale.update(short)
            self._await_change(version, deadline_ms - now_ms, check)
        # The topics are reported again when this wait ends, because the coordinator's copy may still be older
        # than the added partitions.
        self._report_stale(stale)
        return known

    def _await_change(self, version: int, timeout_ms: float, check: Callable[[], None]) -> None:
        """Wait until the metadata differs from this version, for a short time at most."""
        self._wake_sender()
        check()
        with self._lock:
            if self.version == version:
                self._updated.wait(min(timeout_ms, _CHECK_MS) / 1000)

    def _lacking(
        self, topics: Iterable[str], partitions: Mapping[str, int]
    ) -> tuple[list[str], dict[str, int]]:
        """The topics without metadata, and the number of partitions of each topic that has too few."""
        missing: list[str] = []
        short: dict[str, int] = {}
        for name in topics:
            metadata = self.topic(name)
            if metadata is None:
                missing.append(name)
            elif len(metadata.partitions) < partitions.get(name, 0):
                short[name] = len(metadata.partitions)
        return missing, short

    def _ask_others_locked(self, topics: list[str], timeout_ms: float, now_ms: float) -> None:
        # The lock is held, so that the coordinator's response cannot arrive before the pause begins.
        if self.coordinator is not None and self.coordinator.ask(topics):
            # This leaves brokers time to respond if the coordinator does not.
            self._paused_until_max_ms = now_ms + timeout_ms / 2
            self.pause_requests(now_ms + COORDINATOR_WAIT_MS)

    def describe_lack(self, topics: Iterable[str], partitions: Mapping[str, int]) -> str:
        """A text for the log: what ``await_topics`` waits for with these arguments."""
        missing, short = self._lacking(topics, partitions)
        if missing:
            shown, why = self._missing_texts(missing)
            return f"metadata of topic {shown} ({why})"
        for name, count in short.items():
            return f"partition {partitions[name] - 1} of topic {name}, which has {count} partitions"
        return "metadata"

    def _missing_texts(self, missing: list[str]) -> tuple[str, str]:
        """The names of topics without metadata, and the reason, as texts."""
        errors = filter(None, {self.describe_lookup_error(name) for name in missing})
        reason = ", ".join(errors) or "no response"
        return first_of(missing), f"{reason}; brokers: {self._network.describe_brokers()}"

    def _lack_error(
        self, missing: list[str], short: dict[str, int], partitions: Mapping[str, int], timeout_ms: float
    ) -> MetadataTimeoutError | MissingPartitionError:
        if missing:
            shown, why = self._missing_texts(missing)
            return MetadataTimeoutError(
                f"no metadata for topic {shown} within kafka.max.block.ms = {timeout_ms:.0f} ms ({why}). "
                "Create the topic, or check kafka.bootstrap.servers and that the brokers can be reached"
            )
        topic, count = next(iter(short.items()))
        return MissingPartitionError(
            f"Invalid partition: column 'partition' has {partitions[topic] - 1} in a row for topic "
            f"{topic!r}, whose partitions are 0 to {count - 1}, and none was added within "
            f"kafka.max.block.ms = {timeout_ms:.0f} ms. Add partitions to the topic, fix the column (with "
            "null the key decides), or set errors.tolerance=all to skip such rows"
        )

    def _raise_final_locked(self, topics: list[str], unauthorized_wait_ms: float, now_ms: float) -> None:
        for name in topics:
            state = self._topics[name]
            reason = FINAL_TOPIC_ERRORS.get(state.error)
            lasts_ms = state.error_ms - state.error_since_ms
            if state.error == TOPIC_AUTHORIZATION_FAILED and lasts_ms < unauthorized_wait_ms:
                self._mark_stale_locked(name, now_ms)
            elif reason is not None:
                raise TopicRefusedError(f"topic {name!r} cannot be written: {reason}", name)

    # -- the sender's thread ----------------------------------------------------------------------

    def broker(self, node_id: int) -> Broker:
        """The ``Broker`` object with this id, created at its first use."""
        broker = self.brokers.get(node_id)
        if broker is None:
            broker = self.brokers[node_id] = Broker(node_id, self._network)
            broker.node = self.nodes().get(node_id)
        return broker

    def connect_brokers(self) -> None:
        """Give each broker its connection again, because ``NetworkClient.connections`` has changed."""
        for broker in self.brokers.values():
            broker.connection = self._network.connections.get(broker.id)
