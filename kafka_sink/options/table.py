"""The table of all options of the sink: name, type, bounds and default.

The fields of SinkOptions are this table. The parser, the documentation and the hiding of secrets all read it.
docs/options.md explains each option; ``make docs`` writes these facts there and keeps the texts.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ParamSpec

from kafka_sink.model import CompressionType
from kafka_sink.options import values
from kafka_sink.options.values import (
    BREAKER_PREFIX,
    INT_MAX,
    KAFKA_PREFIX,
    LONG_MAX,
    TOPIC_CONFIG_PREFIX,
    HostPort,
    Kind,
)
from kafka_sink.secret import HIDDEN, HiddenValues, Secret

TARGET = "The job"
DELIVERY = "Delivery"
RATE = "Rate limit"
ERRORS = "Rows that can never be written"
TRANSACTIONS = "Exactly once"
BATCHING = "Batches and memory"
COMPRESSION = "Compression"
METADATA = "Metadata"
PARTITIONER = "Partitioner"
NETWORK = "Connections"
SECURITY = "Security"
FORMATS = "Formats and schema registry"
COORDINATOR = "Coordinator"
LIVE_VIEW = "Live view and reports"


_SAME = object()


@dataclass(frozen=True)
class OptionSpec:
    """One row of the table.

    ``attribute`` is the field of SinkOptions, and ``name`` is the name that users write. An option without a
    default is required. ``needs`` is another option, or one with its value, as users write them, without
    which this option has no effect. ``planning_only`` is True if no task reads the option.
    """

    kind: Kind
    default: Any
    group: str
    _: dataclasses.KW_ONLY
    name: str = ""
    kafka_default: Any = _SAME
    aliases: tuple[str, ...] = ()
    needs: str = ""
    planning_only: bool = False
    attribute: str = ""

    @property
    def secret(self) -> bool:
        return self.kind.label == "password"

    @property
    def required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def differs(self) -> bool:
        """Whether the default differs from Kafka's."""
        return self.kafka_default is not _SAME


_ISSUER = "schema.registry.bearer.auth.issuer.endpoint.url"
_CERTIFICATE = "schema.registry.ssl.certificate.location"
_OAUTH = "org.apache.kafka.common.security.oauthbearer"
_Row = ParamSpec("_Row")


def _fields_of(make: Callable[_Row, OptionSpec], prefix: str) -> Callable[_Row, Any]:
    """Return a function with the same parameters that makes a field of SinkOptions with the row as metadata.
    The option's name is the prefix and the field's name, with dots instead of underscores."""

    def make_field(*args: _Row.args, **kwargs: _Row.kwargs) -> Any:
        spec = make(*args, **kwargs)
        return field(default=spec.default, metadata={"spec": spec, "prefix": prefix})

    return make_field


def _with_name(option: dataclasses.Field[Any]) -> OptionSpec:
    spec: OptionSpec = option.metadata["spec"]
    name = spec.name or option.metadata["prefix"] + option.name.replace("_", ".")
    return dataclasses.replace(spec, name=name, attribute=option.name)


# The options of Kafka's producer, and those of this sink.
_kafka = _fields_of(OptionSpec, KAFKA_PREFIX)
_own = _fields_of(OptionSpec, "")
DEFAULT_BREAKER = "kafka_sink.breaker.FailureRateCircuitBreaker"
BREAKER = "Circuit breaker"
# The options of every breaker class. Names are without their prefix.
_BREAKER_OPTIONS_OF_ALL = (
    OptionSpec(values.STRING, DEFAULT_BREAKER, BREAKER, name="class"),
    OptionSpec(
        values.integer(100, LONG_MAX, why="a probe needs a round trip"),
        2_000,
        BREAKER,
        name="mute.retry.interval",
    ),
    OptionSpec(values.integer(1, 100), 50, BREAKER, name="muted.buffer.memory.perc"),
)


@dataclass(frozen=True)
class FailureRateSettings:
    """The options of the default class. Another class may use these names otherwise. If
    ``slow_request_min_ms`` is 0, slow brokers are not muted."""

    trigger_message_count: int = _own(values.integer(1, LONG_MAX), 1_000, BREAKER)
    trigger_failure_perc: int = _own(values.integer(1, 100), 50, BREAKER)
    slow_request_min_ms: int = _own(values.integer(0, LONG_MAX), 500, BREAKER)
    slow_request_factor: int = _own(values.integer(1), 5, BREAKER)
    mute_in_flight_full: bool = _own(values.BOOLEAN, False, BREAKER, name="enable.mute.inflight.full")


