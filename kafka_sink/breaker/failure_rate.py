"""The default breaker: mutes partitions by failure rate (KIP-693), brokers by silence."""

from __future__ import annotations

import math
from collections.abc import Mapping

from kafka_sink.breaker.interface import PartitionCircuitBreaker, ProducerStatusContext
from kafka_sink.breaker.manager import CircuitBreakManager
from kafka_sink.breaker.outcomes import Health, OutcomeWindows, has_response, health_of
from kafka_sink.breaker.states import Evidence
from kafka_sink.errors import ConfigurationError
from kafka_sink.model import TopicPartition
from kafka_sink.options.breaker import failure_rate_settings, full_name
from kafka_sink.timing_bounds import CONFIRM_SILENCE_MS

_MAX_IN_FLIGHT = "max.in.flight.requests.per.connection"
_REQUEST_TIMEOUT = "request.timeout.ms"


class FailureRateCircuitBreaker(PartitionCircuitBreaker):
    """Mutes partitions that fail and brokers that are silent.

    A partition fails if trigger.failure.perc of its batches, three at least, failed within ten seconds or
    without a success in between. Nothing is judged before trigger.message.count rows were sent in all.

    A broker is silent if its oldest request has had no response far beyond the usual latency while others
    respond, or if batches wait for it and it cannot be reached. Probes end the mutes, and so do the late
    responses of a silent broker.
    """

    def __init__(self) -> None:
        self._manager: CircuitBreakManager | None = None
        self._windows = OutcomeWindows(1, 100)
        self.latency = UsualLatency(0.0, 1.0, 0.0)
        self._notices_silence = False
        self._min_ms = self._max_ms = 0.0
        self._factor = 1.0
        self._mutes_full = False
        # By broker, since when its silence is suspicious.
        self._suspects: dict[int, float] = {}
        # Brokers that this producer found silent.
        self._silent: set[int] = set()
        self._last_response_ms: dict[int, float] = {}
        # The broker of the last response, when its request was sent, and when it came.
        self._observed: tuple[int, float, float] | None = None
        # By broker, when its mute for silence ended. Requests sent before then are late already and say
        # nothing new.
        self._forgiven_ms: dict[int, float] = {}
        # No silence can be long enough before then, whatever is sent or comes back meanwhile.
        self._look_at_ms = 0.0

    def configure(self, configs: Mapping[str, str]) -> None:
        """Take the options of docs/options.md. Raises ConfigurationError."""
        given = {
            name: text for name, text in configs.items() if name not in (_MAX_IN_FLIGHT, _REQUEST_TIMEOUT)
        }
        settings = failure_rate_settings(given)
        self._windows = OutcomeWindows(settings.trigger_message_count, settings.trigger_failure_perc)
        self._min_ms = settings.slow_request_min_ms
        self._notices_silence = self._min_ms > 0
        self._max_ms = float(configs.get(_REQUEST_TIMEOUT, "30000")) / 2
        self._factor = settings.slow_request_factor
        self.latency = UsualLatency(self._min_ms, self._factor, self._max_ms)
        self._mutes_full = settings.mute_in_flight_full
        if self._mutes_full and configs.get(_MAX_IN_FLIGHT) != "1":
            raise ConfigurationError(
                f"Option '{full_name('enable.mute.inflight.full')}' needs kafka.{_MAX_IN_FLIGHT}=1: with "
                "more requests in flight, one without a response says nothing. Set that, or leave this out"
            )

    def set_circuit_break_manager(self, circuit_break_manager: CircuitBreakManager) -> None:
        self._manager = circuit_break_manager

    def on_send(self, context: ProducerStatusContext) -> bool:
        if not self._mutes_full or self._manager is None:
            return False
        self._manager.mute_congested(context.node_id)
        return True

    def on_complete(
        self, context: ProducerStatusContext, topic_partition: TopicPartition, exception: Exception | None
    ) -> bool:
        manager = self._manager
        if manager is None:
            return False
        node = context.node_id
        if self._mutes_full and node not in context.in_flight_requests:
            manager.unmute_congested(node)
        changed = False
        now_ms, sent_ms = context.now, context.request_sent_ms
        if has_response(exception):
            self._last_response_ms[node] = now_ms
            if (node, sent_ms, now_ms) != self._observed:
                # One response is one observation, however many batches it is for.
                self._observed = node, sent_ms, now_ms
                self.latency.observe(node, max(0.0, now_ms - sent_ms))
            changed = node in self._silent and self._end_silence(manager, context)
        health = health_of(exception)
        if health is Health.NEUTRAL:
            return changed
        failed = health is Health.UNHEALTHY
        tripped = self._windows.record(topic_partition, context.record_count, sent_ms, now_ms, failed=failed)
        if tripped and not manager.is_muted(topic_partition):
            failures, total = self._windows.counts(topic_partition)
            self._windows.forget(topic_partition)
            reason = f"{failures} of the last {total} batches failed; last error: {exception}"
            manager.mute(topic_partition, reason, Evidence(counted=True))
            return True
        return changed

    def _end_silence(self, manager: CircuitBreakManager, context: ProducerStatusContext) -> bool:
        node = context.node_id
        if self._age_ms(context, node) > self.latency.threshold_ms(node):
            return False
        self._silent.discard(node)
        for infos in manager.muted_partitions_for_node(node).values():
            for info in infos:
                # Failures during the silence must not mute partitions again that have come back.
                self._windows.forget(TopicPartition(info.topic, info.partition))
        manager.unmute(node, "it responds again")
        return True

    def on_tick(self, context: ProducerStatusContext) -> bool:
        manager = self._manager
        if manager is None or not self._notices_silence or context.now < self._look_at_ms:
            return False
        awaited = {*context.oldest_request_ms, *context.unreachable_since_ms}
        changed = False
        for node in awaited:
            if node in self._silent and not manager.is_muted(node):
                self._silent.discard(node)
                self._forgiven_ms[node] = context.now
            if self._age_ms(context, node) <= self._limit_ms(context, node):
                self._suspects.pop(node, None)
                continue
            since = self._suspects.setdefault(node, context.now)
            if context.now - since >= CONFIRM_SILENCE_MS and (
                manager.is_muted(node) or self._others_respond(manager, context, node)
            ):
                if node in context.oldest_request_ms:
                    self._silent.add(node)
                if not manager.is_muted(node):
                    silence = Evidence(silence_ms=self._age_ms(context, node))
                    manager.mute(node, self._describe(context, node), silence)
                    changed = True
        for node in self._suspects.keys() - awaited:
            del self._suspects[node]
        # A failed request is no recovery: then a probe has to end the mute.
        self._silent &= context.oldest_request_ms.keys()
        ages = [self._age_ms(context, node) for node in awaited]
        undecided = self._suspects or self._silent
        self._look_at_ms = context.now + (0.0 if undecided else self._min_ms - max(ages, default=0.0))
        return changed

    def _others_respond(
        self, manager: CircuitBreakManager, context: ProducerStatusContext, node: int
    ) -> bool:
        """Whether a mute would help: another broker has responded since the silence began, and leads
        partitions.

        Otherwise all brokers are slow, or this client is. Brokers that have nothing to respond to are asked,
        so that a task with no other rows notices a silence as soon as a busy one.
        """
        others = manager.available_nodes() - {node}
        # Responses in the first half of the silence may have been on their way when everything stopped.
        middle = context.now - self._age_ms(context, node) / 2
        for responses in (self._last_response_ms, context.probed_ms):
            if any(at > middle for other, at in responses.items() if other != node):
                return bool(others)
        for other in others - context.oldest_request_ms.keys() - context.unreachable_since_ms.keys():
            manager.ask(other)
        return False

    def next_tick_ms(self, context: ProducerStatusContext) -> float:
        manager = self._manager
        if manager is None or not self._notices_silence:
            return math.inf
        if context.now < self._look_at_ms:
            awaits = context.oldest_request_ms or context.unreachable_since_ms
            return self._look_at_ms - context.now if awaits else math.inf
        delay = math.inf
        for node in {*context.oldest_request_ms, *context.unreachable_since_ms}:
            if not manager.is_muted(node):
                left = self._limit_ms(context, node) - self._age_ms(context, node)
                # A suspect gets its second look after the sockets have been read.
                delay = min(delay, max(left, 0.0) + CONFIRM_SILENCE_MS)
        return delay

    def _limit_ms(self, context: ProducerStatusContext, node: int) -> float:
        if node in context.oldest_request_ms:
            return self.latency.threshold_ms(node)
        if node in context.failing_connections:
            return self._min_ms
        return setup_threshold_ms(context.setup_ms, node, self._min_ms, self._factor, self._max_ms)

    def _age_ms(self, context: ProducerStatusContext, node: int) -> float:
        """For how long a broker has been silent; 0 if no response is due, or if it is still throttling."""
        since = context.oldest_request_ms.get(node)
        if since is None:
            since = context.unreachable_since_ms.get(node, context.now)
        return max(0.0, context.now - max(since, self._forgiven_ms.get(node, -math.inf)))

    def _describe(self, context: ProducerStatusContext, node: int) -> str:
        age = self._age_ms(context, node)
        if node not in context.oldest_request_ms:
            if node in context.failing_connections:
                return f"it could not be reached for {age:.0f} ms"
            return f"no connection to it was ready within {age:.0f} ms"
        usual = self.latency.usual_ms(node)
        known = "" if usual is None else f", where {usual:.0f} ms is usual"
        count = context.in_flight_requests.get(node, 1)
        return f"no response to {count} request(s) for {age:.0f} ms{known}"


