"""Fetches metadata for the whole application with one cache, one network client and one thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kafka_sink.clock import RANDOM, ExponentialBackoff, monotonic_ms
from kafka_sink.coordinator.metadata.handler import Lookups, MetadataHandler
from kafka_sink.coordinator.metadata.messages import coordinator_idle_ms
from kafka_sink.coordinator.transport.handlers import Handler
from kafka_sink.metadata.cluster_metadata import ClusterMetadata
from kafka_sink.metadata.metadata_requests import MetadataRequests
from kafka_sink.metadata.refresh_schedule import NON_URGENT_SHARE
from kafka_sink.network.client import NetworkClient
from kafka_sink.network.requests import MetadataResponse
from kafka_sink.options import SinkOptions

_log = logging.getLogger(__name__)
_MAX_POLL_MS = 1000.0
# The coordinator refreshes a topic before tasks consider it expired, with time to push the response. Topics
# become non-urgent at half of metadata.max.age.ms (KIP-526); tasks leave those to the coordinator.
_SHARE_OF_AGE = 0.9
_RESTART_MS, _RESTART_MAX_MS = 1000.0, 60_000.0


class MetadataFetcher(threading.Thread):
    """Refreshes ``view`` and notifies the handler. A daemon; no exception ends the thread."""

    def __init__(self, options: SinkOptions) -> None:
        super().__init__(name="kafka-chunked-metadata", daemon=True)
        self._options = options
        self._network = NetworkClient(options, monotonic_ms)
        self._listen()
        self.view = ClusterMetadata(
            monotonic_ms,
            self.wake,
            self._describe,
            RANDOM.random,
            max_age_ms=options.metadata_max_age_ms * _SHARE_OF_AGE,
            idle_ms=coordinator_idle_ms(options.metadata_max_idle_ms),
            retry_backoff_ms=options.retry_backoff_ms,
            retry_backoff_max_ms=options.retry_backoff_max_ms,
            non_urgent_share=NON_URGENT_SHARE / _SHARE_OF_AGE,
        )
        self._handler: MetadataHandler | None = None
        self._requests = self._new_requests()
        self._known_version = -1
        self._closing = threading.Event()

    def _describe(self) -> str:
        return self._network.describe_brokers()

    def begin(self, handler: MetadataHandler) -> None:
        """Start the thread. ``handler`` is notified of every response."""
        self._handler = handler
        self.start()

    def wake(self) -> None:
        """There may be metadata to request. Any thread."""
        self._network.wakeup()

    def close(self) -> None:
        """Ask the thread to end."""
        self._closing.set()
        self._network.wakeup()

    def run(self) -> None:
        backoff = ExponentialBackoff(_RESTART_MS, _RESTART_MAX_MS, RANDOM.random)
        failures = 0
        while not self._closing.is_set():
            try:
                self._run_once(monotonic_ms())
            except Exception as error:  # noqa: BLE001 - a bug must not end the thread; tasks fetch by themselves meanwhile
                failures += 1
                _log.exception("Fetching metadata failed")
                self._failed(f"{type(error).__name__}: {error}")
                self._network.close()
                self._closing.wait(backoff.delay_ms(failures) / 1000)
                self._network = NetworkClient(self._options, monotonic_ms)
                self._listen()
                self._requests = self._new_requests()
                self.view.on_failure(monotonic_ms())
        self._network.close()

    def _run_once(self, now_ms: float) -> None:
        if self.view.version != self._known_version:
            self._known_version = self.view.version
            self._network.set_addresses(self.view.nodes().values())
        delay_ms = min(_MAX_POLL_MS, self._requests.refresh(now_ms))
        self._network.poll(max(delay_ms, 0.0), now_ms)

    def _listen(self) -> None:
        self._network.on_connected = lambda *_: self._failed(None)
        self._network.on_disconnected = self._on_disconnected

    def _new_requests(self) -> MetadataRequests:
        return MetadataRequests(self._options, self.view, self._network, self._on_response)

    def _on_response(self, topics: tuple[str, ...], response: MetadataResponse, now_ms: float) -> None:
        self._requests.merge(topics, response, now_ms)
        if self._handler is not None:
            self._handler.on_response(topics)
        self._failed(None)

    def _on_disconnected(self, *_: object) -> None:
        errors = self._network.connection_errors()
        nodes = list(self.view.nodes().values()) or self._network.bootstrap_nodes()
        if all(node in errors for node in nodes):
            self._failed(self._describe())

    def _failed(self, reason: str | None) -> None:
        if self._handler is not None:
            self._handler.failed(reason)


class _FetchingHandler(MetadataHandler):
    """A handler that owns its fetcher."""

    def __init__(
        self,
        fetcher: MetadataFetcher,
        wake: Callable[[], None],
        lookups: Lookups | None,
        *,
        auto_create: bool,
    ) -> None:
        super().__init__(fetcher.view, fetcher.wake, wake, auto_create=auto_create, lookups=lookups)
        self._fetcher = fetcher

    def close(self) -> None:
        self._fetcher.close()


def metadata_handler(
    options: SinkOptions, wake: Callable[[], None], lookups: Lookups | None = None
) -> Handler:
    """The metadata handler of a cluster, with its fetcher started. It counts in ``lookups``."""
    fetcher = MetadataFetcher(options)
    handler = _FetchingHandler(fetcher, wake, lookups, auto_create=options.allow_auto_create_topics)
    fetcher.begin(handler)
    return handler
