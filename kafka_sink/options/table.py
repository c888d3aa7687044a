"""Every option of the sink in one declared table: name, type, bounds, default, what it does.

The fields of SinkOptions are the table: the parser, the documentation and the redaction all read it.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from typing import Any

from kafka_sink.model import CompressionType
from kafka_sink.options import values
from kafka_sink.options.breaker import BreakerSettings
from kafka_sink.options.prefixes import BREAKER_PREFIX, KAFKA_PREFIX
from kafka_sink.options.values import INT_MAX, LONG_MAX, HostPort, Kind
from kafka_sink.secret import HIDDEN, Secret

TARGET = "The job"
DELIVERY = "Delivery"
TRANSACTIONS = "Exactly once"
BATCHING = "Batches and memory"
COMPRESSION = "Compression"
METADATA = "Metadata"
PARTITIONER = "Partitioner"
NETWORK = "Connections"
SECURITY = "Security"
COORDINATOR = "Coordinator"


@dataclass(frozen=True)
class OptionSpec:
    """One row of the table. ``name`` is as users write it, ``kafka.`` included where it has it."""

    name: str
    attribute: str
    kind: Kind
    default: Any
    group: str
    importance: str
    doc: str
    kafka_default: Any
    aliases: tuple[str, ...]
    secret: bool
    required: bool

    @property
    def differs(self) -> bool:
        """Whether the default is not Kafka's."""
        return bool(self.default != self.kafka_default)


_SAME = object()
_CAMEL_CASE = re.compile(r"(?<=[a-z])([A-Z])")


def _option(  # noqa: PLR0913 - a row of the table, most by name
    name: str,
    kind: Kind,
    default: Any,
    group: str,
    importance: str,
    doc: str,
    *,
    kafka_default: Any = _SAME,
    aliases: tuple[str, ...] = (),
    secret: bool = False,
    required: bool = False,
) -> Any:
    spec = OptionSpec(
        name,
        _CAMEL_CASE.sub(r"_\1", name.removeprefix(KAFKA_PREFIX).replace(".", "_")).lower(),
        kind,
        default,
        group,
        importance,
        " ".join(doc.split()),
        default if kafka_default is _SAME else kafka_default,
        aliases,
        secret,
        required,
    )
    if required:
        return dataclasses.field(metadata={"spec": spec})
    return dataclasses.field(default=default, metadata={"spec": spec})


