"""The sender's requests without rows: producer ids, and probes of brokers that are muted."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kafka_sink.breaker.send_policy import SendPolicy
from kafka_sink.errors import KafkaSinkError
from kafka_sink.network import apis, requests
from kafka_sink.network.client import NetworkClient, OutboundRequest, RequestFailed, ResponseReceived
from kafka_sink.sending.producer_identity import ProducerIdentity
from kafka_sink.version import __version__


@dataclass(frozen=True, slots=True)
class ProducerIdTag:
    """Marks an InitProducerId request. One of an earlier ``generation`` went to another cluster."""

    generation: int


class ProducerIdRequests:
    """Used by the sender's thread. Times are monotonic milliseconds."""

    def __init__(self, identity: ProducerIdentity, network: NetworkClient, request_timeout_ms: float) -> None:
        self._identity = identity
        self._network = network
        self._request_timeout_ms = request_timeout_ms

    def refresh(self, now_ms: float) -> float:
        """Ask for an id where it is missing; return the milliseconds until there may be something to do."""
        identity = self._identity
        if not identity.may_request(now_ms):
            return identity.retry_delay_ms(now_ms)
        # A bootstrap address may lead to another cluster by now, where another producer has the id.
        node, delay = self._network.node_to_ask(now_ms, known_only=True)
        if node is None:
            return delay
        api = apis.INIT_PRODUCER_ID
        version = self._network.api_version(node, api, requests.INIT_PRODUCER_ID_VERSIONS)
        body = requests.encode_init_producer_id(version, identity.producer_id, identity.producer_epoch)
        tag = ProducerIdTag(identity.generation)
        identity.requested()
        request = OutboundRequest(api, version, [body], True, self._request_timeout_ms, tag)
        self._network.send(node, request, now_ms)
        return math.inf

    def on_response(
        self, event: ResponseReceived, tag: ProducerIdTag, now_ms: float
    ) -> KafkaSinkError | None:
        """Take the id; return an error where no retry can help."""
        if tag.generation != self._identity.generation:
            return None
        return self._identity.on_response(event.response, now_ms)

    def on_failure(self, event: RequestFailed, tag: ProducerIdTag, now_ms: float) -> None:
        """The request will get no response."""
        if tag.generation == self._identity.generation:
            self._identity.on_failure(now_ms, event.cause)


@dataclass(frozen=True, slots=True)
class BrokerProbeTag:
    """Marks a probe."""


class BrokerProbes:
    """Used by the sender's thread. Times are monotonic milliseconds."""

    def __init__(self, policy: SendPolicy, network: NetworkClient, request_timeout_ms: float) -> None:
        self._policy = policy
        self._network = network
        self._request_timeout_ms = request_timeout_ms

    def send_due(self, now_ms: float) -> float:
        """Probe every broker that the policy names; return the milliseconds until another can be sent."""
        delay = math.inf
        for node in self._policy.brokers_to_probe():
            if self._network.ready_for_any(node, now_ms):
                self._send(node, now_ms)
                self._policy.on_probe(node, now_ms)
            elif not self._network.knows(node):
                # The cluster no longer lists this broker, and its address is unknown until it is back.
                self._policy.on_probe(node, now_ms)
                self._policy.on_probe_done(node, ConnectionError("the cluster misses it"), now_ms)
            else:
                delay = min(delay, self._network.ready_delay_ms(node, now_ms))
        return delay

    def _send(self, node: int, now_ms: float) -> None:
        """ApiVersions is the one request to which every broker responds at once, without a login too.

        It takes the connection of Produce requests, behind those in flight, so that its response speaks for
        them.
        """
        api = apis.API_VERSIONS
        version = self._network.api_version(node, api, requests.API_VERSIONS_VERSIONS)
        body = requests.encode_api_versions(version, __version__)
        request = OutboundRequest(api, version, [body], True, self._request_timeout_ms, BrokerProbeTag())
        self._network.send(node, request, now_ms)