FAILURE_RATE_OPTIONS = tuple(map(_with_name, dataclasses.fields(FailureRateSettings)))
BREAKER_OPTIONS = (*_BREAKER_OPTIONS_OF_ALL, *FAILURE_RATE_OPTIONS)
BREAKER_BY_NAME = {option.name: option for option in BREAKER_OPTIONS}


@dataclass(frozen=True)
class BreakerSettings:
    """The settings that every breaker class has. ``class_path`` is None if the breaker is off.

    ``given`` contains all options under the prefix as the user wrote them, by their names without the prefix.
    ``repr`` hides them, because a user's class may have credentials as options.
    """

    class_path: str | None = DEFAULT_BREAKER
    mute_retry_interval_ms: float = BREAKER_BY_NAME["mute.retry.interval"].default
    muted_buffer_perc: int = BREAKER_BY_NAME["muted.buffer.memory.perc"].default
    given: tuple[tuple[str, str], ...] = field(default=(), repr=False)


_CODECS = values.choice({member.name.lower(): member for member in CompressionType})


def breaker_option_name(name: str) -> str:
    return f"{KAFKA_PREFIX}{BREAKER_PREFIX}{name}"


@dataclass(frozen=True, kw_only=True, repr=False)
class SinkOptions:
    """All settings of one job, already checked. Hashable and picklable. Times are milliseconds, sizes are
    bytes.

    The attributes have the options' names with underscores instead of dots. :func:`kafka_sink.options.parse`
    checks the options and creates instances; the constructor checks nothing. ``repr`` hides secrets.
    """

    # A row of the table takes few lines, so that it is read from left to right.
    # fmt: off
    topic: str | None = _own(values.TOPIC, None, TARGET, planning_only=True)
    topic_create: bool = _own(values.BOOLEAN, False, TARGET, planning_only=True)
    topic_partitions: int = _own(
        values.integer(1, 100_000, or_value=-1), -1, TARGET, needs="topic.create=true", planning_only=True,
    )
    topic_create_names: tuple[str, ...] = _own(
        values.TOPICS, (), TARGET, needs="topic.create=true", planning_only=True,
    )
    topic_replication_factor: int = _own(
        values.integer(1, 10_000, or_value=-1), -1, TARGET, needs="topic.create=true", planning_only=True,
    )
    bootstrap_servers: tuple[HostPort, ...] = _kafka(values.ADDRESSES, dataclasses.MISSING, TARGET)
    log_summary: bool = _own(values.BOOLEAN, True, TARGET, planning_only=True)
    client_id: str = _kafka(values.STRING, "", TARGET)
    client_rack: str = _kafka(values.STRING, "", TARGET)

    acks: int = _kafka(values.choice({"all": -1, "-1": -1, "1": 1, "0": 0}), -1, DELIVERY)
    enable_idempotence: bool = _kafka(values.BOOLEAN, True, DELIVERY)
    max_in_flight_requests_per_connection: int = _kafka(values.integer(1), 5, DELIVERY)
    retries: int = _kafka(values.integer(0), INT_MAX, DELIVERY)
    delivery_timeout_ms: int = _kafka(values.integer(0), 120_000, DELIVERY)
    request_timeout_ms: int = _kafka(values.integer(0), 30_000, DELIVERY)
    retry_backoff_ms: int = _kafka(values.integer(0, LONG_MAX), 100, DELIVERY)
    retry_backoff_max_ms: int = _kafka(values.integer(0, LONG_MAX), 1_000, DELIVERY)
    max_block_ms: int = _kafka(values.integer(0, LONG_MAX), 60_000, DELIVERY)

    max_rows_per_second: int = _own(values.integer(0, LONG_MAX), 0, RATE)
    max_bytes_per_second: int = _own(values.integer(0, LONG_MAX), 0, RATE)

    errors_tolerance: str = _own(values.words("none", "all"), "none", ERRORS)
    errors_deadletterqueue_topic_name: str | None = _own(
        values.TOPIC, None, ERRORS, needs="errors.tolerance=all",
    )
    errors_max: int = _own(
        values.integer(0, LONG_MAX, or_value=-1), 10_000, ERRORS, needs="errors.tolerance=all",
    )

    delivery_guarantee: str = _own(
        values.words("at-least-once", "exactly-once"), "at-least-once", TRANSACTIONS,
    )
    transactional_id_prefix: str = _own(
        values.STRING, "", TRANSACTIONS, needs="delivery.guarantee=exactly-once", planning_only=True,
    )
    transaction_progress_topic: str | None = _own(
        values.TOPIC, None, TRANSACTIONS, needs="delivery.guarantee=exactly-once", planning_only=True,
    )
    transaction_timeout_ms: int = _kafka(values.integer(1), 900_000, TRANSACTIONS, kafka_default=60_000)
    txn_app_id: str = _own(
        values.STRING, "", TRANSACTIONS, name="txnAppId", needs="delivery.guarantee=exactly-once",
        planning_only=True,
    )
    txn_version: int = _own(
        values.integer(0, LONG_MAX, or_value=-1), -1, TRANSACTIONS, name="txnVersion",
        needs="delivery.guarantee=exactly-once", planning_only=True,
    )
    transaction_rerun_compare: str = _own(
        values.words("content", "rows", "none"), "content", TRANSACTIONS,
        needs="delivery.guarantee=exactly-once", planning_only=True,
    )

    batch_size: int = _kafka(values.integer(0), 524_288, BATCHING, kafka_default=16_384)
    linger_ms: int = _kafka(values.integer(0, LONG_MAX), 20, BATCHING, kafka_default=5)
    buffer_memory: int = _kafka(values.integer(128, LONG_MAX), 67_108_864, BATCHING, kafka_default=33_554_432)
    buffer_memory_allocation_strategy: str = _kafka(
        values.words("incremental", "full", any_case=True), "incremental", BATCHING, kafka_default="full",
    )
    max_request_size: int = _kafka(values.integer(0), 1_048_576, BATCHING)

    compression_type: CompressionType = _kafka(_CODECS, CompressionType.NONE, COMPRESSION)
    compression_gzip_level: int = _kafka(values.integer(1, 9, or_value=-1), -1, COMPRESSION)
    compression_lz4_level: int = _kafka(values.integer(1, 17), 9, COMPRESSION)
    compression_zstd_level: int = _kafka(values.integer(-131_072, 22), 3, COMPRESSION)

    partitioner_ignore_keys: bool = _kafka(values.BOOLEAN, False, PARTITIONER)
    partitioner_adaptive_partitioning_enable: bool = _kafka(values.BOOLEAN, True, PARTITIONER)
    partitioner_rack_aware: bool = _kafka(values.BOOLEAN, False, PARTITIONER)
    partitioner_availability_timeout_ms: int = _kafka(values.integer(0, LONG_MAX), 0, PARTITIONER)
    partitioner_spread_keys_when_muted: bool = _kafka(values.BOOLEAN, False, PARTITIONER)

    metadata_max_age_ms: int = _kafka(values.integer(0, LONG_MAX), 300_000, METADATA)
    metadata_max_idle_ms: int = _kafka(
        values.integer(5_000, LONG_MAX), 300_000, METADATA, aliases=("kafka.metadata.evict.ms",),
    )
    metadata_recovery_strategy: str = _kafka(
        values.words("rebootstrap", "none", any_case=True), "rebootstrap", METADATA,
    )
    metadata_recovery_rebootstrap_trigger_ms: int = _kafka(values.integer(0, LONG_MAX), 300_000, METADATA)
    allow_auto_create_topics: bool = _kafka(values.BOOLEAN, True, METADATA)

    connections_max_idle_ms: int = _kafka(values.integer(-1, LONG_MAX), 540_000, NETWORK)
    reconnect_backoff_ms: int = _kafka(values.integer(0, LONG_MAX), 50, NETWORK)
    reconnect_backoff_max_ms: int = _kafka(values.integer(0, LONG_MAX), 1_000, NETWORK)
    socket_connection_setup_timeout_ms: int = _kafka(values.integer(0, LONG_MAX), 10_000, NETWORK)
    socket_connection_setup_timeout_max_ms: int = _kafka(values.integer(0, LONG_MAX), 30_000, NETWORK)
    enable_metrics_push: bool = _kafka(values.BOOLEAN, True, NETWORK)

    security_protocol: str = _kafka(values.words(*values.PROTOCOLS, any_case=True), "PLAINTEXT", SECURITY)
    ssl_truststore_type: str = _kafka(values.words("JKS", "PKCS12", "PEM", any_case=True), "JKS", SECURITY)
    ssl_truststore_location: str = _kafka(values.TEXT, "", SECURITY)
    ssl_truststore_password: Secret | None = _kafka(values.SECRET, None, SECURITY)
    ssl_truststore_certificates: Secret | None = _kafka(
        values.SECRET_LINES, None, SECURITY, aliases=("kafka.ssl.ca.pem",),
    )
    ssl_ca_location: str = _kafka(values.TEXT, "", SECURITY)
    ssl_keystore_type: str = _kafka(values.words("JKS", "PKCS12", "PEM", any_case=True), "JKS", SECURITY)
    ssl_keystore_location: str = _kafka(values.TEXT, "", SECURITY)
    ssl_keystore_password: Secret | None = _kafka(values.SECRET, None, SECURITY)
    ssl_keystore_key: Secret | None = _kafka(
        values.SECRET_LINES, None, SECURITY, aliases=("kafka.ssl.key.pem",),
    )
    ssl_keystore_certificate_chain: Secret | None = _kafka(
        values.SECRET_LINES, None, SECURITY, aliases=("kafka.ssl.certificate.pem",),
    )
    ssl_key_password: Secret | None = _kafka(values.SECRET, None, SECURITY)
    ssl_key_location: str = _kafka(values.TEXT, "", SECURITY)
    ssl_certificate_location: str = _kafka(values.TEXT, "", SECURITY)
    ssl_endpoint_identification_algorithm: str = _kafka(
        values.words("https", "none", "", any_case=True), "https", SECURITY,
    )
    ssl_enabled_protocols: tuple[str, ...] = _kafka(values.NAMES, ("TLSv1.2", "TLSv1.3"), SECURITY)
    ssl_cipher_suites: tuple[str, ...] = _kafka(values.NAMES, (), SECURITY)
    sasl_mechanism: str = _kafka(
        values.words("GSSAPI", "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER", "AWS_MSK_IAM",
        any_case=True), "GSSAPI", SECURITY, aliases=("kafka.sasl.mechanisms",),
    )
    sasl_jaas_config: Secret | None = _kafka(values.SECRET_LINES, None, SECURITY)
    sasl_username: str = _kafka(values.TEXT, "", SECURITY)
    sasl_password: Secret | None = _kafka(values.SECRET, None, SECURITY)
    sasl_login_connect_timeout_ms: int = _kafka(values.integer(1), 10_000, SECURITY, kafka_default=None)
    sasl_login_read_timeout_ms: int = _kafka(values.integer(1), 10_000, SECURITY, kafka_default=None)
    sasl_login_retry_backoff_ms: int = _kafka(values.integer(0, LONG_MAX), 100, SECURITY)
    sasl_login_retry_backoff_max_ms: int = _kafka(values.integer(0, LONG_MAX), 10_000, SECURITY)
    sasl_login_refresh_window_factor: float = _kafka(values.real(0.5, 1.0), 0.8, SECURITY)
    sasl_login_refresh_window_jitter: float = _kafka(values.real(0.0, 0.25), 0.05, SECURITY)
    sasl_login_refresh_min_period_seconds: int = _kafka(values.integer(0, 900), 60, SECURITY)
    sasl_login_refresh_buffer_seconds: int = _kafka(values.integer(0, 3600), 300, SECURITY)
    sasl_oauthbearer_token_endpoint_url: str = _kafka(values.URL_OR_FILE, "", SECURITY)
    sasl_oauthbearer_client_credentials_client_id: str = _kafka(
        values.TEXT, "", SECURITY, aliases=("kafka.sasl.oauthbearer.client.id",),
    )
    sasl_oauthbearer_client_credentials_client_secret: Secret | None = _kafka(
        values.SECRET, None, SECURITY, aliases=("kafka.sasl.oauthbearer.client.secret",),
    )
    sasl_oauthbearer_scope: str = _kafka(values.TEXT, "", SECURITY)
    sasl_oauthbearer_header_urlencode: bool = _kafka(values.BOOLEAN, False, SECURITY)
    sasl_oauthbearer_jwt_retriever_class: str = _kafka(values.TEXT, f"{_OAUTH}.DefaultJwtRetriever", SECURITY)
    sasl_oauthbearer_assertion_file: str = _kafka(values.TEXT, "", SECURITY)
    sasl_oauthbearer_assertion_private_key_file: str = _kafka(values.TEXT, "", SECURITY)
    sasl_oauthbearer_assertion_private_key_passphrase: Secret | None = _kafka(values.SECRET, None, SECURITY)
    sasl_oauthbearer_assertion_algorithm: str = _kafka(
        values.words("RS256", "ES256", any_case=True), "RS256", SECURITY,
    )
    sasl_oauthbearer_assertion_claim_iss: str = _kafka(values.TEXT, "", SECURITY)
    sasl_oauthbearer_assertion_claim_sub: str = _kafka(values.TEXT, "", SECURITY)
    sasl_oauthbearer_assertion_claim_aud: str = _kafka(values.TEXT, "", SECURITY)
    sasl_oauthbearer_assertion_claim_exp_seconds: int = _kafka(values.integer(0, 86_400), 300, SECURITY)
    sasl_oauthbearer_assertion_claim_nbf_seconds: int = _kafka(values.integer(0, 3600), 60, SECURITY)
    sasl_oauthbearer_assertion_claim_jti_include: bool = _kafka(values.BOOLEAN, False, SECURITY)
    sasl_oauthbearer_assertion_template_file: str = _kafka(values.TEXT, "", SECURITY)
    sasl_oauthbearer_token_provider: str = _own(values.TEXT, "", SECURITY)
    sasl_kerberos_service_name: str = _kafka(values.TEXT, "", SECURITY)

    value_format: str = _own(values.words(*values.FORMATS), "bytes", FORMATS)
    key_format: str = _own(values.words(*values.FORMATS), "bytes", FORMATS)
    schema_registry_url: str = _own(values.URLS, "", FORMATS)
    value_subject_name_strategy: str = _own(values.STRATEGY, "TopicNameStrategy", FORMATS)
    key_subject_name_strategy: str = _own(values.STRATEGY, "TopicNameStrategy", FORMATS)
    value_schema: str = _own(values.TEXT, "", FORMATS)
    key_schema: str = _own(values.TEXT, "", FORMATS)
    value_schema_id: int = _own(values.integer(0, or_value=-1), -1, FORMATS, aliases=("use.schema.id",))
    key_schema_id: int = _own(values.integer(0, or_value=-1), -1, FORMATS)
    value_schema_version: int = _own(values.integer(1, or_value=-1), -1, FORMATS)
    key_schema_version: int = _own(values.integer(1, or_value=-1), -1, FORMATS)
    value_record_name: str = _own(values.STRING, "topLevelRecord", FORMATS)
    key_record_name: str = _own(values.STRING, "topLevelRecord", FORMATS)
    auto_register_schemas: bool = _own(values.BOOLEAN, True, FORMATS)
    use_latest_version: bool = _own(values.BOOLEAN, False, FORMATS)
    normalize_schemas: bool = _own(values.BOOLEAN, False, FORMATS)
    schema_id_location: str = _own(values.words("prefix", "header"), "prefix", FORMATS)
    schema_registry_topics: tuple[str, ...] = _own(values.NAMES, (), FORMATS)
    schema_registry_timeout_ms: int = _own(values.integer(1), 30_000, FORMATS)
    schema_registry_basic_auth_user_info: Secret | None = _own(
        values.SECRET, None, FORMATS, aliases=("basic.auth.user.info",),
    )
    schema_registry_bearer_auth_token: Secret | None = _own(
        values.SECRET, None, FORMATS, aliases=("bearer.auth.token",),
    )
    schema_registry_bearer_auth_logical_cluster: str = _own(
        values.STRING, "", FORMATS, aliases=("bearer.auth.logical.cluster",),
    )
    schema_registry_bearer_auth_identity_pool_id: str = _own(
        values.STRING, "", FORMATS, aliases=("bearer.auth.identity.pool.id",),
    )
    schema_registry_bearer_auth_issuer_endpoint_url: str = _own(
        values.URL, "", FORMATS, aliases=("bearer.auth.issuer.endpoint.url",),
    )
    schema_registry_bearer_auth_client_id: str = _own(
        values.STRING, "", FORMATS, aliases=("bearer.auth.client.id",), needs=_ISSUER,
    )
    schema_registry_bearer_auth_client_secret: Secret | None = _own(
        values.SECRET, None, FORMATS, aliases=("bearer.auth.client.secret",), needs=_ISSUER,
    )
    schema_registry_bearer_auth_scope: str = _own(
        values.STRING, "", FORMATS, aliases=("bearer.auth.scope",), needs=_ISSUER,
    )
    schema_registry_ssl_ca_location: str = _own(values.TEXT, "", FORMATS)
    schema_registry_ssl_certificate_location: str = _own(values.TEXT, "", FORMATS)
    schema_registry_ssl_key_location: str = _own(values.TEXT, "", FORMATS, needs=_CERTIFICATE)
    schema_registry_ssl_key_password: Secret | None = _own(values.SECRET, None, FORMATS, needs=_CERTIFICATE)

    coordinator_enabled: bool = _own(values.BOOLEAN, True, COORDINATOR, planning_only=True)
    coordinator_port: int = _own(values.integer(0, 65_535), 0, COORDINATOR, planning_only=True)
    coordinator_bind_address: str = _own(values.STRING, "", COORDINATOR, planning_only=True)

    ui_port: int = _own(values.integer(0, 65_535, or_value=-1), -1, LIVE_VIEW, planning_only=True)
    ui_bind_address: str = _own(values.STRING, "127.0.0.1", LIVE_VIEW, planning_only=True)
    delivery_report_path: str = _own(values.TEXT, "", LIVE_VIEW, planning_only=True)
    # fmt: on

    # This is not a row of the table: the breaker class checks the options under
    # kafka.producer.circuit.breaker.
    breaker: BreakerSettings = BreakerSettings()
    # Nor are the settings of a topic, under topic.config: brokers check them.
    topic_config: tuple[tuple[str, str], ...] = ()
    # The attributes that the job set, separated by commas; none that only follow from other options. Writes
    # that differ in this alone have equal options.
    given: str = field(default="", compare=False, repr=False)

    @property
    def exactly_once(self) -> bool:
        return self.delivery_guarantee == "exactly-once"

    @property
    def compression_level(self) -> int | None:
        """The level for the chosen codec. None means the codec's default, or that the codec has no levels."""
        levels = {
            CompressionType.GZIP: None if self.compression_gzip_level == -1 else self.compression_gzip_level,
            # In Kafka's producer, the default 9 selects the fast compressor, and not level 9 of the slow one.
            CompressionType.LZ4: None if self.compression_lz4_level == 9 else self.compression_lz4_level,
            CompressionType.ZSTD: self.compression_zstd_level,
        }
        return levels.get(self.compression_type)

    @property
    def has_format(self) -> bool:
        """Whether keys or values are encoded in a format, instead of being bytes already."""
        return (self.value_format, self.key_format) != ("bytes", "bytes")

    def for_tasks(self) -> SinkOptions:
        """These options without those that only planning reads. If the results of two writes are equal, they
        can share a producer."""
        unread = {spec.attribute: spec.default for spec in SPECS if spec.planning_only}
        return dataclasses.replace(self.without_registry(), **unread, topic_config=())

    def without_registry(self) -> SinkOptions:
        """These options without formats and the registry's login, which only planning needs."""
        unread = {spec.attribute: spec.default for spec in SPECS if spec.group == FORMATS}
        return dataclasses.replace(self, **unread)

    def shown(self) -> dict[str, str]:
        """The options that the job set to another value than the default, as users write them, for the live
        view. Addresses of brokers, logins, certificates and queries of URLs are left out."""
        given = self.given.split(",")

        def is_shown(spec: OptionSpec) -> bool:
            is_private = spec.secret or spec.required or spec.group == SECURITY
            return spec.attribute in given and not is_private

        return dict(self._written(is_shown, is_public=True))

    def identity_of_cluster(self) -> dict[str, str]:
        """The options that determine the cluster, the login, and what tasks share, as users write them.

        Writes with equal options here share the coordinator's state of the cluster. Options that only set a
        client's name or its timeouts are left out. Secrets are included.
        """
        sorted_ = dataclasses.replace(self, bootstrap_servers=tuple(sorted(set(self.bootstrap_servers))))
        written = sorted_._written(
            lambda spec: spec.required or (is_of_cluster(spec) and not _NAMES_OR_TIMES.match(spec.name))
        )
        written.update((breaker_option_name(name), text) for name, text in self.breaker.given)
        return written

    def group_settings(self) -> dict[str, str]:
        """The options that the coordinator reads, as users write them and ``parse`` expects. None of them is
        secret."""
        written = self._written(lambda spec: spec.name in GROUP_OPTIONS)
        given = ((breaker_option_name(name), text) for name, text in self.breaker.given)
        written.update((name, text) for name, text in given if name in GROUP_OPTIONS)
        return written

    def _written(self, is_wanted: Callable[[OptionSpec], bool], *, is_public: bool = False) -> dict[str, str]:
        """The settings that differ from their defaults. The queries of public URLs are left out, because they
        may be keys or logins."""
        written = HiddenValues(
            (spec.name, spec.kind.show(getattr(self, spec.attribute)))
            for spec in SPECS
            if is_wanted(spec) and getattr(self, spec.attribute) != spec.default
        )
        for name in [name for name, text in written.items() if is_public and "://" in text]:
            written[name] = values.without_query(written[name])
        return written

    def redacted(self) -> dict[str, str]:
        """The settings that differ from their defaults, by the names that users write, with secrets
        hidden."""
        shown = dict(self._written(lambda spec: not spec.secret, is_public=True))
        shown.update((spec.name, HIDDEN) for spec in SPECS if spec.secret and getattr(self, spec.attribute))
        shown.update((f"{TOPIC_CONFIG_PREFIX}{name}", text) for name, text in self.topic_config)
        # A user's breaker class may have credentials as options, and does not declare which are secret.
        shown.update((breaker_option_name(name), HIDDEN) for name, _ in self.breaker.given)
        return shown

    def __repr__(self) -> str:
        inner = ", ".join(f"{name}={value!r}" for name, value in self.redacted().items())
        return f"SinkOptions({inner})"