# A broker's usual time to respond or to connect, and from when on a longer time is suspicious. No I/O.


# The weight of the newest response in the mean. The mean rises slowly: it takes some tens of responses to
# follow a broker that has become slow. It falls fast: the slow first responses of a broker are soon
# forgotten.
_WEIGHT_ABOVE, _WEIGHT_BELOW = 0.1, 0.5
# A broker that has not responded yet, while no other has either, gets this multiple of slow.request.min.ms.
_UNKNOWN_FACTOR = 6
# If the first responses of others were quick, it gets this multiple at least.
_UNKNOWN_MIN_FACTOR = 2
# The first responses of a broker say little: it may have had to create files and connections of its own.
_FEW_RESPONSES = 5
# A connection needs this multiple of slow.request.min.ms at least. TLS and SASL take round trips and
# cryptography: 0.9 s was seen where requests take milliseconds, and more where all tasks of a stage connect
# to a broker at once.
_SETUP_MIN_FACTOR = 4


class UsualLatency:
    """By broker. ``min_ms`` and ``factor`` are slow.request.min.ms and slow.request.factor. ``max_ms``
    bounds the threshold, so that a silence is noticed before the request times out."""

    def __init__(self, min_ms: float, factor: float, max_ms: float) -> None:
        self._min_ms = min_ms
        self._factor = factor
        self._max_ms = max_ms
        self._means: dict[int, float] = {}
        self._few: dict[int, int] = {}
        self._slowest_first_ms: float | None = None

    def observe(self, node_id: int, latency_ms: float) -> None:
        """A response. A suspicious latency counts as the threshold: a freeze must not become usual."""
        sample = min(latency_ms, self.threshold_ms(node_id))
        mean = self._means.get(node_id)
        if mean is None:
            self._means[node_id] = sample
            self._few[node_id] = 1
            self._slowest_first_ms = max(sample, self._slowest_first_ms or 0.0)
        else:
            weight = _WEIGHT_ABOVE if sample > mean else _WEIGHT_BELOW
            self._means[node_id] = mean + weight * (sample - mean)
            if node_id in self._few:
                self._count(node_id)

    def _count(self, node_id: int) -> None:
        self._few[node_id] += 1
        if self._few[node_id] >= _FEW_RESPONSES:
            del self._few[node_id]

    def usual_ms(self, node_id: int) -> float | None:
        """The mean latency; None before the first response."""
        return self._means.get(node_id)

    def threshold_ms(self, node_id: int) -> float:
        mean, unknown = self._means.get(node_id), self._unknown_ms()
        wanted = unknown if mean is None else self._factor * mean
        if node_id in self._few:
            wanted = min(wanted, unknown)
        return max(self._min_ms, min(wanted, self._max_ms))

    def _unknown_ms(self) -> float:
        """The bound for a broker's first responses, by the first of others: brokers that just started are
        all slow."""
        limit = _UNKNOWN_FACTOR * self._min_ms
        if self._slowest_first_ms is None:
            return limit
        return min(max(self._factor * self._slowest_first_ms, _UNKNOWN_MIN_FACTOR * self._min_ms), limit)


def setup_threshold_ms(
    setup_ms: Mapping[int, float], node_id: int, min_ms: float, factor: float, max_ms: float
) -> float:
    """The time to connect from which on a broker is suspicious.

    ``setup_ms``: by broker, the last time to connect. A broker that was never connected to is judged by the
    slowest of the others, as all use the same security protocol.
    """
    own = setup_ms.get(node_id)
    if own is None:
        own = max(setup_ms.values(), default=None)
    wanted = _UNKNOWN_FACTOR * min_ms if own is None else factor * own
    return max(_SETUP_MIN_FACTOR * min_ms, min(wanted, max_ms))
