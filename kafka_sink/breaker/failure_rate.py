"""The default breaker class: mutes partitions by failure rate (KIP-693), and silent brokers. Does no I/O."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kafka_sink.breaker.interface import PartitionCircuitBreaker, ProducerStatusContext
from kafka_sink.breaker.manager import CircuitBreakManager
from kafka_sink.breaker.mutes import Evidence
from kafka_sink.clock import CONFIRM_SILENCE_MS
from kafka_sink.cluster.broker import FEW_RESPONSES, Broker
from kafka_sink.model import TopicPartition
from kafka_sink.options.parse import failure_rate_settings
from kafka_sink.outcomes import MIN_FAILURES, Health, has_response, health_of, reaches

_MAX_IN_FLIGHT = "max.in.flight.requests.per.connection"
_REQUEST_TIMEOUT = "request.timeout.ms"
# The limit for a broker's first response before any other's, as a multiple of slow.request.min.ms.
_UNKNOWN_FACTOR = 6
# If other brokers' first responses were quick, the limit is still at least this multiple.
_UNKNOWN_MIN_FACTOR = 2
# The lowest limit for setting up a connection, as a multiple of slow.request.min.ms. TLS and SASL take round
# trips and cryptography: 0.9 s was seen with requests that take milliseconds, and more when all tasks of a
# stage connect to a broker at the same time.
_SETUP_MIN_FACTOR = 4


@dataclass(frozen=True, slots=True)
class SilenceLimits:
    """When a time to respond or to connect becomes suspicious.

    ``min_ms`` and ``factor`` are slow.request.min.ms (0 means never) and slow.request.factor. ``max_ms`` is
    the upper bound of all limits, so that a silence is noticed before the request times out.
    """

    min_ms: float
    factor: float
    max_ms: float

    def of_response(self, broker: Broker, brokers: Iterable[Broker], expected_ms: float | None) -> float:
        """The limit for a response that is expected to take ``expected_ms``; None if that is unknown.

        A broker's first responses, which may be slow, are also compared with those of all ``brokers``.
        """
        wanted = math.inf if expected_ms is None else self.factor * expected_ms
        if broker.responses < FEW_RESPONSES:
            wanted = min(wanted, self._unknown_ms(brokers))
        return max(self.min_ms, min(wanted, self.max_ms))

    def _unknown_ms(self, brokers: Iterable[Broker]) -> float:
        limit = _UNKNOWN_FACTOR * self.min_ms
        slowest_ms = max((broker.first_ms for broker in brokers if broker.first_ms is not None), default=None)
        if slowest_ms is None:
            return limit
        return min(max(self.factor * slowest_ms, _UNKNOWN_MIN_FACTOR * self.min_ms), limit)

    def of_connection(self, broker: Broker, brokers: Iterable[Broker]) -> float:
        """The limit for setting up a connection.

        A broker that was never connected to is compared with the slowest of all ``brokers``, because they use
        the same security protocol. After a refused or lost connection, the limit is ``min_ms``.
        """
        if broker.is_failing:
            return self.min_ms
        own = broker.setup_ms
        if own is None:
            own = max((other.setup_ms for other in brokers if other.setup_ms is not None), default=None)
        elif broker.expected_ms is not None:
            # The network may be slower by now. A connection without TLS and SASL takes two round trips.
            own = max(own, 2 * broker.expected_ms)
        wanted = _UNKNOWN_FACTOR * self.min_ms if own is None else self.factor * own
        return max(_SETUP_MIN_FACTOR * self.min_ms, min(wanted, self.max_ms))


NO_LIMITS = SilenceLimits(0.0, 1.0, 0.0)


class FailureRateCircuitBreaker(PartitionCircuitBreaker):
    """Mutes partitions that fail and brokers that are silent.

    A partition fails if trigger.failure.perc of its batches, and at least three, failed within ten seconds or
    without a success in between. Nothing is judged before trigger.message.count rows were sent in all.

    A broker is silent if its oldest request has waited far longer than usual while other brokers respond, or
    if batches wait for it and it cannot be reached. Probes end the mutes, and so do late responses.
    """

    def __init__(self) -> None:
        self._manager: CircuitBreakManager | None = None
        self._settings = failure_rate_settings({})
        self.limits: SilenceLimits = NO_LIMITS
        # Before this time no silence can be long enough, whatever is sent or received in the meantime.
        self._next_check_ms = 0.0

    def configure(self, configs: Mapping[str, str]) -> None:
        """Accept the options of docs/options.md. Raises ConfigurationError."""
        own = {name: text for name, text in configs.items() if name not in (_MAX_IN_FLIGHT, _REQUEST_TIMEOUT)}
        self._settings = settings = failure_rate_settings(own, int(configs.get(_MAX_IN_FLIGHT, "5")))
        max_ms = float(configs.get(_REQUEST_TIMEOUT, "30000")) / 2
        self.limits = SilenceLimits(settings.slow_request_min_ms, settings.slow_request_factor, max_ms)

    @property
    def needs_every_call(self) -> bool:
        """Whether the class must also be called for batches that succeed."""
        return self._settings.mute_in_flight_full

    def set_circuit_break_manager(self, circuit_break_manager: CircuitBreakManager) -> None:
        self._manager = circuit_break_manager

    def on_send(self, context: ProducerStatusContext) -> bool:
        if not self._settings.mute_in_flight_full or self._manager is None:
            return False
        self._manager.mute_congested(context.node_id)
        return True

    def on_complete(
        self, context: ProducerStatusContext, topic_partition: TopicPartition, exception: Exception | None
    ) -> bool:
        manager = self._manager
        if manager is None:
            return False
        broker = context.brokers[context.node_id]
        if self._settings.mute_in_flight_full and not broker.sent:
            manager.unmute_congested(broker.id)
        changed = False
        now_ms = context.now
        if has_response(exception):
            changed = broker.is_silent and self._end_silence(manager, broker, now_ms)
        # Each partition counts its outcomes itself.
        partition = manager.partition(topic_partition)
        if partition is None or health_of(exception) is not Health.UNHEALTHY:
            return changed
        failures, total = partition.outcomes.count(now_ms)
        if (
            failures >= MIN_FAILURES
            and reaches(failures, total, self._settings.trigger_failure_perc)
            and manager.rows >= self._settings.trigger_message_count
            and not manager.is_muted(topic_partition)
        ):
            reason = f"{failures} of the last {total} batches failed; last error: {exception}"
            # With a class derived from this one, the coordinator does not count.
            evidence = Evidence(counted=type(self) is FailureRateCircuitBreaker)
            manager.mute(topic_partition, reason, evidence)
            return True
        return changed

    def _end_silence(self, manager: CircuitBreakManager, broker: Broker, now_ms: float) -> bool:
        if _age_ms(broker, now_ms) > self._response_limit_ms(broker, manager.brokers):
            return False
        broker.is_silent = False
        manager.unmute(broker.id, "it responds again")
        return True

    def on_tick(self, context: ProducerStatusContext) -> bool:
        manager = self._manager
        if manager is None or not self.limits.min_ms or context.now < self._next_check_ms:
            return False
        now_ms = context.now
        oldest_ms = 0.0
        changed = undecided = False
        for broker in context.brokers.values():
            if _is_awaited(broker):
                changed |= self._judge(manager, context, broker)
                oldest_ms = max(oldest_ms, _age_ms(broker, now_ms))
            else:
                broker.suspect_since_ms = None
            # A failed request does not mean that the broker has recovered: a probe then has to end the mute.
            broker.is_silent &= bool(broker.sent)
            undecided |= broker.is_silent or broker.suspect_since_ms is not None
        self._next_check_ms = now_ms + (0.0 if undecided else self.limits.min_ms - oldest_ms)
        return changed

    def _judge(self, manager: CircuitBreakManager, context: ProducerStatusContext, broker: Broker) -> bool:
        """Mute a broker if its silence is certain. Returns whether it was muted by this call."""
        now_ms, is_muted = context.now, manager.is_muted(broker.id)
        if broker.is_silent and not is_muted:
            # Requests sent before now are already late, so their silence is not new evidence.
            broker.is_silent = False
            broker.silence_from_ms = now_ms
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
        """Whether a mute would help: another broker leads partitions, and has responded quickly lately.

        Otherwise all brokers are slow, or this client is. Brokers that owe no response are sent a request, so
        that a task without other rows notices a silence as quickly as a busy task.
        """
        leading = manager.available_nodes() - {broker.id}
        # Responses in the first half of the silence may already have been in transit when everything stopped.
        half_ms = _age_ms(broker, context.now) / 2
        middle = context.now - half_ms
        for other in context.brokers.values():
            if other is broker:
                continue
            has_responded = other.last_response_ms > middle and (other.latest_ms or 0.0) <= half_ms
            if has_responded or (other.probed_ms or -math.inf) > middle:
                return bool(leading)
        for node_id in leading:
            candidate = context.brokers.get(node_id)
            if candidate is None or not _is_awaited(candidate):
                manager.ask(node_id)
        return False

    def next_tick_ms(self, context: ProducerStatusContext) -> float:
        manager = self._manager
        if manager is None or not self.limits.min_ms:
            return math.inf
        now_ms = context.now
        if now_ms < self._next_check_ms:
            is_awaited = any(map(_is_awaited, context.brokers.values()))
            return self._next_check_ms - now_ms if is_awaited else math.inf
        delay = math.inf
        for broker in context.brokers.values():
            if not _is_awaited(broker) or manager.is_muted(broker.id):
                continue
            if broker.suspect_since_ms is None:
                # One millisecond more, because only a silence longer than the limit counts.
                left = self._limit_ms(context, broker) - _age_ms(broker, now_ms) + 1.0
            else:
                # A suspicious broker is judged again after the sockets have been read.
                left = CONFIRM_SILENCE_MS
            delay = min(delay, max(left, 0.0))
        return delay

    def _limit_ms(self, context: ProducerStatusContext, broker: Broker) -> float:
        if broker.sent:
            return self._response_limit_ms(broker, context.brokers)
        return self.limits.of_connection(broker, context.brokers.values())

    def _response_limit_ms(self, broker: Broker, brokers: Mapping[int, Broker]) -> float:
        return self.limits.of_response(broker, brokers.values(), broker.expected_ms)

    def _describe(self, broker: Broker, now_ms: float) -> str:
        age = _age_ms(broker, now_ms)
        if not broker.sent:
            if broker.is_failing:
                return f"it could not be reached for {age:.0f} ms"
            return f"no connection to it was ready within {age:.0f} ms"
        usual = broker.usual_ms
        known = "" if usual is None else f" (usually {usual:.0f} ms)"
        return f"no response to {len(broker.sent)} request(s) for {age:.0f} ms{known}"


def _is_awaited(broker: Broker) -> bool:
    """Whether the broker owes a response, or batches wait for a connection to it."""
    return bool(broker.sent) or broker.unreachable_since_ms is not None


def _age_ms(broker: Broker, now_ms: float) -> float:
    """How long a broker has been silent; 0 if it owes no response or is still throttling."""
    since_ms = broker.oldest_request_ms
    if since_ms is None:
        since_ms = broker.unreachable_since_ms
    return 0.0 if since_ms is None else max(0.0, now_ms - max(since_ms, broker.silence_from_ms))