@dataclass(frozen=True)
class ParsedOptions:
    """Valid options, and warnings for the user. The warnings contain no secrets."""

    options: SinkOptions
    warnings: tuple[str, ...] = ()


SPECS: tuple[OptionSpec, ...] = tuple(
    _with_name(option) for option in dataclasses.fields(SinkOptions) if "spec" in option.metadata
)
BY_NAME = {name.lower(): spec for spec in SPECS for name in (spec.name, *spec.aliases)}
# The groups about a write's rows. All other groups, including those added later, are about the cluster.
_GROUPS_OF_WRITES = (
    *(TARGET, RATE, DELIVERY, ERRORS, TRANSACTIONS, BATCHING, COMPRESSION, PARTITIONER, COORDINATOR),
    *(LIVE_VIEW, FORMATS),
)


# The options that tasks send to the coordinator. A user's breaker class may have others. The tasks do not
# send them, because they may be secrets.
GROUP_OPTIONS = (
    "kafka.request.timeout.ms",
    "kafka.retry.backoff.ms",
    "kafka.retry.backoff.max.ms",
    "kafka.metadata.max.age.ms",
    "kafka.metadata.max.idle.ms",
    "kafka.allow.auto.create.topics",
    *(breaker_option_name(option.name) for option in BREAKER_OPTIONS),
)


# Options that only set the client's name or its timeouts: those of the first write apply to all writes.
_NAMES_OR_TIMES = re.compile(
    r"kafka\.(client\.id|request\.|retry\.|reconnect\.|connections\.|socket\."
    r"|sasl\.login\.(refresh|retry|connect|read)\.)"
)


# The options among GROUP_OPTIONS that must be equal in all writes that share the coordinator's state.
SHARED_OPTIONS = tuple(name for name in GROUP_OPTIONS if not _NAMES_OR_TIMES.match(name))


def is_of_cluster(spec: OptionSpec) -> bool:
    if spec.group == FORMATS:
        return False
    return spec.secret or spec.name in GROUP_OPTIONS or spec.group not in _GROUPS_OF_WRITES
