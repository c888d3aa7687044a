"""Looks up or creates the topics in the options, with retries."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from kafka_sink.clock import CONNECT_BOUND_MS, TOPIC_PROPAGATION_MS, monotonic_ms
from kafka_sink.cluster.topic_state import MetadataSnapshot, snapshot_of
from kafka_sink.driver import driver_log
from kafka_sink.driver.planning_client import PlanningClient
from kafka_sink.errors import ConfigurationError, MetadataTimeoutError, MissingTopicError
from kafka_sink.kafka_errors import (
    CLUSTER_AUTHORIZATION_FAILED,
    LEADER_NOT_AVAILABLE,
    REQUEST_TIMED_OUT,
    TOPIC_ALREADY_EXISTS,
    TOPIC_AUTHORIZATION_FAILED,
    UNKNOWN_TOPIC_OR_PARTITION,
    error_of,
)
from kafka_sink.model import MetadataUpdate
from kafka_sink.network import admin_requests, apis, requests
from kafka_sink.network.admin_requests import BrokerConfigs, CreateTopicResponse
from kafka_sink.network.client import NetworkClient
from kafka_sink.network.requests import MetadataResponse, ProducerIdResponse
from kafka_sink.options import SinkOptions
from kafka_sink.security.settings import SecuritySettings

_RETRY_PAUSE_MS = 100
_AUTO_CREATE = "auto.create.topics.enable"


def prepare_topic(
    options: SinkOptions,
    *,
    connect_bound_ms: float = CONNECT_BOUND_MS,
    keep: Callable[[NetworkClient, MetadataUpdate], object] | None = None,
) -> MetadataSnapshot | None:
    """Connect to the cluster and look up the option ``topic``. Create the topic if ``topic.create`` is true.

    Returns metadata for the tasks, or None if the topic had no leaders yet. Blocks for at most max.block.ms,
    plus about 10 s for connections. ``keep`` is called with the connections, which are closed otherwise.

    Raises BrokersUnreachableError or AuthenticationError if no broker is usable, MetadataTimeoutError if none
    responds, and ConfigurationError if the topic is missing, not permitted or could not be created.
    """
    with ExitStack() as closes:
        client = PlanningClient(options, min(connect_bound_ms, options.max_block_ms))
        closes.callback(client.close)
        update = TopicPreparation(options, client, named_topics(options)).run()
        if keep is not None:
            keep(client.network, update)
            closes.pop_all()
    return None if options.topic is None else snapshot_of(update, options.topic)


def named_topics(options: SinkOptions) -> dict[str, str]:
    """The topics in the options, each with the name of its option."""
    named: dict[str | None, str] = {
        **dict.fromkeys(options.topic_create_names, "topic.create.names"),
        options.errors_deadletterqueue_topic_name: "errors.deadletterqueue.topic.name",
        options.topic: "topic",
    }
    return {topic: option for topic, option in named.items() if topic is not None}


class TopicPreparation:
    """One lookup of topics, or of the brokers alone. ``run`` retries requests until it has a result.

    ``topics`` maps each topic to the name of its option. All of them are requested together.
    """

    def __init__(self, options: SinkOptions, client: PlanningClient, topics: Mapping[str, str]) -> None:
        self._options = options
        # The topics whose lookup has no result yet.
        self._waiting = dict(topics)
        self._client = client
        self._brokers = options.redacted()["kafka.bootstrap.servers"]
        self._login = SecuritySettings.from_options(options).principal or "this login"
        self._started_ms = monotonic_ms()
        # The first topic that brokers did not know.
        self._missing: str | None = None
        self._controller = -1

    def run(self) -> MetadataUpdate:
        """Wait until the topics can be written to. Returns the first lookup's metadata."""
        first = self._metadata()
        self._client.use_advertised(first.update.nodes)
        response: MetadataResponse | None = first
        while True:
            last = {topic: self._settle(topic, response) for topic in self._waiting}
            self._waiting = {topic: self._waiting[topic] for topic, code in last.items() if code}
            if not self._waiting:
                break
            if self._missing not in self._waiting:
                self._missing = next(
                    (name for name in last if last[name] == UNKNOWN_TOPIC_OR_PARTITION), None
                )
            # After the pause there would be no time for another response.
            if self._missing is not None and self._left_ms(TOPIC_PROPAGATION_MS) <= _RETRY_PAUSE_MS:
                raise MissingTopicError(self._missing_text(self._missing))
            if self._left_ms() <= _RETRY_PAUSE_MS:
                raise MetadataTimeoutError(self._timeout_text(_named(last[next(iter(self._waiting))])))
            time.sleep(_RETRY_PAUSE_MS / 1000)
            response = self._request_metadata()
        self._check_idempotence()
        return first.update

    def _settle(self, topic: str, response: MetadataResponse | None) -> int:
        """Return 0 if the topic exists; otherwise the error code of a lookup that has to be repeated."""
        code = REQUEST_TIMED_OUT if response is None else response.update.errors.get(topic, 0)
        option = self._waiting[topic]
        if response is not None and topic in response.unwritable:
            raise ConfigurationError(
                f"Option '{option}': {self._login} may not write to '{topic}'. Grant it WRITE "
                f"(brokers: {self._brokers})"
            )
        if code in (0, LEADER_NOT_AVAILABLE):
            return 0  # tasks wait for its leaders
        if code == UNKNOWN_TOPIC_OR_PARTITION:
            if self._options.topic_create:
                self._create(topic)
                return 0
        elif not error_of(code).retriable:
            remedy = ""
            if code == TOPIC_AUTHORIZATION_FAILED:
                create = ", and CREATE if it does not exist" if self._options.topic_create else ""
                remedy = f". Grant {self._login} DESCRIBE and WRITE on this topic{create}"
            raise ConfigurationError(
                f"Option '{option}': '{topic}' cannot be used: {_named(code)}{remedy} (brokers: "
                f"{self._brokers})"
            )
        return code

    def _metadata(self) -> MetadataResponse:
        while (response := self._request_metadata()) is None:
            if self._left_ms() <= 0:
                raise MetadataTimeoutError(self._timeout_text("no broker responded"))
        return response

    def _request_metadata(self) -> MetadataResponse | None:
        """Request metadata. Brokers may create missing topics if kafka.allow.auto.create.topics is true."""
        topics = tuple(self._waiting)
        # With topic.create, brokers must not create the topic first with their own settings.
        create = self._options.allow_auto_create_topics and not self._options.topic_create
        response: MetadataResponse | None = self._client.ask(
            self._client.connect(),
            apis.METADATA,
            lambda version: requests.encode_metadata(version, topics, create, operations=version >= 8),
            self._request_timeout_ms(math.inf if self._missing is None else TOPIC_PROPAGATION_MS),
            len(topics),
        )
        if response is not None:
            self._controller = response.controller_id
        return response

    def _create(self, topic: str) -> None:
        """Create the topic. If another client has created it in the meantime, it is used unchanged."""
        while True:
            response = self._request_creation(self._creator(), topic)
            code = REQUEST_TIMED_OUT if response is None else response.error_code
            if code in (0, TOPIC_ALREADY_EXISTS):
                if not code:
                    driver_log.report(f"kafka-chunked: created topic '{topic}'")
                return
            if response is not None and not error_of(code).retriable:
                raise ConfigurationError(f"topic.create=true, but {self._not_created_text(topic, response)}")
            if self._left_ms() <= 0:
                raise MetadataTimeoutError(self._timeout_text(_named(code)))
            time.sleep(_RETRY_PAUSE_MS / 1000)
            self._request_metadata()

    def creation_problem(self, topic: str) -> str | None:
        """Why brokers would not create the topic (it is not created). None if they would, or if unknown."""
        self._started_ms = monotonic_ms()
        response = self._request_creation(self._creator(), topic, validate_only=True)
        if response is None or response.error_code in (0, TOPIC_ALREADY_EXISTS):
            return None
        return None if error_of(response.error_code).retriable else self._not_created_text(topic, response)

    def creates_topics_itself(self) -> bool | None:
        """Whether brokers create a topic when a client asks for its metadata. None if unknown."""
        # Each question has max.block.ms of its own: the look-up has used up its time.
        self._started_ms = monotonic_ms()
        node = self._client.connect()
        configs: BrokerConfigs | None = self._client.ask(
            node,
            apis.DESCRIBE_CONFIGS,
            lambda version: admin_requests.encode_describe_broker(version, node, [_AUTO_CREATE]),
            self._request_timeout_ms(),
        )
        setting = None if configs is None else configs.configs.get(_AUTO_CREATE)
        return None if setting is None else setting == "true"

    def _creator(self) -> int:
        return self._controller if self._client.reach(self._controller) else self._client.connect()

    def _request_creation(
        self, node: int, topic: str, *, validate_only: bool = False
    ) -> CreateTopicResponse | None:
        partitions, replicas = self._options.topic_partitions, self._options.topic_replication_factor
        version = self._client.api_version(node, apis.CREATE_TOPICS)
        if -1 in (partitions, replicas) and version < admin_requests.CREATE_TOPICS_BY_DEFAULTS:
            raise ConfigurationError(
                "topic.create=true: brokers before Kafka 2.4 do not apply defaults to a new topic. Set "
                f"topic.partitions and topic.replication.factor (brokers: {self._brokers})"
            )
        milliseconds = int(self._request_timeout_ms())
        return self._client.ask(
            node,
            apis.CREATE_TOPICS,
            lambda version: admin_requests.encode_create_topic(
                version,
                topic,
                partitions,
                replicas,
                milliseconds,
                self._options.topic_config,
                validate_only=validate_only,
            ),
            milliseconds,
        )

    def _check_idempotence(self) -> None:
        """Request a producer id, to check the login's rights.

        Brokers give none to a login that has neither IDEMPOTENT_WRITE nor WRITE on any topic.
        """
        if not self._options.enable_idempotence or self._options.exactly_once:
            # Tasks also connect to these addresses, so test them. Writing in transactions needs rights on the
            # transactional ids instead, and planning takes one over next.
            self._client.connect()
            return
        response: ProducerIdResponse | None = self._client.ask(
            self._client.connect(),
            apis.INIT_PRODUCER_ID,
            lambda version: requests.encode_init_producer_id(version, -1, -1),
            self._request_timeout_ms(TOPIC_PROPAGATION_MS),
        )
        # Other errors may be temporary, and tasks retry.
        if response is not None and response.error_code == CLUSTER_AUTHORIZATION_FAILED:
            raise ConfigurationError(
                f"{self._login} may not write idempotently ({_named(response.error_code)}). Grant it "
                "IDEMPOTENT_WRITE on the cluster or WRITE on the topic, or set "
                f"kafka.enable.idempotence=false (brokers: {self._brokers})"
            )

    def _left_ms(self, bound_ms: float = math.inf) -> float:
        passed_ms = monotonic_ms() - self._started_ms
        return min(bound_ms, self._options.max_block_ms) - passed_ms

    def _request_timeout_ms(self, bound_ms: float = math.inf) -> float:
        return min(max(self._left_ms(bound_ms), 1.0), self._options.request_timeout_ms)

    def _not_created_text(self, topic: str, response: CreateTopicResponse) -> str:
        remedy = (
            f"Grant {self._login} CREATE on the topic or the cluster, or create the topic beforehand"
            if response.error_code in (TOPIC_AUTHORIZATION_FAILED, CLUSTER_AUTHORIZATION_FAILED)
            else "Change topic.partitions, topic.replication.factor or topic.config.*, or create the topic "
            "beforehand"
        )
        detail = f" ({response.error_message})" if response.error_message else ""
        return (
            f"topic '{topic}' could not be created: {_named(response.error_code)}{detail}. {remedy} "
            f"(brokers: {self._brokers})"
        )

    def _missing_text(self, topic: str) -> str:
        option = self._waiting[topic]
        because = (
            "brokers did not create it by themselves (auto.create.topics.enable)"
            if self._options.allow_auto_create_topics
            else "kafka.allow.auto.create.topics=false"
        )
        return (
            f"Option '{option}': there is no topic '{topic}' at {self._brokers}, and {because}. "
            f"Create it, set topic.create=true, or correct '{option}' or "
            "'kafka.bootstrap.servers'"
        )

    def _timeout_text(self, last: str) -> str:
        what = f"Topic '{next(iter(self._waiting))}'" if self._waiting else "The cluster"
        return (
            f"{what} could not be looked up at {self._brokers} within kafka.max.block.ms = "
            f"{self._options.max_block_ms} ms: {self._client.reasons() or last}"
        )


def _named(code: int) -> str:
    """Kafka's error name in words: 'topic authorization failed' for TOPIC_AUTHORIZATION_FAILED."""
    return error_of(code).name.replace("_", " ").lower()