@dataclass(frozen=True, kw_only=True, repr=False)
class SinkOptions:
    """All settings of one job, validated. Hashable and picklable; times are ms, sizes bytes.

    Attributes carry Kafka's names with dots as underscores. Made by :func:`kafka_sink.options.parse`; the
    constructor itself checks nothing. ``repr`` hides secrets.
    """

    # A row of the table is read across, not down.
    # fmt: off
    topic: str | None = _option(
        "topic", values.topic(), None, TARGET, "high",
        """Topic for all rows. It wins over a column `topic`; without it the column is needed.""",
    )
    topic_create: bool = _option(
        "topic.create", values.boolean(), False, TARGET, "medium",
        """Create the topic that `topic` names, where it is missing, before any task starts. One that exists
        stays as it is. Brokers are then not left to create it by themselves
        (`kafka.allow.auto.create.topics` is off unless you set it).""",
    )
    topic_partitions: int = _option(
        "topic.partitions", values.integer(1, 100_000, or_value=-1), -1, TARGET, "medium",
        """Partitions of a topic that `topic.create` creates; `-1` is the broker's `num.partitions`.""",
    )
    topic_replication_factor: int = _option(
        "topic.replication.factor", values.integer(1, 10_000, or_value=-1), -1, TARGET, "medium",
        """Replicas of a topic that `topic.create` creates; `-1` is the broker's
        `default.replication.factor`.""",
    )
    bootstrap_servers: tuple[HostPort, ...] = _option(
        "kafka.bootstrap.servers", values.addresses(), (), TARGET, "high",
        """Brokers to ask first. Name more than one, so that a dead one does not stop a job from starting.""",
        required=True,
    )
    log_summary: bool = _option(
        "log.summary", values.boolean(), True, TARGET, "low",
        """Write one line per job or micro-batch to the driver's log: rows, topics, bytes, retries, times.""",
    )
    client_id: str = _option(
        "kafka.client.id", values.string(), "", TARGET, "medium",
        """Name that brokers log and apply quotas to.""",
    )

    acks: int = _option(
        "kafka.acks", values.choice({"all": -1, "-1": -1, "1": 1, "0": 0}), -1, DELIVERY, "high",
        """Who must have a row before it counts as written: all in-sync replicas (`all`, `-1`), the leader
        (`1`), nobody (`0`: rows are reported as unconfirmed, and a broker's refusal goes unseen).""",
    )
    enable_idempotence: bool = _option(
        "kafka.enable.idempotence", values.boolean(), True, DELIVERY, "high",
        """Retries double no row and keep the order of each partition. Needs `acks=all`, `retries` above 0 and
        at most 5 requests in flight. Where those are set otherwise it goes off with a warning, unless it was
        asked for by `true`: then that is an error.""",
    )
    max_in_flight_requests_per_connection: int = _option(
        "kafka.max.in.flight.requests.per.connection", values.integer(1), 5, DELIVERY, "low",
        """Unanswered requests per broker. Above 1 without idempotence, a retry can change a partition's
        order.""",
    )
    retries: int = _option(
        "kafka.retries", values.integer(0), INT_MAX, DELIVERY, "low",
        """How often a batch is sent again after an error that may pass. `kafka.delivery.timeout.ms` bounds
        them in time, and is the better one to set.""",
    )
    delivery_timeout_ms: int = _option(
        "kafka.delivery.timeout.ms", values.integer(0), 120_000, DELIVERY, "high",
        """How long a row may take from its append to its acknowledgement, waiting and retries included; then
        the task fails. At least `kafka.linger.ms` + `kafka.request.timeout.ms`; left unset, it is raised to
        that.""",
    )
    request_timeout_ms: int = _option(
        "kafka.request.timeout.ms", values.integer(0), 30_000, DELIVERY, "medium",
        """How long to wait for a broker's answer before the request counts as failed.""",
    )
    retry_backoff_ms: int = _option(
        "kafka.retry.backoff.ms", values.integer(0, LONG_MAX), 100, DELIVERY, "low",
        """Wait before the first retry of a failed request; doubles with each further one, 20 % jitter.""",
    )
    retry_backoff_max_ms: int = _option(
        "kafka.retry.backoff.max.ms", values.integer(0, LONG_MAX), 1_000, DELIVERY, "low",
        """Longest wait between retries. Where it is below `kafka.retry.backoff.ms`, it is the wait.""",
    )
    max_block_ms: int = _option(
        "kafka.max.block.ms", values.integer(0, LONG_MAX), 60_000, DELIVERY, "medium",
        """How long a task waits for buffer memory, for the metadata of a topic it has not used yet, and for a
        partition that rows name and the topic does not have (it may just have been added, or the topic
        recreated with fewer); and planning for brokers, where `topic` is set.""",
    )

    delivery_guarantee: str = _option(
        "delivery.guarantee", values.words("at-least-once", "exactly-once"), "at-least-once", TRANSACTIONS,
        "high",
        """`exactly-once`: readers with `isolation.level=read_committed` see each row of a batch once,
        whatever fails and is run again, and of a failed batch nothing. Rows are written in transactions,
        which brokers of Kafka 4.0 or later are needed for: docs/exactly-once.md.""",
    )
    transactional_id_prefix: str = _option(
        "transactional.id.prefix", values.string(), "", TRANSACTIONS, "high",
        """What the transactional ids and the groups that progress is recorded under begin with. No two
        running queries or jobs may have the same. Empty: derived from a query's checkpoint location, from
        `txnAppId`, or else from the application.""",
    )
    transaction_progress_topic: str | None = _option(
        "transaction.progress.topic", values.topic(), None, TRANSACTIONS, "medium",
        """Topic that progress is recorded for, as offsets; nothing is written to it. Without it the one that
        `topic` names; needed where rows name their topics. It must live as long as the progress is to.""",
    )
    transaction_timeout_ms: int = _option(
        "kafka.transaction.timeout.ms", values.integer(1), 900_000, TRANSACTIONS, "high",
        """How long a transaction may be open: from a task's first row until its batch is decided, and then
        until a driver that died is back. Brokers abort it after that, and until then it holds up readers of
        committed rows. At most the brokers' `transaction.max.timeout.ms`, whose default this is.""",
        kafka_default=60_000,
    )
    txn_app_id: str = _option(
        "txnAppId", values.string(), "", TRANSACTIONS, "medium",
        """Name of the application that writes version `txnVersion`, for `df.write` and `foreachBatch`: a
        version that was written before is not written again. Of each topic by itself.""",
    )
    txn_version: int = _option(
        "txnVersion", values.integer(0, LONG_MAX, or_value=-1), -1, TRANSACTIONS, "medium",
        """Version that a job writes, larger than that of the job before. In `foreachBatch` the batch's
        id.""",
    )

    batch_size: int = _option(
        "kafka.batch.size", values.integer(0), 524_288, BATCHING, "high",
        """Target size of a record batch; a larger record gets a batch of its own. Larger than Kafka's because
        memory is taken as data arrives, not per partition in advance, and because batches of half a MiB leave
        room below a broker's default `message.max.bytes` of 1,048,588.""",
        kafka_default=16_384,
    )
    linger_ms: int = _option(
        "kafka.linger.ms", values.integer(0, LONG_MAX), 20, BATCHING, "high",
        """How long a batch may wait for more rows. Longer than Kafka's because a Spark task sends bulk data:
        nobody waits for single rows, and fuller batches are what makes it fast.""",
        kafka_default=5,
    )
    buffer_memory: int = _option(
        "kafka.buffer.memory", values.integer(128, LONG_MAX), 67_108_864, BATCHING, "high",
        """Memory for rows that are not acknowledged yet, per Python worker. Twice Kafka's, since one producer
        serves a whole task at bulk rates.""",
        kafka_default=33_554_432,
    )
    buffer_memory_allocation_strategy: str = _option(
        "kafka.buffer.memory.allocation.strategy", values.words("incremental", "full", any_case=True),
        "incremental", BATCHING, "medium",
        """`incremental`: a batch takes memory in chunks as rows arrive. `full`: it takes `kafka.batch.size`
        when it opens, as Kafka's producer does by default. What is sent is the same.""",
        kafka_default="full",
    )
    max_request_size: int = _option(
        "kafka.max.request.size", values.integer(0), 1_048_576, BATCHING, "medium",
        """Largest request, and largest uncompressed record. A single batch may exceed it.""",
    )

    compression_type: CompressionType = _option(
        "kafka.compression.type", values.codec(), CompressionType.NONE, COMPRESSION, "high",
        """Codec of the record batches.""",
    )
    compression_gzip_level: int = _option(
        "kafka.compression.gzip.level", values.integer(1, 9, or_value=-1), -1, COMPRESSION, "low",
        """Level for gzip; `-1` is the library's own default.""",
    )
    compression_lz4_level: int = _option(
        "kafka.compression.lz4.level", values.integer(1, 17), 9, COMPRESSION, "low",
        """Level for lz4; the default `9` selects the fast compressor, as in Kafka's producer, others the
        high-compression one.""",
    )
    compression_zstd_level: int = _option(
        "kafka.compression.zstd.level", values.integer(-131_072, 22), 3, COMPRESSION, "low",
        """Level for zstd.""",
    )

    partitioner_ignore_keys: bool = _option(
        "kafka.partitioner.ignore.keys", values.boolean(), False, PARTITIONER, "medium",
        """Treat rows with a key as if they had none when a partition is chosen.""",
    )
    partitioner_adaptive_partitioning_enable: bool = _option(
        "kafka.partitioner.adaptive.partitioning.enable", values.boolean(), True, PARTITIONER, "low",
        """Send more keyless rows to partitions whose brokers answer faster.""",
    )
    partitioner_availability_timeout_ms: int = _option(
        "kafka.partitioner.availability.timeout.ms", values.integer(0, LONG_MAX), 0, PARTITIONER, "low",
        """Keyless rows avoid partitions whose broker has taken nothing for this long; `0` never does.""",
    )

    partitioner_spread_keys_when_muted: bool = _option(
        "kafka.partitioner.spread.keys.when.muted", values.boolean(), False, PARTITIONER, "medium",
        """Send rows with keys to other partitions while the circuit breaker mutes theirs (KIP-693's trade).
        Its price: rows of one key then stand in several partitions, so their order is lost. With `false`
        they wait for their partition, in order, and where keys spread over all partitions the task stops
        with them for as long. Rows with a partition column always keep their partition.""",
    )

    metadata_max_age_ms: int = _option(
        "kafka.metadata.max.age.ms", values.integer(0, LONG_MAX), 300_000, METADATA, "low",
        """Age at which a topic's metadata is fetched again without a reason.""",
    )
    metadata_max_idle_ms: int = _option(
        "kafka.metadata.max.idle.ms", values.integer(5_000, LONG_MAX), 300_000, METADATA, "low",
        """Metadata of a topic not written to for this long is forgotten.""",
        aliases=("kafka.metadata.evict.ms",),
    )
    metadata_recovery_strategy: str = _option(
        "kafka.metadata.recovery.strategy", values.words("rebootstrap", "none", any_case=True),
        "rebootstrap", METADATA, "low",
        """When no known broker answers: start over from `kafka.bootstrap.servers`, or keep trying those
        known.""",
    )
    metadata_recovery_rebootstrap_trigger_ms: int = _option(
        "kafka.metadata.recovery.rebootstrap.trigger.ms", values.integer(0, LONG_MAX), 300_000, METADATA,
        "low",
        """How long without metadata before starting over from `kafka.bootstrap.servers`.""",
    )
    allow_auto_create_topics: bool = _option(
        "kafka.allow.auto.create.topics", values.boolean(), True, METADATA, "medium",
        """Let a broker that has auto.create.topics.enable create a missing topic. Kafka's producer always
        lets it; here `false` makes a missing topic an error. The topic that `topic` names is looked up, and
        so created, when the write is planned; where it is missing 5 s later, planning fails.""",
    )

    client_dns_lookup: str = _option(
        "kafka.client.dns.lookup", values.words("use_all_dns_ips",
        "resolve_canonical_bootstrap_servers_only"), "use_all_dns_ips", NETWORK, "medium",
        """Try every address of a name in turn, or turn bootstrap names into canonical ones first.""",
    )
    connections_max_idle_ms: int = _option(
        "kafka.connections.max.idle.ms", values.integer(-1, LONG_MAX), 540_000, NETWORK, "medium",
        """Close connections unused for this long; `-1` never does.""",
    )
    send_buffer_bytes: int = _option(
        "kafka.send.buffer.bytes", values.integer(-1), 131_072, NETWORK, "medium",
        """TCP send buffer (SO_SNDBUF); `-1` leaves it to the system.""",
    )
    receive_buffer_bytes: int = _option(
        "kafka.receive.buffer.bytes", values.integer(-1), 32_768, NETWORK, "medium",
        """TCP receive buffer (SO_RCVBUF); `-1` leaves it to the system.""",
    )
    reconnect_backoff_ms: int = _option(
        "kafka.reconnect.backoff.ms", values.integer(0, LONG_MAX), 50, NETWORK, "low",
        """Wait before connecting again to a broker that could not be reached; doubles with each failure, with
        20 % jitter. Set without `kafka.reconnect.backoff.max.ms`, it is a constant wait.""",
    )
    reconnect_backoff_max_ms: int = _option(
        "kafka.reconnect.backoff.max.ms", values.integer(0, LONG_MAX), 1_000, NETWORK, "low",
        """Longest wait before connecting again.""",
    )
    socket_connection_setup_timeout_ms: int = _option(
        "kafka.socket.connection.setup.timeout.ms", values.integer(0, LONG_MAX), 10_000, NETWORK, "medium",
        """How long a connection may take to be made; doubles with each failure, with 20 % jitter.""",
    )
    socket_connection_setup_timeout_max_ms: int = _option(
        "kafka.socket.connection.setup.timeout.max.ms", values.integer(0, LONG_MAX), 30_000, NETWORK,
        "medium",
        """Longest that a connection may take to be made.""",
    )

    security_protocol: str = _option(
        "kafka.security.protocol", values.words(*values.PROTOCOLS, any_case=True), "PLAINTEXT", SECURITY,
        "high",
        """How to speak to brokers: in clear or by TLS, with a login (SASL) or without.""",
    )
    ssl_truststore_type: str = _option(
        "kafka.ssl.truststore.type", values.words("JKS", "PKCS12", "PEM", any_case=True), "JKS", SECURITY,
        "medium",
        """Format of `kafka.ssl.truststore.location`. As in Java, `JKS` and `PKCS12` both read a PKCS12 file,
        which `keytool` writes since Java 9; a file that really is JKS is refused with the command that
        converts it.""",
    )
    ssl_truststore_location: str = _option(
        "kafka.ssl.truststore.location", values.text(), "", SECURITY, "high",
        """File with the certificates of the authorities that are trusted, on the driver's host and on all
        executors'. Neither this nor one of its alternatives set: those that the system trusts.""",
    )
    ssl_truststore_password: Secret | None = _option(
        "kafka.ssl.truststore.password", values.secret(), None, SECURITY, "high",
        """Password of a PKCS12 truststore.""", secret=True,
    )
    ssl_truststore_certificates: Secret | None = _option(
        "kafka.ssl.truststore.certificates", values.secret(), None, SECURITY, "high",
        """Trusted certificates themselves, as PEM, with `kafka.ssl.truststore.type=PEM` (KIP-651).""",
        aliases=("kafka.ssl.ca.pem",), secret=True,
    )
    ssl_ca_location: str = _option(
        "kafka.ssl.ca.location", values.text(), "", SECURITY, "medium",
        """A PEM file of trusted certificates, under librdkafka's name.""", kafka_default="",
    )
    ssl_keystore_type: str = _option(
        "kafka.ssl.keystore.type", values.words("JKS", "PKCS12", "PEM", any_case=True), "JKS", SECURITY,
        "medium",
        """Format of `kafka.ssl.keystore.location`; see `kafka.ssl.truststore.type`.""",
    )
    ssl_keystore_location: str = _option(
        "kafka.ssl.keystore.location", values.text(), "", SECURITY, "high",
        """File with this client's private key and certificate chain, for brokers that want one (mutual TLS).
        A PEM file holds both.""",
    )
    ssl_keystore_password: Secret | None = _option(
        "kafka.ssl.keystore.password", values.secret(), None, SECURITY, "high",
        """Password of a PKCS12 keystore.""", secret=True,
    )
    ssl_keystore_key: Secret | None = _option(
        "kafka.ssl.keystore.key", values.secret(), None, SECURITY, "high",
        """Private key itself, as PEM (PKCS#8 or older forms), with `kafka.ssl.keystore.type=PEM`.""",
        aliases=("kafka.ssl.key.pem",), secret=True,
    )
    ssl_keystore_certificate_chain: Secret | None = _option(
        "kafka.ssl.keystore.certificate.chain", values.secret(), None, SECURITY, "high",
        """Certificate chain of that key itself, as PEM, this client's own first.""",
        aliases=("kafka.ssl.certificate.pem",), secret=True,
    )
    ssl_key_password: Secret | None = _option(
        "kafka.ssl.key.password", values.secret(), None, SECURITY, "high",
        """Password of an encrypted private key.""", secret=True,
    )
    ssl_key_location: str = _option(
        "kafka.ssl.key.location", values.text(), "", SECURITY, "medium",
        """A PEM file with the private key, under librdkafka's name.""",
    )
    ssl_certificate_location: str = _option(
        "kafka.ssl.certificate.location", values.text(), "", SECURITY, "medium",
        """A PEM file with the certificate chain of that key, under librdkafka's name.""",
    )
    ssl_endpoint_identification_algorithm: str = _option(
        "kafka.ssl.endpoint.identification.algorithm", values.words("https", "none", "", any_case=True),
        "https", SECURITY, "high",
        """Whether a broker's certificate must be for the name or IP address that is connected to: `https`.
        Empty (librdkafka: `none`) switches that check off, and anyone with a certificate of a trusted
        authority may then pass for a broker.""",
    )
    ssl_enabled_protocols: tuple[str, ...] = _option(
        "kafka.ssl.enabled.protocols", values.names(), ("TLSv1.2", "TLSv1.3"), SECURITY, "medium",
        """Versions of TLS that may be spoken: `TLSv1.2`, `TLSv1.3`.""",
    )
    ssl_protocol: str = _option(
        "kafka.ssl.protocol", values.words("TLSv1.3", "TLSv1.2", "TLS", any_case=True), "TLSv1.3", SECURITY,
        "low",
        """The newest version of TLS that may be spoken.""",
    )
    ssl_cipher_suites: tuple[str, ...] = _option(
        "kafka.ssl.cipher.suites", values.names(), (), SECURITY, "low",
        """Cipher suites that may be used, under Java's or OpenSSL's names; empty: those that OpenSSL takes
        for secure. A broker that chooses another suite of TLS 1.3 is refused after the handshake, as Python
        cannot offer fewer of those.""",
    )
    enable_ssl_certificate_verification: bool = _option(
        "kafka.enable.ssl.certificate.verification", values.boolean(), True, SECURITY, "low",
        """librdkafka's name. `false` is refused: without it TLS protects from nobody.""",
    )
    sasl_mechanism: str = _option(
        "kafka.sasl.mechanism", values.words("GSSAPI", "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512",
        "OAUTHBEARER", "AWS_MSK_IAM", any_case=True), "GSSAPI", SECURITY, "high",
        """How to log in.""", aliases=("kafka.sasl.mechanisms",),
    )
    sasl_jaas_config: Secret | None = _option(
        "kafka.sasl.jaas.config", values.secret(), None, SECURITY, "high",
        """Login module with its credentials as Java clients have it:
        `org.apache.kafka.common.security.plain.PlainLoginModule required username="u" password="p";`.
        `ScramLoginModule`, `OAuthBearerLoginModule`, `IAMLoginModule` and `Krb5LoginModule` are known, too,
        with or without Databricks' prefix `kafkashaded.`""", secret=True,
    )
    sasl_username: str = _option(
        "kafka.sasl.username", values.text(), "", SECURITY, "high",
        """User for PLAIN and SCRAM, in place of `kafka.sasl.jaas.config`.""",
    )
    sasl_password: Secret | None = _option(
        "kafka.sasl.password", values.secret(), None, SECURITY, "high",
        """That user's password.""", secret=True,
    )
    sasl_client_callback_handler_class: str = _option(
        "kafka.sasl.client.callback.handler.class", values.text(), "", SECURITY, "medium",
        """`software.amazon.msk.auth.iam.IAMClientCallbackHandler` is taken, and does what AWS_MSK_IAM does
        anyway. Other Java classes are refused.""",
    )
    sasl_login_callback_handler_class: str = _option(
        "kafka.sasl.login.callback.handler.class", values.text(), "", SECURITY, "medium",
        """Kafka's `OAuthBearerLoginCallbackHandler` is taken. Other Java classes are refused.""",
    )
    sasl_login_connect_timeout_ms: int = _option(
        "kafka.sasl.login.connect.timeout.ms", values.integer(1), 10_000, SECURITY, "low",
        """How long to wait for a connection to the token endpoint. Kafka sets no bound.""",
        kafka_default=None,
    )
    sasl_login_read_timeout_ms: int = _option(
        "kafka.sasl.login.read.timeout.ms", values.integer(1), 10_000, SECURITY, "low",
        """How long to wait for its answer. Kafka sets no bound.""", kafka_default=None,
    )
    sasl_login_retry_backoff_ms: int = _option(
        "kafka.sasl.login.retry.backoff.ms", values.integer(0, LONG_MAX), 100, SECURITY, "low",
        """Wait before the token endpoint is asked again; doubles with each failure.""",
    )
    sasl_login_retry_backoff_max_ms: int = _option(
        "kafka.sasl.login.retry.backoff.max.ms", values.integer(0, LONG_MAX), 10_000, SECURITY, "low",
        """Longest such wait. The last failure is reported when the connection's own bound is over.""",
    )
    sasl_login_refresh_window_factor: float = _option(
        "kafka.sasl.login.refresh.window.factor", values.real(0.5, 1.0), 0.8, SECURITY, "low",
        """Share of a token's lifetime after which a new one is fetched.""",
    )
    sasl_login_refresh_window_jitter: float = _option(
        "kafka.sasl.login.refresh.window.jitter", values.real(0.0, 0.25), 0.05, SECURITY, "low",
        """Largest share of the lifetime that is added to it at random.""",
    )
    sasl_login_refresh_min_period_seconds: int = _option(
        "kafka.sasl.login.refresh.min.period.seconds", values.integer(0, 900), 60, SECURITY, "low",
        """Least age at which a token is renewed, unless it would run out.""",
    )
    sasl_login_refresh_buffer_seconds: int = _option(
        "kafka.sasl.login.refresh.buffer.seconds", values.integer(0, 3600), 300, SECURITY, "low",
        """Renew no later than this before a token runs out, where its lifetime allows.""",
    )
    sasl_oauthbearer_token_endpoint_url: str = _option(
        "kafka.sasl.oauthbearer.token.endpoint.url", values.text(), "", SECURITY, "medium",
        """Where OAUTHBEARER fetches tokens by client credentials (KIP-768); `file:///path` reads the token
        from a file instead, anew when it changes.""",
    )
    sasl_oauthbearer_client_credentials_client_id: str = _option(
        "kafka.sasl.oauthbearer.client.credentials.client.id", values.text(), "", SECURITY, "medium",
        """Client id for the token endpoint; or `clientId` in `kafka.sasl.jaas.config`.""",
        aliases=("kafka.sasl.oauthbearer.client.id",),
    )
    sasl_oauthbearer_client_credentials_client_secret: Secret | None = _option(
        "kafka.sasl.oauthbearer.client.credentials.client.secret", values.secret(), None, SECURITY, "medium",
        """Its secret; or `clientSecret` in `kafka.sasl.jaas.config`.""",
        aliases=("kafka.sasl.oauthbearer.client.secret",), secret=True,
    )
    sasl_oauthbearer_scope: str = _option(
        "kafka.sasl.oauthbearer.scope", values.text(), "", SECURITY, "medium",
        """Scope to ask for; or `scope` in `kafka.sasl.jaas.config`.""",
    )
    sasl_oauthbearer_header_urlencode: bool = _option(
        "kafka.sasl.oauthbearer.header.urlencode", values.boolean(), False, SECURITY, "low",
        """URL-encode id and secret before they go into the Authorization header (RFC 6749, 2.3.1).""",
    )
    sasl_oauthbearer_token_provider: str = _option(
        "sasl.oauthbearer.token.provider", values.text(), "", SECURITY, "medium",
        """Dotted path of a Python function without parameters that returns a token for OAUTHBEARER, as text,
        or as a pair of the token and when it expires, in seconds since 1970. Executors and driver must be
        able to import it.""",
    )
    sasl_kerberos_service_name: str = _option(
        "kafka.sasl.kerberos.service.name", values.text(), "", SECURITY, "medium",
        """Kerberos' name of the brokers' service, usually `kafka`; or `serviceName` in
        `kafka.sasl.jaas.config`.""",
    )

    coordinator_enabled: bool = _option(
        "coordinator.enabled", values.boolean(), True, COORDINATOR, "medium",
        """Run one process on the driver's host that asks for metadata once for all tasks. Without it, or
        where tasks cannot reach it, each task asks by itself. An administrator switches it off for all jobs
        by `KAFKA_CHUNKED_COORDINATOR_ENABLED=false` in the driver's environment, or by
        `spark.kafka-chunked.coordinator.enabled=false` in Spark's configuration.""",
    )
    coordinator_port: int = _option(
        "coordinator.port", values.integer(0, 65_535), 0, COORDINATOR, "medium",
        """Port that the coordinator listens on; `0` takes a free one. The first write of an application
        decides. `KAFKA_CHUNKED_COORDINATOR_PORT` or `spark.kafka-chunked.coordinator.port` wins over it.""",
    )
    coordinator_bind_address: str = _option(
        "coordinator.bind.address", values.string(), "", COORDINATOR, "medium",
        """Address that the coordinator listens on; empty is what the driver listens on:
        `spark.driver.bindAddress`, `spark.driver.host`, SPARK_LOCAL_IP or this host's own, the first that is
        known. Tasks find it at `spark.driver.host`. `KAFKA_CHUNKED_COORDINATOR_BIND_ADDRESS` or
        `spark.kafka-chunked.coordinator.bind.address` wins over it.""",
    )
    coordinator_report_interval_ms: int = _option(
        "coordinator.report.interval.ms", values.integer(50, 60_000), 500, COORDINATOR, "low",
        """How long a task gathers what it tells the coordinator. Leaders that moved are told at once.""",
    )

    coordinator_max_connections: int = _option(
        "coordinator.max.connections", values.integer(1, 100_000), 10_000, COORDINATOR, "low",
        """Most connections of tasks to the coordinator; one for each Python worker that writes. Tasks beyond
        that work alone, and its log says so. The limit of open files of its process bounds them, too. The
        first write of an application decides about this and the next two.""",
    )
    coordinator_buffer_memory: int = _option(
        "coordinator.buffer.memory", values.integer(1_048_576, LONG_MAX), 33_554_432, COORDINATOR, "low",
        """Most bytes that the coordinator holds of messages half received, and as many of messages that tasks
        have not read yet; who holds most loses its connection. What many tasks are told counts once.""",
    )
    coordinator_max_messages_per_second: int = _option(
        "coordinator.max.messages.per.second", values.integer(10, 1_000_000), 500, COORDINATOR, "low",
        """Most messages of one connection in a second; further ones are read later.""",
    )

    # Not a row of the table: the breaker class checks its own options under kafka.producer.circuit.breaker.
    breaker: BreakerSettings = BreakerSettings()

    # fmt: on

    @property
    def compression_level(self) -> int | None:
        """Level for the chosen codec; None where that is the codec's default or it has no levels."""
        levels = {
            CompressionType.GZIP: None if self.compression_gzip_level == -1 else self.compression_gzip_level,
            # Kafka's own meaning of its lz4 default 9 is the fast compressor, not level 9 of the slow one.
            CompressionType.LZ4: None if self.compression_lz4_level == 9 else self.compression_lz4_level,
            CompressionType.ZSTD: self.compression_zstd_level,
        }
        return levels.get(self.compression_type)

    def for_tasks(self) -> SinkOptions:
        """The same for all writes that one producer can serve: what only the planning reads is left out."""
        unread = {spec.attribute: spec.default for spec in SPECS if spec.attribute in _OF_PLANNING}
        return dataclasses.replace(self, **unread)

    def of_cluster(self) -> dict[str, str]:
        """What is set about a cluster, how to reach it, its security and its breaker, as users write it,
        secrets included: for a process that works with the same cluster. ``parse`` takes it. Writes for which
        these are equal share what the coordinator knows."""
        written = {
            spec.name: spec.kind.show(getattr(self, spec.attribute))
            for spec in SPECS
            if spec.required or (_is_of_cluster(spec) and getattr(self, spec.attribute) != spec.default)
        }
        breaker = {f"{KAFKA_PREFIX}{BREAKER_PREFIX}{name}": text for name, text in self.breaker.given}
        return written | breaker

    def redacted(self) -> dict[str, str]:
        """Settings that differ from their defaults, under the names users write, with secrets hidden."""
        shown = {}
        for spec in SPECS:
            value = getattr(self, spec.attribute)
            if spec.required or value != spec.default:
                shown[spec.name] = HIDDEN if spec.secret else spec.kind.show(value)
        # A user's own breaker class may take credentials, and nobody declared which of its options are.
        shown.update((f"{KAFKA_PREFIX}{BREAKER_PREFIX}{name}", HIDDEN) for name, _ in self.breaker.given)
        return shown

    def __repr__(self) -> str:
        inner = ", ".join(f"{name}={value!r}" for name, value in self.redacted().items())
        return f"SinkOptions({inner})"


