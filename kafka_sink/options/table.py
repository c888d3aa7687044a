"""The table of all options of the sink: name, type, bounds, default, and what the option does.

The fields of SinkOptions are this table. The parser, the documentation and the hiding of secrets all read it.
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

    ``name`` is the name that users write, with ``kafka.`` if it has that prefix, and ``attribute`` is the
    field of SinkOptions. An option without a default is required. ``needs`` is another option and its value,
    as users write them, without which this option has no effect. ``planning_only`` is True if no task reads
    the option.
    """

    name: str
    kind: Kind
    default: Any
    group: str
    doc: str
    _: dataclasses.KW_ONLY
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


_OAUTH = "org.apache.kafka.common.security.oauthbearer"
_Row = ParamSpec("_Row")


def _fields_of(make: Callable[_Row, OptionSpec]) -> Callable[_Row, Any]:
    """Return a function with the same parameters that makes a field of SinkOptions with the row as
    metadata."""

    def make_field(*args: _Row.args, **kwargs: _Row.kwargs) -> Any:
        spec = make(*args, **kwargs)
        return field(default=spec.default, metadata={"spec": spec})

    return make_field


_option = _fields_of(OptionSpec)
DEFAULT_BREAKER = "kafka_sink.breaker.FailureRateCircuitBreaker"
BREAKER = "Circuit breaker"
# The options of every breaker class. Names are without their prefix.
_BREAKER_OPTIONS_OF_ALL = (
    OptionSpec(
        "class",
        values.string(),
        DEFAULT_BREAKER,
        BREAKER,
        "Dotted path of a subclass of `PartitionCircuitBreaker` that every executor can import. `none` "
        "disables the breaker. Your own class gets all options under this prefix.",
    ),
    OptionSpec(
        "mute.retry.interval",
        values.integer(100, LONG_MAX, why="a probe needs a round trip"),
        2_000,
        BREAKER,
        "Milliseconds from a mute, or from a failed probe, to the next probe. A broker is probed with a "
        "request without rows, a partition with one batch. A successful probe ends the mute. With the "
        "coordinator, the whole job sends one probe per interval.",
    ),
    OptionSpec(
        "muted.buffer.memory.perc",
        values.integer(1, 100),
        50,
        BREAKER,
        "Percentage of `kafka.buffer.memory` that rows for muted partitions may use. These are rows with a "
        "key or a partition column; keyless rows go to other partitions. Beyond this limit such rows wait, "
        "and the task waits once the other rows that arrived with them are appended.",
    ),
)
# The options of the default class, in the order of FailureRateSettings. Another class may use these names
# otherwise.
FAILURE_RATE_OPTIONS = (
    OptionSpec(
        "trigger.message.count",
        values.integer(1, LONG_MAX),
        1_000,
        BREAKER,
        "Minimum number of rows that must have been sent before failures can mute a partition. A row that is "
        "sent again counts once. With the coordinator, rows of all tasks count.",
    ),
    OptionSpec(
        "trigger.failure.perc",
        values.integer(1, 100),
        50,
        BREAKER,
        "Percentage of failed batches within the last 10 s at which a partition is muted. At least three "
        "batches must have failed, each sent after the previous failure was known. With the coordinator, the "
        "same percentage of the tasks that write to the partition must have seen failures.",
    ),
    OptionSpec(
        "slow.request.min.ms",
        values.integer(0, LONG_MAX),
        500,
        BREAKER,
        "A broker is muted when a request to it has had no response for this long and for "
        "`slow.request.factor` times the broker's usual latency. Nothing is muted while all brokers with "
        "requests are silent. `0` disables this. Before a broker's first response, the limit is "
        "`slow.request.factor` times the slowest first response of another broker, but between two and six "
        "times this value; it is six times this value while no broker has responded. It never exceeds half "
        "of `kafka.request.timeout.ms`. While a connection is being set up, the limit is "
        "`slow.request.factor` times the duration of this broker's last setup (or of the slowest other one), "
        "and at least four times this value. After a refused or lost connection it is this value.",
    ),
    OptionSpec(
        "slow.request.factor",
        values.integer(1),
        5,
        BREAKER,
        "Multiple of a broker's usual latency; see `slow.request.min.ms`.",
    ),
    OptionSpec(
        "enable.mute.inflight.full",
        values.boolean(),
        False,
        BREAKER,
        "Keyless rows of a task avoid a broker while the task has a request in flight to it. Requires "
        "`kafka.max.in.flight.requests.per.connection=1`. This is not a mute: the manager of a breaker class "
        "does not list such brokers as muted, and no metric, log line, probe or other task shows them.",
    ),
)
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

    The attributes have Kafka's names with underscores instead of dots. :func:`kafka_sink.options.parse`
    checks the options and creates instances; the constructor checks nothing. ``repr`` hides secrets.
    """

    # One row of the table takes few lines, so that it is read from left to right.
    # fmt: off
    topic: str | None = _option(
        "topic", values.topic(), None, TARGET,
        """Topic for all rows. It overrides a column `topic`. Without this option that column is required.""",
        planning_only=True,
    )
    topic_create: bool = _option(
        "topic.create", values.boolean(), False, TARGET,
        """Create the topic that `topic` names before any task starts, if it does not exist. An existing topic
        is not changed. This also turns `kafka.allow.auto.create.topics` off unless you set it, so that
        brokers do not create the topic with their own defaults.""", planning_only=True,
    )
    topic_partitions: int = _option(
        "topic.partitions", values.integer(1, 100_000, or_value=-1), -1, TARGET,
        """Partitions of a topic that `topic.create` creates; `-1` is the broker's `num.partitions`.""",
        needs="topic.create=true", planning_only=True,
    )
    topic_create_names: tuple[str, ...] = _option(
        "topic.create.names", values.topics(), (), TARGET,
        """Further topics that `topic.create` creates: those in a column `topic` of the rows. Topics that are
        not listed are left to the brokers.""", needs="topic.create=true", planning_only=True,
    )
    topic_replication_factor: int = _option(
        "topic.replication.factor", values.integer(1, 10_000, or_value=-1), -1, TARGET,
        """Replicas of a topic that `topic.create` creates; `-1` is the broker's
        `default.replication.factor`.""", needs="topic.create=true", planning_only=True,
    )
    bootstrap_servers: tuple[HostPort, ...] = _option(
        "kafka.bootstrap.servers", values.addresses(), dataclasses.MISSING, TARGET,
        """Brokers to contact first. List more than one, so that a job can start while one of them is
        down.""",
    )
    log_summary: bool = _option(
        "log.summary", values.boolean(), True, TARGET,
        """Log one line per job on the driver: rows, topics, time, rate, and retries if there were any. For a
        query: one line for the first micro-batch with rows and for each with trouble (skipped rows, retries,
        mutes, aborted transactions), and one line per minute that sums up the other micro-batches.""",
        planning_only=True,
    )
    client_id: str = _option(
        "kafka.client.id", values.string(), "", TARGET,
        """Client name. Brokers log it and apply quotas to it, and some take the client's zone from it.
        `${env:NAME}` is read from the environment of each executor. Only tasks with the same name share
        metadata and mutes.""",
    )

    client_rack: str = _option(
        "kafka.client.rack", values.string(), "", TARGET,
        """Rack or zone of the executors, with the same names as in the brokers' `broker.rack`. `${env:NAME}`
        is read from the environment of each executor.""",
    )

    acks: int = _option(
        "kafka.acks", values.choice({"all": -1, "-1": -1, "1": 1, "0": 0}), -1, DELIVERY,
        """Which replicas must have a row before it counts as written: all in-sync replicas (`all`, `-1`), the
        leader (`1`) or none (`0`). With `0`, rows are reported as unconfirmed, and errors of the broker are
        not noticed.""",
    )
    enable_idempotence: bool = _option(
        "kafka.enable.idempotence", values.boolean(), True, DELIVERY,
        """Retries neither duplicate rows nor change their order within a partition. (Keyless rows that leave
        a muted partition before they are sent follow newer rows in another one.) Requires `acks=all`,
        `retries` above 0 and at most 5 requests in flight. If one of these is set to another value,
        idempotence is disabled with a warning; if `true` was set explicitly, this is an error.""",
    )
    max_in_flight_requests_per_connection: int = _option(
        "kafka.max.in.flight.requests.per.connection", values.integer(1), 5, DELIVERY,
        """Maximum number of unacknowledged requests per broker. Without idempotence, a retry can reorder the
        rows of a partition if this is above 1.""",
    )
    retries: int = _option(
        "kafka.retries", values.integer(0), INT_MAX, DELIVERY,
        """How often a batch is sent again after a retriable error. Prefer to set `kafka.delivery.timeout.ms`,
        which limits the time spent on retries.""",
    )
    delivery_timeout_ms: int = _option(
        "kafka.delivery.timeout.ms", values.integer(0), 120_000, DELIVERY,
        """Maximum time from appending a row to its acknowledgement, including waits and retries. After that
        the task fails. Must be at least `kafka.linger.ms` + `kafka.request.timeout.ms`; if it is not set, it
        is raised to that sum.""",
    )
    request_timeout_ms: int = _option(
        "kafka.request.timeout.ms", values.integer(0), 30_000, DELIVERY,
        """How long to wait for a broker's response, from the last byte of the request that was written,
        before the request counts as failed.""",
    )
    retry_backoff_ms: int = _option(
        "kafka.retry.backoff.ms", values.integer(0, LONG_MAX), 100, DELIVERY,
        """Wait before the first retry of a failed request. It doubles with each retry, with 20 % jitter.""",
    )
    retry_backoff_max_ms: int = _option(
        "kafka.retry.backoff.max.ms", values.integer(0, LONG_MAX), 1_000, DELIVERY,
        """Maximum wait between retries. If it is below `kafka.retry.backoff.ms`, every wait has this
        length.""",
    )
    max_block_ms: int = _option(
        "kafka.max.block.ms", values.integer(0, LONG_MAX), 60_000, DELIVERY,
        """How long a task waits for buffer memory, for the metadata of a new topic, and for a partition that
        is in a row but not in the topic (it may just have been added, or the topic was recreated with fewer
        partitions). If `topic` is set, it also limits how long the start of a write waits for brokers.""",
    )

    max_rows_per_second: int = _option(
        "max.rows.per.second", values.integer(0, LONG_MAX), 0, RATE,
        """Maximum rate of rows of the whole job or query. The coordinator shares it fairly between tasks.
        Without a coordinator, the limit of each task is this number divided by the number of tasks that run
        at the same time. `0`: no limit.""",
    )
    max_bytes_per_second: int = _option(
        "max.bytes.per.second", values.integer(0, LONG_MAX), 0, RATE,
        """Maximum rate of bytes of the whole job or query, counted before compression. `0`: no limit.""",
    )

    errors_tolerance: str = _option(
        "errors.tolerance", values.words("none", "all"), "none", ERRORS,
        """What happens to a row that can never be written: it is too large, its partition does not exist, it
        has no valid topic or a header without a valid key, or its topic rejects it. `none`: the task fails.
        `all`: the row is skipped, counted in the summary, and written to `errors.deadletterqueue.topic.name`
        if that is set. Timeouts always fail the task.""",
    )
    errors_deadletterqueue_topic_name: str | None = _option(
        "errors.deadletterqueue.topic.name", values.topic(), None, ERRORS,
        """Topic for rows that can never be written, with the reason in the same headers as in Kafka Connect
        (`__connect.errors.*`). A row that is too large is cut, and headers `kafka-chunked.errors.*` contain
        the original lengths. Requires `errors.tolerance=all`. Without it, such rows are counted and their
        content is dropped. The topic must exist, unless brokers create topics or `topic.create=true`. Dead
        letters take at most 64 MiB in addition to `kafka.buffer.memory`, however many there are.""",
        needs="errors.tolerance=all",
    )
    errors_max: int = _option(
        "errors.max", values.integer(0, LONG_MAX, or_value=-1), 10_000, ERRORS,
        """Maximum number of rows that a task may skip. One more fails the task, so that a job does not skip
        everything. `-1`: no maximum. Requires `errors.tolerance=all`.""", needs="errors.tolerance=all",
    )

    delivery_guarantee: str = _option(
        "delivery.guarantee", values.words("at-least-once", "exactly-once"), "at-least-once", TRANSACTIONS,
        """With `exactly-once`, consumers with `isolation.level=read_committed` see each row of a batch
        exactly once, despite all failures and retries, and no row of a failed batch. Rows are written in
        transactions. This requires brokers of Kafka 3.8 or later. See docs/exactly-once.md.""",
    )
    transactional_id_prefix: str = _option(
        "transactional.id.prefix", values.string(), "", TRANSACTIONS,
        """Prefix of the transactional ids and of the consumer groups under which progress is recorded. Each
        `txnAppId` and topic, and each query of `df.writeStream` with the option `checkpointLocation`, gets
        its own names after this prefix. Each other query, and each job without `txnAppId` that runs at the
        same time as another one, needs its own prefix. If empty, names are derived from the query's
        checkpoint, from `txnAppId`, or otherwise from the application.""",
        needs="delivery.guarantee=exactly-once", planning_only=True,
    )
    transaction_progress_topic: str | None = _option(
        "transaction.progress.topic", values.topic(), None, TRANSACTIONS,
        """Topic for which progress is recorded as committed offsets; no rows are written to it. The default
        is the value of `topic`. Required if the topics are in a column. Progress is lost if this topic is
        deleted.""", needs="delivery.guarantee=exactly-once", planning_only=True,
    )
    transaction_timeout_ms: int = _option(
        "kafka.transaction.timeout.ms", values.integer(1), 900_000, TRANSACTIONS,
        """How long a transaction may stay open: from a task's first row until the driver commits the batch,
        including the time that a driver needs to restart after a crash. Brokers then abort it; until then,
        `read_committed` consumers wait for it. The maximum is the brokers' `transaction.max.timeout.ms`,
        whose default is used here. Tasks warn when half of this time has passed. For jobs that take longer
        see docs/exactly-once.md.""", kafka_default=60_000,
    )
    txn_app_id: str = _option(
        "txnAppId", values.string(), "", TRANSACTIONS,
        """Name of the application that writes version `txnVersion`, for `df.write` and `foreachBatch`. A
        version that has already been written is skipped. Versions are tracked for each value of the option
        `topic` separately; without it, each write needs its own `txnAppId`.""",
        needs="delivery.guarantee=exactly-once", planning_only=True,
    )
    txn_version: int = _option(
        "txnVersion", values.integer(0, LONG_MAX, or_value=-1), -1, TRANSACTIONS,
        """Version that a job writes. Versions may come in any order. In `foreachBatch`, use the batch id.""",
        needs="delivery.guarantee=exactly-once", planning_only=True,
    )
    transaction_rerun_compare: str = _option(
        "transaction.rerun.compare", values.words("content", "rows", "none"), "content", TRANSACTIONS,
        """What must be the same if a batch or version that has already been written is run again; otherwise
        the run fails. `content`: number, bytes and content of its rows. `rows`: their number, for queries
        that compute other values in each run (`uuid()`, `rand()`). `none`: nothing, so it is skipped in any
        case.""", needs="delivery.guarantee=exactly-once", planning_only=True,
    )

    batch_size: int = _option(
        "kafka.batch.size", values.integer(0), 524_288, BATCHING,
        """Target size of a record batch. A larger record gets its own batch. The default is larger than
        Kafka's because memory is allocated as data arrives, not per partition in advance. Half a MiB stays
        well below the brokers' default `message.max.bytes` of 1,048,588.""", kafka_default=16_384,
    )
    linger_ms: int = _option(
        "kafka.linger.ms", values.integer(0, LONG_MAX), 20, BATCHING,
        """How long a batch may wait for more rows. The default is longer than Kafka's because a Spark task
        sends bulk data: the latency of single rows does not matter, and fuller batches are faster.""",
        kafka_default=5,
    )
    buffer_memory: int = _option(
        "kafka.buffer.memory", values.integer(128, LONG_MAX), 67_108_864, BATCHING,
        """Memory per Python worker for rows that are not acknowledged yet. The default is twice Kafka's
        because a task sends bulk data.""", kafka_default=33_554_432,
    )
    buffer_memory_allocation_strategy: str = _option(
        "kafka.buffer.memory.allocation.strategy", values.words("incremental", "full", any_case=True),
        "incremental", BATCHING,
        """`incremental`: a batch allocates memory in chunks as rows arrive. `full`: it allocates
        `kafka.batch.size` when it is opened, as Kafka's producer does by default. Both send the same bytes.
        With `full`, rows that are not compressed yet may need memory in addition to that buffer: up to 64 KiB
        of a batch with lz4, 32 KiB with snappy, and all its rows with gzip and zstd. For all batches together
        this is at most `kafka.buffer.memory`; the metric `buffer-heap-bytes` counts it.""",
        kafka_default="full",
    )
    max_request_size: int = _option(
        "kafka.max.request.size", values.integer(0), 1_048_576, BATCHING,
        """Maximum size of a request and of an uncompressed record. A single batch may exceed it.""",
    )

    compression_type: CompressionType = _option(
        "kafka.compression.type", _CODECS, CompressionType.NONE, COMPRESSION,
        """Codec of the record batches.""",
    )
    compression_gzip_level: int = _option(
        "kafka.compression.gzip.level", values.integer(1, 9, or_value=-1), -1, COMPRESSION,
        """Level for gzip; `-1` is the library's own default.""",
    )
    compression_lz4_level: int = _option(
        "kafka.compression.lz4.level", values.integer(1, 17), 9, COMPRESSION,
        """Level for lz4. As in Kafka's producer, the default `9` selects the fast compressor, and any other
        level the high-compression one.""",
    )
    compression_zstd_level: int = _option(
        "kafka.compression.zstd.level", values.integer(-131_072, 22), 3, COMPRESSION,
        """Level for zstd. `1` takes less time than `3` and compresses nearly as well. Negative levels
        compress less; for most rows, lz4 is then the better choice.""",
    )

    partitioner_ignore_keys: bool = _option(
        "kafka.partitioner.ignore.keys", values.boolean(), False, PARTITIONER,
        """Ignore keys when choosing a partition.""",
    )
    partitioner_adaptive_partitioning_enable: bool = _option(
        "kafka.partitioner.adaptive.partitioning.enable", values.boolean(), True, PARTITIONER,
        """Send more keyless rows to partitions whose brokers respond faster.""",
    )
    partitioner_rack_aware: bool = _option(
        "kafka.partitioner.rack.aware", values.boolean(), False, PARTITIONER,
        """Keyless rows go to partitions whose leaders are in `kafka.client.rack`, as long as one is available
        and not muted (KIP-1123). It saves traffic between zones. The partitions of zones with more executors
        get more rows.""",
    )
    partitioner_availability_timeout_ms: int = _option(
        "kafka.partitioner.availability.timeout.ms", values.integer(0, LONG_MAX), 0, PARTITIONER,
        """Keyless rows avoid partitions whose broker has not accepted a batch for this long; `0` disables
        this.""",
    )

    partitioner_spread_keys_when_muted: bool = _option(
        "kafka.partitioner.spread.keys.when.muted", values.boolean(), False, PARTITIONER,
        """Send rows with keys to other partitions while the circuit breaker mutes theirs (KIP-693). Rows of
        one key can then be in several partitions, so their order is lost. With `false`, these rows wait for
        their partition and stay in order; if keys are spread over all partitions, the whole task waits. Rows
        with a partition column always keep their partition.""",
    )

    metadata_max_age_ms: int = _option(
        "kafka.metadata.max.age.ms", values.integer(0, LONG_MAX), 300_000, METADATA,
        """Age at which a topic's metadata is refreshed even if nothing suggests that it has changed.""",
    )
    metadata_max_idle_ms: int = _option(
        "kafka.metadata.max.idle.ms", values.integer(5_000, LONG_MAX), 300_000, METADATA,
        """Metadata of a topic is dropped if nothing was written to the topic for this long. The coordinator
        keeps it two minutes longer, because it may learn of a topic's use up to a minute late.""",
        aliases=("kafka.metadata.evict.ms",),
    )
    metadata_recovery_strategy: str = _option(
        "kafka.metadata.recovery.strategy", values.words("rebootstrap", "none", any_case=True), "rebootstrap",
        METADATA,
        """What to do when no known broker is available: start again from `kafka.bootstrap.servers`
        (`rebootstrap`), or keep trying the known brokers (`none`).""",
    )
    metadata_recovery_rebootstrap_trigger_ms: int = _option(
        "kafka.metadata.recovery.rebootstrap.trigger.ms", values.integer(0, LONG_MAX), 300_000, METADATA,
        """How long metadata may be unavailable before the client starts again from
        `kafka.bootstrap.servers`.""",
    )
    allow_auto_create_topics: bool = _option(
        "kafka.allow.auto.create.topics", values.boolean(), True, METADATA,
        """Allow brokers with `auto.create.topics.enable` to create a missing topic. Kafka's producer always
        allows this; here, `false` makes a missing topic an error. When a write starts, it looks up the topic
        in the option `topic`, which also creates it, and fails if it is still missing after 5 s.""",
    )

    connections_max_idle_ms: int = _option(
        "kafka.connections.max.idle.ms", values.integer(-1, LONG_MAX), 540_000, NETWORK,
        """Close connections that were idle for this long; `-1` disables this.""",
    )
    reconnect_backoff_ms: int = _option(
        "kafka.reconnect.backoff.ms", values.integer(0, LONG_MAX), 50, NETWORK,
        """Wait before reconnecting to a broker that could not be reached. It doubles with each failure, with
        20 % jitter. If it is set without `kafka.reconnect.backoff.max.ms`, the wait is constant.""",
    )
    reconnect_backoff_max_ms: int = _option(
        "kafka.reconnect.backoff.max.ms", values.integer(0, LONG_MAX), 1_000, NETWORK,
        """Maximum wait before reconnecting.""",
    )
    socket_connection_setup_timeout_ms: int = _option(
        "kafka.socket.connection.setup.timeout.ms", values.integer(0, LONG_MAX), 10_000, NETWORK,
        """How long setting up a connection may take. It doubles with each failure, with 20 % jitter.""",
    )
    socket_connection_setup_timeout_max_ms: int = _option(
        "kafka.socket.connection.setup.timeout.max.ms", values.integer(0, LONG_MAX), 30_000, NETWORK,
        """Maximum time for setting up a connection.""",
    )
    enable_metrics_push: bool = _option(
        "kafka.enable.metrics.push", values.boolean(), True, NETWORK,
        """Push the producer's metrics to brokers that ask for them (KIP-714). Brokers ask if a plugin
        receives such metrics and `kafka-client-metrics.sh` has configured which ones. Other brokers are sent
        nothing.""",
    )

    security_protocol: str = _option(
        "kafka.security.protocol", values.words(*values.PROTOCOLS, any_case=True), "PLAINTEXT", SECURITY,
        """Protocol for talking to brokers: plaintext or TLS (`SSL`), with or without a login (`SASL`).""",
    )
    ssl_truststore_type: str = _option(
        "kafka.ssl.truststore.type", values.words("JKS", "PKCS12", "PEM", any_case=True), "JKS", SECURITY,
        """Format of `kafka.ssl.truststore.location`. As in Java, `JKS` and `PKCS12` both read a PKCS12 file,
        which is what `keytool` has written since Java 9. A real JKS file is an error that shows the command
        to convert it.""",
    )
    ssl_truststore_location: str = _option(
        "kafka.ssl.truststore.location", values.text(), "", SECURITY,
        """File with the certificates of trusted authorities. It must exist on the driver and on every
        executor. If neither this nor an alternative is set, the system's authorities are trusted.""",
    )
    ssl_truststore_password: Secret | None = _option(
        "kafka.ssl.truststore.password", values.secret(), None, SECURITY,
        """Password of a PKCS12 truststore.""",
    )
    ssl_truststore_certificates: Secret | None = _option(
        "kafka.ssl.truststore.certificates", values.secret_lines(), None, SECURITY,
        """Trusted certificates as PEM text, with `kafka.ssl.truststore.type=PEM` (KIP-651).""",
        aliases=("kafka.ssl.ca.pem",),
    )
    ssl_ca_location: str = _option(
        "kafka.ssl.ca.location", values.text(), "", SECURITY,
        """PEM file with trusted certificates (librdkafka's name).""",
    )
    ssl_keystore_type: str = _option(
        "kafka.ssl.keystore.type", values.words("JKS", "PKCS12", "PEM", any_case=True), "JKS", SECURITY,
        """Format of `kafka.ssl.keystore.location`; see `kafka.ssl.truststore.type`.""",
    )
    ssl_keystore_location: str = _option(
        "kafka.ssl.keystore.location", values.text(), "", SECURITY,
        """File with this client's private key and certificate chain, for brokers that require them (mutual
        TLS). A PEM file contains both.""",
    )
    ssl_keystore_password: Secret | None = _option(
        "kafka.ssl.keystore.password", values.secret(), None, SECURITY,
        """Password of a PKCS12 keystore.""",
    )
    ssl_keystore_key: Secret | None = _option(
        "kafka.ssl.keystore.key", values.secret_lines(), None, SECURITY,
        """Private key as PEM text (PKCS#8 or older formats), with `kafka.ssl.keystore.type=PEM`. A file
        (`kafka.ssl.keystore.location`) is safer: Spark shows options in plans and logs unless
        `spark.redaction.regex` covers them (docs/security.md).""", aliases=("kafka.ssl.key.pem",),
    )
    ssl_keystore_certificate_chain: Secret | None = _option(
        "kafka.ssl.keystore.certificate.chain", values.secret_lines(), None, SECURITY,
        """Certificate chain of that key as PEM text, starting with this client's certificate.""",
        aliases=("kafka.ssl.certificate.pem",),
    )
    ssl_key_password: Secret | None = _option(
        "kafka.ssl.key.password", values.secret(), None, SECURITY,
        """Password of an encrypted private key.""",
    )
    ssl_key_location: str = _option(
        "kafka.ssl.key.location", values.text(), "", SECURITY,
        """PEM file with the private key (librdkafka's name).""",
    )
    ssl_certificate_location: str = _option(
        "kafka.ssl.certificate.location", values.text(), "", SECURITY,
        """PEM file with the certificate chain of that key (librdkafka's name).""",
    )
    ssl_endpoint_identification_algorithm: str = _option(
        "kafka.ssl.endpoint.identification.algorithm", values.words("https", "none", "", any_case=True),
        "https", SECURITY,
        """With `https`, a broker's certificate must match the host name or IP address of the connection.
        Empty (librdkafka: `none`) disables this check. Anyone with a certificate of a trusted authority can
        then impersonate a broker.""",
    )
    ssl_enabled_protocols: tuple[str, ...] = _option(
        "kafka.ssl.enabled.protocols", values.names(), ("TLSv1.2", "TLSv1.3"), SECURITY,
        """Enabled versions of TLS: `TLSv1.2`, `TLSv1.3`.""",
    )
    ssl_cipher_suites: tuple[str, ...] = _option(
        "kafka.ssl.cipher.suites", values.names(), (), SECURITY,
        """Enabled cipher suites, with Java's or OpenSSL's names. If empty, the suites that OpenSSL considers
        secure are enabled. Python always offers all suites of TLS 1.3; if a broker chooses one that is not
        enabled, the connection fails after the handshake.""",
    )
    sasl_mechanism: str = _option(
        "kafka.sasl.mechanism", values.words("GSSAPI", "PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512",
        "OAUTHBEARER", "AWS_MSK_IAM", any_case=True), "GSSAPI", SECURITY,
        """SASL mechanism for the login.""", aliases=("kafka.sasl.mechanisms",),
    )
    sasl_jaas_config: Secret | None = _option(
        "kafka.sasl.jaas.config", values.secret_lines(), None, SECURITY,
        """Login module and credentials, as for Java clients:
        `org.apache.kafka.common.security.plain.PlainLoginModule required username="u" password="p";`.
        `ScramLoginModule`, `OAuthBearerLoginModule`, `IAMLoginModule` and `Krb5LoginModule` are also
        supported, with or without Databricks' prefix `kafkashaded.`""",
    )
    sasl_username: str = _option(
        "kafka.sasl.username", values.text(), "", SECURITY,
        """User name for PLAIN and SCRAM, instead of `kafka.sasl.jaas.config`.""",
    )
    sasl_password: Secret | None = _option(
        "kafka.sasl.password", values.secret(), None, SECURITY,
        """Password for PLAIN and SCRAM, instead of `kafka.sasl.jaas.config`.""",
    )
    sasl_login_connect_timeout_ms: int = _option(
        "kafka.sasl.login.connect.timeout.ms", values.integer(1), 10_000, SECURITY,
        """How long to wait for a connection to the token endpoint. Kafka sets no limit.""",
        kafka_default=None,
    )
    sasl_login_read_timeout_ms: int = _option(
        "kafka.sasl.login.read.timeout.ms", values.integer(1), 10_000, SECURITY,
        """How long to wait for the token endpoint's response. Kafka sets no limit.""", kafka_default=None,
    )
    sasl_login_retry_backoff_ms: int = _option(
        "kafka.sasl.login.retry.backoff.ms", values.integer(0, LONG_MAX), 100, SECURITY,
        """Wait before a failed request to the token endpoint is retried. It doubles with each failure.""",
    )
    sasl_login_retry_backoff_max_ms: int = _option(
        "kafka.sasl.login.retry.backoff.max.ms", values.integer(0, LONG_MAX), 10_000, SECURITY,
        """Maximum wait between retries of a request to the token endpoint. The last failure is reported when
        the connection setup times out.""",
    )
    sasl_login_refresh_window_factor: float = _option(
        "kafka.sasl.login.refresh.window.factor", values.real(0.5, 1.0), 0.8, SECURITY,
        """Share of a token's lifetime after which a new one is fetched.""",
    )
    sasl_login_refresh_window_jitter: float = _option(
        "kafka.sasl.login.refresh.window.jitter", values.real(0.0, 0.25), 0.05, SECURITY,
        """Maximum random share of the lifetime that is added to the refresh window.""",
    )
    sasl_login_refresh_min_period_seconds: int = _option(
        "kafka.sasl.login.refresh.min.period.seconds", values.integer(0, 900), 60, SECURITY,
        """Minimum age at which a token is renewed, unless it would expire first.""",
    )
    sasl_login_refresh_buffer_seconds: int = _option(
        "kafka.sasl.login.refresh.buffer.seconds", values.integer(0, 3600), 300, SECURITY,
        """Renew a token at least this long before it expires, if its lifetime allows.""",
    )
    sasl_oauthbearer_token_endpoint_url: str = _option(
        "kafka.sasl.oauthbearer.token.endpoint.url", values.text(), "", SECURITY,
        """URL from which OAUTHBEARER fetches tokens (KIP-768). `file:///path` reads the token from a file
        instead, and again when the file changes.""",
    )
    sasl_oauthbearer_client_credentials_client_id: str = _option(
        "kafka.sasl.oauthbearer.client.credentials.client.id", values.text(), "", SECURITY,
        """Client id for the token endpoint. Alternative: `clientId` in `kafka.sasl.jaas.config`.""",
        aliases=("kafka.sasl.oauthbearer.client.id",),
    )
    sasl_oauthbearer_client_credentials_client_secret: Secret | None = _option(
        "kafka.sasl.oauthbearer.client.credentials.client.secret", values.secret(), None, SECURITY,
        """Client secret for the token endpoint. Alternative: `clientSecret` in `kafka.sasl.jaas.config`.""",
        aliases=("kafka.sasl.oauthbearer.client.secret",),
    )
    sasl_oauthbearer_scope: str = _option(
        "kafka.sasl.oauthbearer.scope", values.text(), "", SECURITY,
        """Scope of the token. Alternative: `scope` in `kafka.sasl.jaas.config`.""",
    )
    sasl_oauthbearer_header_urlencode: bool = _option(
        "kafka.sasl.oauthbearer.header.urlencode", values.boolean(), False, SECURITY,
        """URL-encode id and secret in the Authorization header (RFC 6749, 2.3.1).""",
    )
    sasl_oauthbearer_jwt_retriever_class: str = _option(
        "kafka.sasl.oauthbearer.jwt.retriever.class", values.text(), f"{_OAUTH}.DefaultJwtRetriever",
        SECURITY,
        """How tokens are fetched, as the name of the Java class that does the same. `DefaultJwtRetriever`:
        from a file or with client credentials, depending on the URL. `ClientCredentialsJwtRetriever`: with a
        client id and its secret, or with an assertion in place of the secret (KIP-1258).
        `JwtBearerJwtRetriever`: with an assertion as the grant itself (KIP-1139). `FileJwtRetriever`: from a
        file.""",
    )
    sasl_oauthbearer_assertion_file: str = _option(
        "kafka.sasl.oauthbearer.assertion.file", values.text(), "", SECURITY,
        """File with an assertion: a JWT that another program signs and renews. It must exist on the driver
        and on every executor. As in Java, the other options of assertions are then ignored.""",
    )
    sasl_oauthbearer_assertion_private_key_file: str = _option(
        "kafka.sasl.oauthbearer.assertion.private.key.file", values.text(), "", SECURITY,
        """PEM file with the private key that signs assertions. It must exist on the driver and on every
        executor, and is read for each token, so that it may be replaced.""",
    )
    sasl_oauthbearer_assertion_private_key_passphrase: Secret | None = _option(
        "kafka.sasl.oauthbearer.assertion.private.key.passphrase", values.secret(), None, SECURITY,
        """Passphrase of the private key that signs assertions, if it is encrypted.""",
    )
    sasl_oauthbearer_assertion_algorithm: str = _option(
        "kafka.sasl.oauthbearer.assertion.algorithm", values.words("RS256", "ES256", any_case=True), "RS256",
        SECURITY,
        """How assertions are signed: RS256 with an RSA key, ES256 with a key of the curve P-256.""",
    )
    sasl_oauthbearer_assertion_claim_iss: str = _option(
        "kafka.sasl.oauthbearer.assertion.claim.iss", values.text(), "", SECURITY,
        """Claim `iss` of assertions: their issuer, usually the client id. If this or
        `kafka.sasl.oauthbearer.assertion.file` is set, the client authenticates with an assertion, otherwise
        with its secret.""",
    )
    sasl_oauthbearer_assertion_claim_sub: str = _option(
        "kafka.sasl.oauthbearer.assertion.claim.sub", values.text(), "", SECURITY,
        """Claim `sub` of assertions: their subject, usually the client id.""",
    )
    sasl_oauthbearer_assertion_claim_aud: str = _option(
        "kafka.sasl.oauthbearer.assertion.claim.aud", values.text(), "", SECURITY,
        """Claim `aud` of assertions: their recipient, usually the token endpoint's URL.""",
    )
    sasl_oauthbearer_assertion_claim_exp_seconds: int = _option(
        "kafka.sasl.oauthbearer.assertion.claim.exp.seconds", values.integer(0, 86_400), 300, SECURITY,
        """How long an assertion is valid; it determines the claim `exp`.""",
    )
    sasl_oauthbearer_assertion_claim_nbf_seconds: int = _option(
        "kafka.sasl.oauthbearer.assertion.claim.nbf.seconds", values.integer(0, 3600), 60, SECURITY,
        """How long before its creation an assertion is already valid, because clocks differ; it determines
        the claim `nbf`.""",
    )
    sasl_oauthbearer_assertion_claim_jti_include: bool = _option(
        "kafka.sasl.oauthbearer.assertion.claim.jti.include", values.boolean(), False, SECURITY,
        """Give each assertion its own id, the claim `jti`.""",
    )
    sasl_oauthbearer_assertion_template_file: str = _option(
        "kafka.sasl.oauthbearer.assertion.template.file", values.text(), "", SECURITY,
        """JSON file with further headers and claims of assertions: `{"header": {"kid": "k1"}, "payload":
        {"team": "etl"}}`. It must exist on the driver and on every executor.""",
    )
    sasl_oauthbearer_token_provider: str = _option(
        "sasl.oauthbearer.token.provider", values.text(), "", SECURITY,
        """Dotted path of a Python function without parameters that returns a token for OAUTHBEARER: either
        the token as text, or a pair of the token and its expiry time in seconds since 1970. Driver and
        executors must be able to import it.""",
    )
    sasl_kerberos_service_name: str = _option(
        "kafka.sasl.kerberos.service.name", values.text(), "", SECURITY,
        """Kerberos service name of the brokers, usually `kafka`. Alternative: `serviceName` in
        `kafka.sasl.jaas.config`.""",
    )

    value_format: str = _option(
        "value.format", values.words(*values.FORMATS), "bytes", FORMATS,
        """How the value becomes bytes. `bytes`: the column `value` is a string or binary, and is sent as it
        is. `avro`, `protobuf` and `json`: the sink encodes the column `value` with a schema from the
        registry, in the form that Confluent's deserializers read. Without a column `value`, the value is a
        record of all columns that the sink does not use otherwise. See docs/schema-registry.md.""",
    )
    key_format: str = _option(
        "key.format", values.words(*values.FORMATS), "bytes", FORMATS,
        """Like `value.format`, for the column `key`.""",
    )
    schema_registry_url: str = _option(
        "schema.registry.url", values.urls(), "", FORMATS,
        """Addresses of the schema registry, separated by commas. Only the driver connects to it, once for
        each job or query, so executors need no access to it.""",
    )
    value_subject_name_strategy: str = _option(
        "value.subject.name.strategy", values.strategy(), "TopicNameStrategy", FORMATS,
        """Subject under which the schema of values is registered: `TopicNameStrategy` (the topic and
        `-value`), `RecordNameStrategy` (the record's full name) or `TopicRecordNameStrategy` (both, with `-`
        between them). The names of the Java classes are also accepted.""",
    )
    key_subject_name_strategy: str = _option(
        "key.subject.name.strategy", values.strategy(), "TopicNameStrategy", FORMATS,
        """Like `value.subject.name.strategy`, for keys, with `-key`.""",
    )
    value_schema: str = _option(
        "value.schema", values.text(), "", FORMATS,
        """Schema of values as text; for `protobuf` the text of a .proto file, or a descriptor in Base64. If
        empty, the schema is derived from the columns (not for `protobuf`), unless `use.latest.version`,
        `value.schema.id` or `value.schema.version` selects a registered one. Columns are matched with the
        schema's fields by name.""",
    )
    key_schema: str = _option(
        "key.schema", values.text(), "", FORMATS,
        """Like `value.schema`, for keys.""",
    )
    value_schema_id: int = _option(
        "value.schema.id", values.integer(0, or_value=-1), -1, FORMATS,
        """Use the registered schema with this id for values; nothing is registered. `-1`: not set.""",
        aliases=("use.schema.id",),
    )
    key_schema_id: int = _option(
        "key.schema.id", values.integer(0, or_value=-1), -1, FORMATS,
        """Like `value.schema.id`, for keys.""",
    )
    value_schema_version: int = _option(
        "value.schema.version", values.integer(1, or_value=-1), -1, FORMATS,
        """Use this version of the subject for values; nothing is registered. `-1`: not set.""",
    )
    key_schema_version: int = _option(
        "key.schema.version", values.integer(1, or_value=-1), -1, FORMATS,
        """Like `value.schema.version`, for keys.""",
    )
    value_record_name: str = _option(
        "value.record.name", values.string(), "topLevelRecord", FORMATS,
        """Full name, with its namespace, of the record in a derived schema of values. The default is the name
        that Spark's `to_avro` and ABRiS use. For `protobuf`: the message of the schema to use; by default its
        first one.""",
    )
    key_record_name: str = _option(
        "key.record.name", values.string(), "topLevelRecord", FORMATS,
        """Like `value.record.name`, for keys.""",
    )
    auto_register_schemas: bool = _option(
        "auto.register.schemas", values.boolean(), True, FORMATS,
        """Register the schema if its subject does not have it yet. With `false`, a schema that is not
        registered is an error.""",
    )
    use_latest_version: bool = _option(
        "use.latest.version", values.boolean(), False, FORMATS,
        """Use the newest version of the subject; nothing is registered. The columns must match it.""",
    )
    normalize_schemas: bool = _option(
        "normalize.schemas", values.boolean(), False, FORMATS,
        """Let the registry normalize schemas before it compares them.""",
    )
    schema_id_location: str = _option(
        "schema.id.location", values.words("prefix", "header"), "prefix", FORMATS,
        """Where a record contains the id of its schema: in five bytes before the value (`prefix`), or in the
        header `__value_schema_id` or `__key_schema_id` (`header`), which newer deserializers read. The header
        contains the schema's GUID, or its id if the registry has no GUIDs (only Confluent Platform 8 has
        them).""",
    )
    schema_registry_topics: tuple[str, ...] = _option(
        "schema.registry.topics", values.names(), (), FORMATS,
        """The topics in a column `topic` of the rows. Their subjects are looked up when the write starts. A
        row for another topic can never be written. This option is not needed with `RecordNameStrategy` or a
        schema's id.""",
    )
    schema_registry_timeout_ms: int = _option(
        "schema.registry.timeout.ms", values.integer(1), 30_000, FORMATS,
        """How long a write waits for the registry when it starts, including all retries.""",
    )
    schema_registry_basic_auth_user_info: Secret | None = _option(
        "schema.registry.basic.auth.user.info", values.secret(), None, FORMATS,
        """`user:password` for the registry; on Confluent Cloud the key and secret of an API key.""",
        aliases=("basic.auth.user.info",),
    )
    schema_registry_bearer_auth_token: Secret | None = _option(
        "schema.registry.bearer.auth.token", values.secret(), None, FORMATS,
        """Token for the registry.""", aliases=("bearer.auth.token",),
    )
    schema_registry_bearer_auth_logical_cluster: str = _option(
        "schema.registry.bearer.auth.logical.cluster", values.string(), "", FORMATS,
        """Logical cluster of the registry on Confluent Cloud, for a token.""",
        aliases=("bearer.auth.logical.cluster",),
    )
    schema_registry_bearer_auth_identity_pool_id: str = _option(
        "schema.registry.bearer.auth.identity.pool.id", values.string(), "", FORMATS,
        """Identity pool on Confluent Cloud, for a token.""", aliases=("bearer.auth.identity.pool.id",),
    )
    schema_registry_bearer_auth_issuer_endpoint_url: str = _option(
        "schema.registry.bearer.auth.issuer.endpoint.url", values.url(), "", FORMATS,
        """URL of the token endpoint that issues tokens for the registry (OAuth client credentials).""",
        aliases=("bearer.auth.issuer.endpoint.url",),
    )
    schema_registry_bearer_auth_client_id: str = _option(
        "schema.registry.bearer.auth.client.id", values.string(), "", FORMATS,
        """Client id for the registry's token endpoint.""", aliases=("bearer.auth.client.id",),
    )
    schema_registry_bearer_auth_client_secret: Secret | None = _option(
        "schema.registry.bearer.auth.client.secret", values.secret(), None, FORMATS,
        """Client secret for the registry's token endpoint.""", aliases=("bearer.auth.client.secret",),
    )
    schema_registry_bearer_auth_scope: str = _option(
        "schema.registry.bearer.auth.scope", values.string(), "", FORMATS,
        """Scope of the tokens for the registry.""", aliases=("bearer.auth.scope",),
    )
    schema_registry_ssl_ca_location: str = _option(
        "schema.registry.ssl.ca.location", values.text(), "", FORMATS,
        """PEM file on the driver with the certificates of the authorities that are trusted for the registry.
        If empty, the system's authorities are trusted.""",
    )
    schema_registry_ssl_certificate_location: str = _option(
        "schema.registry.ssl.certificate.location", values.text(), "", FORMATS,
        """PEM file on the driver with this client's certificate, for a registry that requires one.""",
    )
    schema_registry_ssl_key_location: str = _option(
        "schema.registry.ssl.key.location", values.text(), "", FORMATS,
        """PEM file on the driver with the private key of that certificate.""",
    )
    schema_registry_ssl_key_password: Secret | None = _option(
        "schema.registry.ssl.key.password", values.secret(), None, FORMATS,
        """Password of this private key.""",
    )

    coordinator_enabled: bool = _option(
        "coordinator.enabled", values.boolean(), True, COORDINATOR,
        """Run one process on the driver's host that fetches metadata once for all tasks. Without it, or if
        tasks cannot reach it, each task fetches its own. An administrator can disable it for all jobs with
        `KAFKA_CHUNKED_COORDINATOR_ENABLED=false` in the driver's environment or
        `spark.kafka-chunked.coordinator.enabled=false` in Spark's configuration.""", planning_only=True,
    )
    coordinator_port: int = _option(
        "coordinator.port", values.integer(0, 65_535), 0, COORDINATOR,
        """Port on which the coordinator listens; `0` selects a free one. The first write of an application
        sets it. `KAFKA_CHUNKED_COORDINATOR_PORT` and `spark.kafka-chunked.coordinator.port` override it.""",
        planning_only=True,
    )
    coordinator_bind_address: str = _option(
        "coordinator.bind.address", values.string(), "", COORDINATOR,
        """Address on which the coordinator listens. If empty, the driver's address: the first of
        `spark.driver.bindAddress`, `spark.driver.host`, SPARK_LOCAL_IP and this host's own address that is
        set. Tasks connect to `spark.driver.host`. `KAFKA_CHUNKED_COORDINATOR_BIND_ADDRESS` and
        `spark.kafka-chunked.coordinator.bind.address` override it.""", planning_only=True,
    )

    ui_port: int = _option(
        "ui.port", values.integer(0, 65_535, or_value=-1), -1, LIVE_VIEW,
        """Port of the live view, which the coordinator serves on the driver's host: a page at `/`, and
        metrics for Prometheus at `/metrics`. `0` selects a free port; the address is logged. `-1`: no live
        view. It shows all writes of the application from then on. `KAFKA_CHUNKED_UI_PORT` and
        `spark.kafka-chunked.ui.port` override it.""", planning_only=True,
    )
    ui_bind_address: str = _option(
        "ui.bind.address", values.string(), "127.0.0.1", LIVE_VIEW,
        """Address on which the live view listens. Anyone who can connect sees the names of topics, brokers
        and hosts, and numbers, but no rows and no secrets. There is no login. `KAFKA_CHUNKED_UI_BIND_ADDRESS`
        and `spark.kafka-chunked.ui.bind.address` override it.""", planning_only=True,
    )
    delivery_report_path: str = _option(
        "delivery.report.path", values.text(), "", LIVE_VIEW,
        """Absolute path of a file on the driver's host. Each job or micro-batch appends one line of JSON with
        the offsets that it wrote to each partition. See docs/metrics.md.""", planning_only=True,
    )

    # This is not a row of the table: the breaker class checks the options under
    # kafka.producer.circuit.breaker.
    breaker: BreakerSettings = BreakerSettings()
    # Nor are the settings of a topic, under topic.config: brokers check them.
    topic_config: tuple[tuple[str, str], ...] = ()
    # The attributes that the job set, separated by commas; none that only follow from other options. Writes
    # that differ in this alone have equal options.
    given: str = field(default="", compare=False, repr=False)

    # fmt: on

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
        """The options that the job set to another value than the default, as users write them.

        The live view shows them.

        Addresses of brokers, logins, certificates and queries of URLs are left out.
        """
        return {
            spec.name: values.without_query(text) if "://" in (text := spec.kind.show(value)) else text
            for spec in SPECS
            if not (spec.secret or spec.required or spec.group == SECURITY)
            and spec.attribute in self.given.split(",")
            and (value := getattr(self, spec.attribute)) != spec.default
        }

    def identity_of_cluster(self) -> dict[str, str]:
        """The options that determine the cluster, the login, and what tasks share, as users write them.

        Writes with equal options here share the coordinator's state of the cluster. Options that only set a
        client's name or its timeouts are left out. Secrets are included.
        """
        sorted_ = dataclasses.replace(self, bootstrap_servers=tuple(sorted(set(self.bootstrap_servers))))
        written = sorted_._written(
            lambda spec: spec.required or (is_of_cluster(spec) and not _NAMES_OR_TIMES.match(spec.name))
        )
        written.update((f"{KAFKA_PREFIX}{BREAKER_PREFIX}{name}", text) for name, text in self.breaker.given)
        return written

    def group_settings(self) -> dict[str, str]:
        """The options that the coordinator reads, as users write them and ``parse`` expects. None of them is
        secret."""
        written = self._written(lambda spec: spec.name in GROUP_OPTIONS)
        given = ((f"{KAFKA_PREFIX}{BREAKER_PREFIX}{name}", text) for name, text in self.breaker.given)
        written.update((name, text) for name, text in given if name in GROUP_OPTIONS)
        return written

    def principal(self) -> dict[str, str]:
        """The security options, which determine as whom and how the sink connects. Secrets are included."""
        return self._written(lambda spec: spec.group == SECURITY and not _NAMES_OR_TIMES.match(spec.name))

    def _written(self, is_wanted: Callable[[OptionSpec], bool]) -> dict[str, str]:
        return HiddenValues(
            (spec.name, spec.kind.show(getattr(self, spec.attribute)))
            for spec in SPECS
            if is_wanted(spec) and getattr(self, spec.attribute) != spec.default
        )

    def redacted(self) -> dict[str, str]:
        """The settings that differ from their defaults, by the names that users write, with secrets
        hidden."""
        shown = {}
        for spec in SPECS:
            value = getattr(self, spec.attribute)
            if value != spec.default:
                shown[spec.name] = HIDDEN if spec.secret else spec.kind.show(value)
        shown.update((f"{TOPIC_CONFIG_PREFIX}{name}", text) for name, text in self.topic_config)
        # A user's breaker class may have credentials as options, and it does not declare which of them are
        # secret.
        shown.update((f"{KAFKA_PREFIX}{BREAKER_PREFIX}{name}", HIDDEN) for name, _ in self.breaker.given)
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
    dataclasses.replace(field.metadata["spec"], attribute=field.name)
    for field in dataclasses.fields(SinkOptions)
    if "spec" in field.metadata
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
    *(f"{KAFKA_PREFIX}{BREAKER_PREFIX}{option.name}" for option in BREAKER_OPTIONS),
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
