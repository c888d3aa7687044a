"""The default breaker: mutes partitions by failure rate (KIP-693), brokers by silence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from kafka_sink.breaker.interface import PartitionCircuitBreaker, ProducerStatusContext
from kafka_sink.breaker.manager import CircuitBreakManager
from kafka_sink.breaker.outcomes import Health, OutcomeWindows, has_response, health_of
from kafka_sink.breaker.states import Evidence
from kafka_sink.errors import ConfigurationError
from kafka_sink.model import TopicPartition
from kafka_sink.options.breaker import failure_rate_settings, full_name
from kafka_sink.timing_bounds import CONFIRM_SILENCE_MS

if TYPE_CHECKING:
    from kafka_sink.cluster.broker import Broker

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
        # The broker of the last response, when its request was sent, and when it came.
        self._observed: tuple[int, float, float] | None = None
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
        node, broker = context.node_id, context.brokers[context.node_id]
        if self._mutes_full and not broker.sent:
            manager.unmute_congested(node)
        changed = False
        now_ms, sent_ms = context.now, context.request_sent_ms
        if has_response(exception):
            broker.last_response_ms = now_ms
            if (node, sent_ms, now_ms) != self._observed:
                # One response is one observation, however many batches it is for.
                self._observed = node, sent_ms, now_ms
                self.latency.observe(broker, max(0.0, now_ms - sent_ms))
            changed = broker.is_silent and self._end_silence(manager, broker, now_ms)
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

    def _end_silence(self, manager: CircuitBreakManager, broker: Broker, now_ms: float) -> bool:
        if _age_ms(broker, now_ms) > self.latency.threshold_ms(broker):
            return False
        broker.is_silent = False
        for infos in manager.muted_partitions_for_node(broker.id).values():
            for info in infos:
                # Failures during the silence must not mute partitions again that have come back.
                self._windows.forget(TopicPartition(info.topic, info.partition))
        manager.unmute(broker.id, "it responds again")
        return True

    def on_tick(self, context: ProducerStatusContext) -> bool:
        manager = self._manager
        if manager is None or not self._notices_silence or context.now < self._look_at_ms:
            return False
        now_ms = context.now
        oldest_ms = 0.0
        changed = undecided = False
        for broker in context.brokers.values():
            if _is_awaited(broker):
                changed |= self._judge_silence(manager, context, broker)
                oldest_ms = max(oldest_ms, _age_ms(broker, now_ms))
            else:
                broker.suspect_since_ms = None
            # A failed request is no recovery: then a probe has to end the mute.
            broker.is_silent &= bool(broker.sent)
            undecided |= broker.is_silent or broker.suspect_since_ms is not None
        self._look_at_ms = now_ms + (0.0 if undecided else self._min_ms - oldest_ms)
        return changed

    def _judge_silence(
        self, manager: CircuitBreakManager, context: ProducerStatusContext, broker: Broker
    ) -> bool:
        """Mute a broker whose silence is certain; return whether that is new."""
        now_ms, is_muted = context.now, manager.is_muted(broker.id)
        if broker.is_silent and not is_muted:
            # Requests sent before now are late already and say nothing new.
            broker.is_silent = False
            broker.forgiven_ms = now_ms
        age_ms = _age_ms(broker, now_ms)
        if age_ms <= self._limit_ms(context, broker):
            broker.suspect_since_ms = None
            return False
        if broker.suspect_since_ms is None:
            broker.suspect_since_ms = now_ms
        if now_ms - broker.suspect_since_ms < CONFIRM_SILENCE_MS:
            return False
        if not is_muted and not self._others_respond(manager, context, broker):
            return False
        broker.is_silent |= bool(broker.sent)
        if is_muted:
            return False
        manager.mute(broker.id, self._describe(broker, now_ms), Evidence(silence_ms=age_ms))
        return True

    def _others_respond(
        self, manager: CircuitBreakManager, context: ProducerStatusContext, broker: Broker
    ) -> bool:
        """Whether a mute would help: another broker has responded since the silence began, and leads
        partitions.

        Otherwise all brokers are slow, or this client is. Brokers that have nothing to respond to are asked,
        so that a task with no other rows notices a silence as soon as a busy one.
        """
        leading = manager.available_nodes() - {broker.id}
        # Responses in the first half of the silence may have been on their way when everything stopped.
        middle = context.now - _age_ms(broker, context.now) / 2
        for other in context.brokers.values():
            if other is broker:
                continue
            if other.last_response_ms > middle or (other.probed_ms or -math.inf) > middle:
                return bool(leading)
        for node_id in leading:
            other_one = context.brokers.get(node_id)
            if other_one is None or not _is_awaited(other_one):
                manager.ask(node_id)
        return False

    def next_tick_ms(self, context: ProducerStatusContext) -> float:
        manager = self._manager
        if manager is None or not self._notices_silence:
            return math.inf
        now_ms = context.now
        if now_ms < self._look_at_ms:
            is_awaited = any(map(_is_awaited, context.brokers.values()))
            return self._look_at_ms - now_ms if is_awaited else math.inf
        delay = math.inf
        for broker in context.brokers.values():
            if _is_awaited(broker) and not manager.is_muted(broker.id):
                left = self._limit_ms(context, broker) - _age_ms(broker, now_ms)
                # A suspect gets its second look after the sockets have been read.
                delay = min(delay, max(left, 0.0) + CONFIRM_SILENCE_MS)
        return delay

    def _limit_ms(self, context: ProducerStatusContext, broker: Broker) -> float:
        if broker.sent:
            return self.latency.threshold_ms(broker)
        if broker.is_failing:
            return self._min_ms
        return setup_threshold_ms(context.brokers.values(), broker, self._min_ms, self._factor, self._max_ms)

    def _describe(self, broker: Broker, now_ms: float) -> str:
        age = _age_ms(broker, now_ms)
        if not broker.sent:
            if broker.is_failing:
                return f"it could not be reached for {age:.0f} ms"
            return f"no connection to it was ready within {age:.0f} ms"
        usual = broker.usual_ms
        known = "" if usual is None else f", where {usual:.0f} ms is usual"
        return f"no response to {len(broker.sent)} request(s) for {age:.0f} ms{known}"


def _is_awaited(broker: Broker) -> bool:
    """Whether it owes a response, or batches wait for a connection to it."""
    return bool(broker.sent) or broker.unreachable_since_ms is not None


def _age_ms(broker: Broker, now_ms: float) -> float:
    """For how long a broker has been silent; 0 if no response is due, or if it is still throttling."""
    since_ms = broker.oldest_request_ms
    if since_ms is None:
        since_ms = broker.unreachable_since_ms
    return 0.0 if since_ms is None else max(0.0, now_ms - max(since_ms, broker.forgiven_ms))


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
    """``min_ms`` and ``factor`` are slow.request.min.ms and slow.request.factor. ``max_ms`` bounds the
    threshold, so that a silence is noticed before the request times out."""

    def __init__(self, min_ms: float, factor: float, max_ms: float) -> None:
        self._min_ms = min_ms
        self._factor = factor
        self._max_ms = max_ms
        self._slowest_first_ms: float | None = None

    def observe(self, broker: Broker, latency_ms: float) -> None:
        """A response. A suspicious latency counts as the threshold: a freeze must not become usual."""
        sample = min(latency_ms, self.threshold_ms(broker))
        mean = broker.usual_ms
        if mean is None:
            broker.usual_ms = sample
            self._slowest_first_ms = max(sample, self._slowest_first_ms or 0.0)
        else:
            weight = _WEIGHT_ABOVE if sample > mean else _WEIGHT_BELOW
            broker.usual_ms = mean + weight * (sample - mean)
        broker.responses = min(broker.responses + 1, _FEW_RESPONSES)

    def threshold_ms(self, broker: Broker) -> float:
        mean, unknown = broker.usual_ms, self._unknown_ms()
        wanted = unknown if mean is None else self._factor * mean
        if broker.responses < _FEW_RESPONSES:
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
    brokers: Iterable[Broker], broker: Broker, min_ms: float, factor: float, max_ms: float
) -> float:
    """The time to connect from which on a broker is suspicious.

    A broker that was never connected to is judged by the slowest of all ``brokers``, as they use the same
    security protocol.
    """
    own = broker.setup_ms
    if own is None:
        own = max((one.setup_ms for one in brokers if one.setup_ms is not None), default=None)
    wanted = _UNKNOWN_FACTOR * min_ms if own is None else factor * own
    return max(_SETUP_MIN_FACTOR * min_ms, min(wanted, max_ms))
