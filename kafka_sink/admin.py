"""The topic that the options name is there, or is created, before a task starts: on the driver, at planning.

With confluent-kafka, as it speaks to whatever broker a job may meet. It is loaded only when it is needed:
it has megabytes, and this module is imported for every micro-batch.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any

from kafka_sink import application_marks, driver_log
from kafka_sink.errors import ConfigurationError, MetadataTimeoutError
from kafka_sink.options import SinkOptions

if TYPE_CHECKING:
    from confluent_kafka import KafkaError

# A stream looks again once this long has passed, so that a restart in the same application finds out what
# became of its topic, and no micro-batch pays for it.
STREAM_LOOKS_AGAIN_S = 60.0
# A topic that was just created, here or by somebody else, may take this long to be known to all brokers.
_PROPAGATION_MS = 5000.0
_AGAIN_S = 0.1
_SILENT = "no broker answered"
_NO_KAFKA = "what answers there is no Kafka broker, or one that expects TLS"
# librdkafka takes no request timeout below and none above.
_LEAST_TIMEOUT_MS, _MOST_TIMEOUT_MS = 1.0, 3_600_000.0
_LEAST_SETUP_MS, _MOST_SETUP_MS = 1000, 2**31 - 1


def prepare_topic(options: SinkOptions, *, is_streaming: bool = False) -> None:
    """Look the option ``topic`` up, and create it where it is missing and ``topic.create`` says so.

    Blocks for no longer than max.block.ms. Raises ConfigurationError where the topic stays missing, may not
    be used or could not be created, and MetadataTimeoutError where no broker answers. Does nothing where the
    options name no topic; for a stream, where this was done within the last minute.
    """
    if options.topic is None:
        return
    done = f"topic {options.topic} is on {_brokers(options)}"
    if is_streaming and application_marks.happened_within(done, STREAM_LOOKS_AGAIN_S):
        return
    TopicPreparation(options, options.topic).run()
    application_marks.remember(done)


class TopicPreparation:
    """One look-up of one topic, repeated until it is known what became of it. Used by one thread."""

    def __init__(self, options: SinkOptions, topic: str) -> None:
        from confluent_kafka.admin import AdminClient

        self._options = options
        self._topic = topic
        self._started = time.monotonic()
        self._reasons: dict[str, str] = {}
        self._is_missing = False
        settings: dict[str, Any] = {**client_settings(options), "error_cb": self._note}
        self._admin = AdminClient(settings)

    def run(self) -> None:
        """Returns when the topic is there; raises as ``prepare_topic``."""
        from confluent_kafka import KafkaError

        while (error := self._look_up()) is not None:
            code = error.code()
            if code == KafkaError.LEADER_NOT_AVAILABLE:
                return  # it exists, and waiting for leaders is the tasks' business
            if code == KafkaError.UNKNOWN_TOPIC_OR_PART:
                if self._options.topic_create:
                    self._create()
                    return
                self._is_missing = True
            elif not _may_pass(error):
                raise ConfigurationError(
                    f"Option 'topic': '{self._topic}' cannot be used: {error.str()} (brokers: "
                    f"{_brokers(self._options)})"
                )
            if self._is_missing and self._left_ms(_PROPAGATION_MS) <= 0:
                raise ConfigurationError(self._missing())
            if self._left_ms() <= 0:
                raise MetadataTimeoutError(self._no_answer(error))
            time.sleep(_AGAIN_S)

    def _look_up(self) -> KafkaError | None:
        """What is wrong with the topic, if anything. Lets brokers create it where the options do."""
        from confluent_kafka import KafkaException, TopicCollection

        seconds = _seconds(self._left_ms(_PROPAGATION_MS if self._is_missing else math.inf))
        try:
            if self._options.allow_auto_create_topics:
                found = self._admin.list_topics(self._topic, timeout=seconds).topics[self._topic]
                return found.error
            asked = self._admin.describe_topics(TopicCollection([self._topic]), request_timeout=seconds)
            asked[self._topic].result()
        except KafkaException as failure:
            return _error_of(failure)
        return None

    def _create(self) -> None:
        """Where somebody else was quicker, theirs is taken."""
        from confluent_kafka import KafkaError, KafkaException
        from confluent_kafka.cimpl import NewTopic

        wanted = NewTopic(self._topic, self._options.topic_partitions, self._options.topic_replication_factor)
        while True:
            seconds = _seconds(self._left_ms())
            try:
                asked = self._admin.create_topics(
                    [wanted], operation_timeout=seconds, request_timeout=seconds
                )
                asked[self._topic].result()
            except KafkaException as failure:
                error = _error_of(failure)
            else:
                driver_log.report(f"kafka-chunked: topic '{self._topic}' is created")
                return
            if error.code() == KafkaError.TOPIC_ALREADY_EXISTS:
                return
            if not _may_pass(error):
                raise ConfigurationError(
                    f"topic.create=true, but topic '{self._topic}' could not be created: {error.str()}. "
                    "Change topic.partitions or topic.replication.factor, or create it beforehand "
                    f"(brokers: {_brokers(self._options)})"
                ) from None
            if self._left_ms() <= 0:
                raise MetadataTimeoutError(self._no_answer(error)) from None
            time.sleep(_AGAIN_S)

    def _left_ms(self, bound_ms: float = math.inf) -> float:
        passed_ms = (time.monotonic() - self._started) * 1000
        return min(bound_ms, self._options.max_block_ms) - passed_ms

    def _missing(self) -> str:
        because = (
            "brokers did not create it by themselves (auto.create.topics.enable)"
            if self._options.allow_auto_create_topics
            else "kafka.allow.auto.create.topics=false"
        )
        return (
            f"Option 'topic': there is no topic '{self._topic}' at {_brokers(self._options)}, and {because}. "
            "Create it, set topic.create=true, or correct 'topic' or 'kafka.bootstrap.servers'"
        )

    def _no_answer(self, error: KafkaError) -> str:
        from confluent_kafka import KafkaError

        self._admin.poll(0)
        silent = error.code() in (KafkaError._TRANSPORT, KafkaError._TIMED_OUT)
        reasons = "; ".join(self._reasons.values()) or (_SILENT if silent else error.str())
        return (
            f"Topic '{self._topic}' could not be looked up at {_brokers(self._options)} within "
            f"kafka.max.block.ms = {self._options.max_block_ms} ms: {reasons}"
        )

    def _note(self, error: KafkaError) -> None:
        """Called by librdkafka: what is wrong with one broker, the last of which counts."""
        from confluent_kafka import KafkaError

        if error.code() != KafkaError._ALL_BROKERS_DOWN:
            text = error.str().partition(" (after ")[0].replace("/bootstrap", "")
            # That error's own advice is a setting of librdkafka's, and would help nobody.
            broker, _, what = text.partition(": ")
            self._reasons[broker] = f"{broker}: {_NO_KAFKA}" if "Invalid response size" in what else text


def client_settings(options: SinkOptions) -> dict[str, Any]:
    """The options that say how to reach brokers, under librdkafka's names."""
    setup_ms = options.socket_connection_setup_timeout_ms
    return {
        "bootstrap.servers": _brokers(options),
        "client.id": options.client_id or "kafka-chunked",
        "client.dns.lookup": options.client_dns_lookup,
        "socket.connection.setup.timeout.ms": min(max(setup_ms, _LEAST_SETUP_MS), _MOST_SETUP_MS),
        # What it logs by itself has a form of its own; what matters is in the errors.
        "log_level": 0,
    }


def _brokers(options: SinkOptions) -> str:
    return options.redacted()["kafka.bootstrap.servers"]


def _error_of(failure: Exception) -> KafkaError:
    error: KafkaError = failure.args[0]
    return error


def _may_pass(error: KafkaError) -> bool:
    from confluent_kafka import KafkaError

    return error.retriable() or error.code() in (
        KafkaError._TIMED_OUT,
        KafkaError._TRANSPORT,
        KafkaError._ALL_BROKERS_DOWN,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.NOT_CONTROLLER,
    )


def _seconds(left_ms: float) -> float:
    return min(max(left_ms, _LEAST_TIMEOUT_MS), _MOST_TIMEOUT_MS) / 1000