@dataclass(frozen=True)
class ParsedOptions:
    """Valid options, and what their author should be told. ``warnings`` hold no secret."""

    options: SinkOptions
    warnings: tuple[str, ...] = ()


SPECS: tuple[OptionSpec, ...] = tuple(
    field.metadata["spec"] for field in dataclasses.fields(SinkOptions) if "spec" in field.metadata
)
_OF_PLANNING = (
    *("topic", "topic_create", "topic_partitions", "topic_replication_factor", "log_summary"),
    *("coordinator_enabled", "coordinator_port", "coordinator_bind_address", "coordinator_max_connections"),
    *("coordinator_buffer_memory", "coordinator_max_messages_per_second"),
    *("transactional_id_prefix", "transaction_progress_topic", "txn_app_id", "txn_version"),
)
# What a write does with its rows. Every other group is about the cluster: a new one, such as security, makes
# a cluster of its own without a change here.
_GROUPS_OF_WRITES = (TARGET, DELIVERY, TRANSACTIONS, BATCHING, COMPRESSION, PARTITIONER, COORDINATOR)
# Of those groups, what the coordinator's own requests use too, and what tells it which tasks are still there.
_READ_BY_COORDINATOR = (
    *("client_id", "request_timeout_ms", "retry_backoff_ms", "retry_backoff_max_ms"),
    "coordinator_report_interval_ms",
)


def _is_of_cluster(spec: OptionSpec) -> bool:
    named = spec.secret or spec.attribute in _READ_BY_COORDINATOR
    return named or spec.group not in _GROUPS_OF_WRITES
