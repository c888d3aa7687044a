"""Metadata requests: which broker gets them, and when to bootstrap again (KIP-899, KIP-1102)."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from kafka_sink.cluster.producer_metadata import ProducerMetadata
from kafka_sink.network import apis, requests
from kafka_sink.network.broker_protocol import Request
from kafka_sink.network.client import NetworkClient
from kafka_sink.options import SinkOptions

# The shortest time between two bootstraps. With a shorter trigger, each bootstrap would be abandoned before
# it could connect and receive a response.
_MIN_APART_MS = 1000.0


class MetadataRequests:
    """Sends Metadata requests. Used by the thread that polls ``network``. Times are monotonic milliseconds.

    ``on_response(topics, response, now_ms)`` is called with the response to a request for these topics.

    If a request has been due for metadata.recovery.rebootstrap.trigger.ms and no response has arrived, the
    known brokers are forgotten, and the client starts again from the bootstrap addresses (KIP-899, KIP-1102).
    This is for brokers that accept requests and never respond. If brokers refuse connections, the network
    client tries the bootstrap addresses without this wait.
    """

    def __init__(
        self,
        options: SinkOptions,
        cluster: ProducerMetadata,
        network: NetworkClient,
        on_response: Callable[[tuple[str, ...], requests.MetadataResponse, float], object],
    ) -> None:
        self._options = options
        self._on_response = on_response
        self._cluster = cluster
        self._network = network
        # Since when a request has been due, or when brokers were last forgotten if that was later. Then when
        # brokers may be forgotten again.
        self._wanted_since_ms: float | None = None
        self._rebootstrap_at_ms = -math.inf

    def refresh(self, now_ms: float) -> float:
        """Send a request if one is due. Return the milliseconds until the next call may have an effect."""
        delay = self._cluster.next_request_delay_ms(now_ms)
        if not self._cluster.has_request_due(now_ms):
            self._wanted_since_ms = None
            return delay
        if self._must_rebootstrap(now_ms):
            self._cluster.forget_nodes()
            self._network.rebootstrap()
            self._cluster.connect_brokers()
            return 0.0
        if delay > 0:
            return delay
        connection, delay = self._network.connection_to_ask(now_ms)
        if connection is None:
            return delay
        topics = self._cluster.next_request(now_ms)
        if topics is None:
            # Some topics have aged, but too few for a request of their own. They wait until another topic is
            # urgent.
            self._wanted_since_ms = None
            return self._cluster.next_request_delay_ms(now_ms)
        version = connection.api_version(apis.METADATA)
        body = requests.encode_metadata(version, topics, self._options.allow_auto_create_topics)
        request = Request(
            apis.METADATA,
            version,
            [body],
            self._options.request_timeout_ms,
            partial(self._on_response, topics),
            lambda _cause, _possibly_sent, now_ms: self._cluster.on_failure(now_ms),
            asked=len(topics),
        )
        self._network.send(connection, request, now_ms)
        return math.inf

    def _must_rebootstrap(self, now_ms: float) -> bool:
        """Whether to bootstrap again, now that a request is due. If it returns True, the wait starts
        again."""
        options, since_ms = self._options, self._wanted_since_ms
        if since_ms is None:
            since_ms = self._wanted_since_ms = now_ms
        if options.metadata_recovery_strategy != "rebootstrap" or now_ms < self._rebootstrap_at_ms:
            return False
        silent_ms = now_ms - max(since_ms, self._cluster.response_ms)
        if silent_ms < options.metadata_recovery_rebootstrap_trigger_ms:
            return False
        self._wanted_since_ms = now_ms
        self._rebootstrap_at_ms = now_ms + _MIN_APART_MS
        return True
