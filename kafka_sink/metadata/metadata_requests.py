"""Metadata requests: when one is due, which broker gets it, when to rebootstrap. At most one is in flight.

The sender of each task and the coordinator use it, each with its own view of the cluster.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kafka_sink.metadata.cluster_metadata import ClusterMetadata
from kafka_sink.network import apis, requests
from kafka_sink.network.broker_protocol import Request
from kafka_sink.network.client import NetworkClient

if TYPE_CHECKING:
    from kafka_sink.options import SinkOptions


# The least time between two rebootstraps. With a shorter trigger each would be given up before it could
# connect and receive a response; with a trigger of 0, before it sent anything.
_MIN_APART_MS = 1000.0


class MetadataRequests:
    """Used by the thread that polls ``network``. Times are monotonic milliseconds.

    ``on_response(topics, response, now_ms)`` gets the response to a request for these topics, and calls
    ``merge``.

    Metadata that is wanted for metadata.recovery.rebootstrap.trigger.ms without a response makes it forget
    the known brokers and start again from the bootstrap addresses (KIP-899, KIP-1102). Brokers that refuse
    connections need no such time: the network client tries the bootstrap addresses at once. It is for brokers
    that take requests and never respond.
    """

    def __init__(
        self,
        options: SinkOptions,
        cluster: ClusterMetadata,
        network: NetworkClient,
        on_response: Callable[[tuple[str, ...], requests.MetadataResponse, float], object],
    ) -> None:
        self._options = options
        self._on_response = on_response
        self._cluster = cluster
        self._network = network
        # Since when metadata has been wanted without a response, and when brokers may be forgotten again.
        self._wanted_since_ms: float | None = None
        self._rebootstrap_at_ms = -math.inf

    def refresh(self, now_ms: float) -> float:
        """Send the request that is due; return the milliseconds until there may be something to do."""
        delay = self._cluster.next_request_delay_ms(now_ms)
        if not self._cluster.is_wanting(now_ms):
            self._wanted_since_ms = None
            return delay
        if self._must_rebootstrap(now_ms):
            self._cluster.forget_nodes()
            self._network.rebootstrap()
            return 0.0
        if delay > 0:
            return delay
        connection, delay = self._network.connection_to_ask(now_ms)
        if connection is None:
            return delay
        topics = self._cluster.next_request(now_ms)
        if topics is None:
            # Some topics have aged, but too few for a request of their own. They wait until one is urgent.
            return self._cluster.next_request_delay_ms(now_ms)
        version = connection.api_version(apis.METADATA)
        body = requests.encode_metadata(version, topics, self._options.allow_auto_create_topics)
        request = Request(
            apis.METADATA,
            version,
            [body],
            self._options.request_timeout_ms,
            partial(self._on_response, topics),
            self._on_failure,
            asked=len(topics),
        )
        self._network.send(connection, request, now_ms)
        return math.inf

    def _on_failure(self, cause: Exception, possibly_sent: bool, now_ms: float) -> None:
        self._cluster.on_failure(now_ms)

    def _must_rebootstrap(self, now_ms: float) -> bool:
        """Metadata is wanted. If True, the time begins anew."""
        options, since_ms = self._options, self._wanted_since_ms
        if since_ms is None:
            since_ms = self._wanted_since_ms = now_ms
        if options.metadata_recovery_strategy != "rebootstrap" or now_ms < self._rebootstrap_at_ms:
            return False
        if now_ms - since_ms < options.metadata_recovery_rebootstrap_trigger_ms:
            return False
        self._wanted_since_ms = now_ms
        self._rebootstrap_at_ms = now_ms + _MIN_APART_MS
        return True

    def merge(self, topics: tuple[str, ...], response: requests.MetadataResponse, now_ms: float) -> bool:
        """Merge the response. True where another cluster responded and no row had been sent to the first.

        Raises ClusterChangedError where rows had been sent.
        """
        self._wanted_since_ms = None
        return self._cluster.on_response(response.update, topics, now_ms)
