"""The sender thread: accumulator to brokers and back.

It owns all sockets. One pass of ``run_once`` expires what is too old, refreshes metadata, drains what is
ready into one Produce request per broker, and acts on what the network reports.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence

from kafka_sink.accumulator.producer_batch import ProducerBatch
from kafka_sink.accumulator.record_accumulator import PartitionQueue, RecordAccumulator
from kafka_sink.backoff import ExponentialBackoff
from kafka_sink.errors import KafkaSinkError
from kafka_sink.network.client import NetworkClient, NetworkEvent, RequestFailed, ResponseReceived
from kafka_sink.sending import outcomes
from kafka_sink.sending.batch_completion import BatchCompletion
from kafka_sink.sending.cluster_view import ClusterView
from kafka_sink.sending.control_requests import ControlRequests
from kafka_sink.sending.deliveries import Deliveries
from kafka_sink.sending.observer import NoObserver, SendObserver
from kafka_sink.sending.produce_requests import ProduceRequests, ProduceTag
from kafka_sink.sending.producer_identity import ProducerIdentity
from kafka_sink.sending.settings import SenderSettings

_log = logging.getLogger(__name__)
_LONGEST_POLL_MS = 1000.0


class Sender(threading.Thread):
    """Runs until ``close``; a daemon, because a killed task must not be kept alive by it."""

    def __init__(
        self,
        settings: SenderSettings,
        accumulator: RecordAccumulator,
        cluster: ClusterView,
        network: NetworkClient,
        identity: ProducerIdentity | None,
        backoff: ExponentialBackoff,
        clock_ms: Callable[[], float],
        observer: SendObserver | None = None,
    ) -> None:
        super().__init__(name="kafka-chunked-sender", daemon=True)
        self.crash: BaseException | None = None
        self._settings = settings
        self._accumulator = accumulator
        self._cluster = cluster
        self._network = network
        self._identity = identity
        self._clock_ms = clock_ms
        self._observer: SendObserver = observer or NoObserver()
        self._completion = BatchCompletion(settings, accumulator, cluster, identity, backoff, self._observer)
        self._control = ControlRequests(settings, cluster, network, identity)
        self._requests = ProduceRequests(settings, cluster, network, identity)
        self._closing = False
        self._known_version = -1

    @property
    def deliveries(self) -> Deliveries:
        """What became of the present task's batches."""
        return self._completion.deliveries

    def begin(self) -> None:
        """A new task: its counts start at zero."""
        self._completion.deliveries = Deliveries()

    # -- the loop ---------------------------------------------------------------------------------

    def run(self) -> None:
        """The thread's body. A bug here must not look like a slow broker, so it is kept and told."""
        try:
            while not self._closing:
                self.run_once(self._clock_ms())
        except Exception as error:  # noqa: BLE001 - whatever it is, the waiting task must hear of it
            self.crash = error
            _log.exception("the sender stopped on an unexpected error")
            self.deliveries.failed(None, 0, KafkaSinkError(f"the sender stopped: {error!r}"))
            with self._accumulator.lock:
                self._accumulator.completed.notify_all()
        finally:
            self._network.close()

    def run_once(self, now_ms: float) -> None:
        """One pass; blocks in the network poll until something can happen."""
        delay = min(_LONGEST_POLL_MS, self._completion.expire(now_ms))
        self._refresh_nodes()
        delay = min(delay, self._control.refresh_metadata(now_ms))
        if self._identity is not None and not self._identity.ready:
            delay = min(delay, self._control.refresh_producer_id(now_ms))
        else:
            delay = min(delay, self._send_ready(now_ms))
        for event in self._network.poll(max(delay, 0.0), now_ms):
            self._handle(event, self._clock_ms())

    def wakeup(self) -> None:
        """From any thread: something changed."""
        self._network.wakeup()

    def close(self, timeout_ms: float) -> None:
        """Ends the thread; batches without an answer stay without one."""
        self._closing = True
        self._network.wakeup()
        if self.is_alive():
            self.join(timeout_ms / 1000)

    def _refresh_nodes(self) -> None:
        if self._cluster.version != self._known_version:
            self._known_version = self._cluster.version
            self._network.set_nodes(self._cluster.nodes().values())

    # -- produce ----------------------------------------------------------------------------------

    def _send_ready(self, now_ms: float) -> float:
        muted = self._observer.muted(now_ms)
        check = self._accumulator.ready(self._cluster.leader, now_ms, muted)
        delay = min(check.next_check_delay_ms, self._observer.next_change_ms(now_ms))
        for topic in check.unknown_leaders:
            self._cluster.mark_stale(topic, now_ms)
        if check.unknown_leaders:
            delay = min(delay, self._cluster.next_request_delay_ms(now_ms))
        for node, queues in check.nodes.items():
            if not self._network.ready(node, now_ms):
                delay = min(delay, self._network.ready_delay_ms(node, now_ms))
                continue
            delay = min(delay, self._produce(node, queues, now_ms))
        return delay

    def _produce(self, node: int, queues: Sequence[PartitionQueue], now_ms: float) -> float:
        """Sends one request; 0 where more may be waiting for the same broker."""
        taken = self._accumulator.drain(node, queues, self._settings.max_request_size, self._may_send)
        if not taken:
            return math.inf
        request = self._requests.build(node, taken, now_ms)
        self._completion.sent(node, taken, now_ms)
        self._network.send(node, request, now_ms)
        return 0.0

    def _may_send(self, batch: ProducerBatch) -> bool:
        return self._identity is None or self._identity.may_send(batch)

    # -- what the network reports -------------------------------------------------------------------

    def _handle(self, event: NetworkEvent, now_ms: float) -> None:
        if isinstance(event, ResponseReceived):
            if isinstance(event.tag, ProduceTag):
                self._completion.on_response(event, event.tag, now_ms)
                return
            failure = self._control.on_response(event, now_ms)
            if failure is not None:
                self._completion.fail_all(failure)
        elif isinstance(event, RequestFailed):
            if isinstance(event.tag, ProduceTag):
                self._completion.on_failure(event, event.tag, now_ms)
            else:
                self._control.on_failure(event, now_ms)
            if outcomes.is_final(event.cause):
                self._completion.fail_all(event.cause)
