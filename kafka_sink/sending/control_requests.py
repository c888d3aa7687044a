"""The requests beside Produce: metadata and the producer id. Each is under way at most once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kafka_sink.errors import ClusterChangedError, KafkaSinkError
from kafka_sink.metadata.cluster_metadata import ClusterMetadata
from kafka_sink.metadata.rebootstrap import RebootstrapTimer
from kafka_sink.network import requests
from kafka_sink.network.client import NetworkClient, OutboundRequest, RequestFailed, ResponseReceived
from kafka_sink.sending.settings import SenderSettings
from kafka_sink.version import __version__

if TYPE_CHECKING:
    # The coordinator has none, and needs nothing of the batches that it deals with.
    from kafka_sink.sending.producer_identity import ProducerIdentity

# While a broker is being connected to, how long until another may be the better one to ask.
_RECONSIDER_MS = 100.0


@dataclass(frozen=True, slots=True)
class MetadataTag:
    """Marks a Metadata request: the topics it asks for."""

    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProducerIdTag:
    """Marks an InitProducerId request. An answer to an earlier ``generation`` is of another cluster."""

    generation: int


@dataclass(frozen=True, slots=True)
class BrokerProbeTag:
    """Marks the request without rows that asks whether a muted broker answers."""


class ControlRequests:
    """Used by the sender's thread only. Delays are milliseconds until there may be something to do."""

    def __init__(
        self,
        settings: SenderSettings,
        cluster: ClusterMetadata,
        network: NetworkClient,
        identity: ProducerIdentity | None,
    ) -> None:
        self._settings = settings
        self._cluster = cluster
        self._network = network
        self._identity = identity
        self._recovery = RebootstrapTimer(
            rebootstrap=settings.rebootstrap, trigger_ms=settings.rebootstrap_trigger_ms
        )

    def refresh_metadata(self, now_ms: float) -> float:
        """Asks for the metadata that is due."""
        delay = self._cluster.next_request_delay_ms(now_ms)
        if not self._cluster.is_wanting(now_ms):
            self._recovery.satisfied()
            return delay
        if self._recovery.wanted(now_ms):
            self._cluster.forget_nodes()
            self._network.rebootstrap()
            return 0.0
        if delay > 0:
            return delay
        node, delay = self._node_to_ask(now_ms)
        if node is None:
            return delay
        topics = self._cluster.next_request(now_ms)
        if topics is None:
            # Topics grew old, too few for a request of their own: later, and that is when they become urgent.
            return self._cluster.next_request_delay_ms(now_ms)
        version = self._network.api_version(node, requests.METADATA, requests.METADATA_VERSIONS)
        body = requests.encode_metadata(version, topics, self._settings.allow_auto_create_topics)
        self._send(node, requests.METADATA, version, body, MetadataTag(topics), now_ms)
        return math.inf

    def refresh_producer_id(self, now_ms: float) -> float:
        """Asks for a producer id where one is wanted and missing."""
        identity = self._identity
        if identity is None or not identity.may_request(now_ms):
            return math.inf if identity is None else identity.retry_delay_ms(now_ms)
        node, delay = self._node_to_ask(now_ms)
        if node is None:
            return delay
        api = requests.INIT_PRODUCER_ID
        version = self._network.api_version(node, api, requests.INIT_PRODUCER_ID_VERSIONS)
        body = requests.encode_init_producer_id(version, identity.producer_id, identity.producer_epoch)
        identity.requested()
        self._send(node, api, version, body, self._identity_tag(), now_ms)
        return math.inf

    def probe(self, node: int, now_ms: float) -> float | None:
        """Asks one broker for its API versions, the one request that every broker answers to anybody at once.

        It goes where Produce requests go, behind those without an answer, so that its answer speaks for them.
        None where it went; else milliseconds until the broker may be connected to again.
        """
        if not self._network.ready_for_any(node, now_ms):
            return self._network.ready_delay_ms(node, now_ms)
        api = requests.API_VERSIONS
        version = self._network.api_version(node, api, requests.API_VERSIONS_VERSIONS)
        body = requests.encode_api_versions(version, __version__)
        self._send(node, api, version, body, BrokerProbeTag(), now_ms)
        return None

    def _node_to_ask(self, now_ms: float) -> tuple[int | None, float]:
        """A broker that takes a request now, else None and when to look again."""
        node = self._network.least_loaded_node(now_ms)
        if node is None:
            return None, self._network.connect_delay_ms(now_ms)
        if not self._network.ready_for_any(node, now_ms):
            return None, _RECONSIDER_MS
        throttled = self._network.throttled_ms(node, now_ms)
        return (None, throttled) if throttled > 0 else (node, 0.0)

    def _send(self, node: int, api: int, version: int, body: bytes, tag: object, now_ms: float) -> None:
        timeout = self._settings.request_timeout_ms
        self._network.send(node, OutboundRequest(api, version, [body], True, timeout, tag), now_ms)

    def on_response(self, event: ResponseReceived, now_ms: float) -> KafkaSinkError | None:
        """Takes an answer; returns an error with which the producer cannot go on."""
        tag = event.tag
        if isinstance(tag, MetadataTag):
            self._recovery.satisfied()
            update = event.response.update
            try:
                switched = self._cluster.on_response(update, tag.topics, now_ms)
            except ClusterChangedError as error:
                return error
            if switched and self._identity is not None:
                # Another producer of the cluster that answers now may have this id.
                self._identity.forget()
        elif self._identity is not None and tag == self._identity_tag():
            return self._identity.on_response(event.response, now_ms)
        return None

    def on_failure(self, event: RequestFailed, now_ms: float) -> None:
        """No answer will come."""
        if isinstance(event.tag, MetadataTag):
            self._cluster.on_failure(now_ms)
        elif self._identity is not None and event.tag == self._identity_tag():
            self._identity.on_failure(now_ms, event.cause)

    def _identity_tag(self) -> ProducerIdTag:
        return ProducerIdTag(0 if self._identity is None else self._identity.generation)
