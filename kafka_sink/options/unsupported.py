"""Kafka's options that this sink does not implement, and how it treats each of them.

Together with the table of SinkOptions, these are all options of ``ProducerConfig``, ``ConsumerConfig`` and
``AdminClientConfig`` in Kafka 4.4. The defaults are Kafka's. A value that equals the default is always
accepted.
"""

from __future__ import annotations

from collections.abc import Mapping

_JVM = "it configures the Java client"
_TICKETS = "each connection takes its Kerberos ticket from the ticket cache or a keytab"
_OPENSSL = "it selects a Java implementation; this sink uses OpenSSL"
_BROKER_SIDE = "it configures how brokers validate tokens"
_RESOLVED = "this sink resolves the names again at each attempt to connect"
_COMPARED = "this sink compares the cluster ids that brokers send"
_TRIES_ALL = "this sink tries all addresses of a name"
_SIZED_BY_SYSTEM = "the operating system sizes the buffers of connections"
_ENABLED_VERSIONS = "`kafka.ssl.enabled.protocols` selects the versions of TLS"

# (Kafka's default, why the option has no effect). The sink sends the same rows with and without them. One
# warning lists the options that are set to another value.
WITHOUT_EFFECT: Mapping[str, tuple[str, str]] = {
    "interceptor.classes": ("", "this sink runs no interceptors"),
    "metric.reporters": ("org.apache.kafka.common.metrics.JmxReporter", _JVM),
    "metrics.num.samples": ("2", _JVM),
    "metrics.recording.level": ("INFO", _JVM),
    "metrics.sample.window.ms": ("30000", _JVM),
    # Kafka 4.0 removed this option, but older jobs still set it.
    "auto.include.jmx.reporter": ("true", _JVM),
    "bootstrap.resolve.timeout.ms": ("0", _RESOLVED),
    "client.dns.lookup": ("use_all_dns_ips", _TRIES_ALL),
    "metadata.cluster.check.enable": ("true", _COMPARED),
    "receive.buffer.bytes": ("32768", _SIZED_BY_SYSTEM),
    "send.buffer.bytes": ("131072", _SIZED_BY_SYSTEM),
    "sasl.kerberos.kinit.cmd": ("/usr/bin/kinit", _TICKETS),
    "sasl.kerberos.min.time.before.relogin": ("60000", _TICKETS),
    "sasl.kerberos.ticket.renew.jitter": ("0.05", _TICKETS),
    "sasl.kerberos.ticket.renew.window.factor": ("0.8", _TICKETS),
    "sasl.oauthbearer.allow.unverified.audience": ("false", _BROKER_SIDE),
    "sasl.oauthbearer.allow.unverified.issuer": ("false", _BROKER_SIDE),
    "sasl.oauthbearer.clock.skew.seconds": ("30", _BROKER_SIDE),
    "sasl.oauthbearer.expected.audience": ("", _BROKER_SIDE),
    "sasl.oauthbearer.expected.issuer": ("", _BROKER_SIDE),
    "sasl.oauthbearer.jwks.endpoint.refresh.ms": ("3600000", _BROKER_SIDE),
    "sasl.oauthbearer.jwks.endpoint.retry.backoff.max.ms": ("10000", _BROKER_SIDE),
    "sasl.oauthbearer.jwks.endpoint.retry.backoff.ms": ("100", _BROKER_SIDE),
    "sasl.oauthbearer.jwks.endpoint.url": ("", _BROKER_SIDE),
    "sasl.oauthbearer.scope.claim.name": ("scope", _BROKER_SIDE),
    "sasl.oauthbearer.sub.claim.name": ("sub", _BROKER_SIDE),
    "ssl.keymanager.algorithm": ("SunX509", _OPENSSL),
    "ssl.protocol": ("TLSv1.3", _ENABLED_VERSIONS),
    "ssl.secure.random.implementation": ("", _OPENSSL),
    "ssl.trustmanager.algorithm": ("PKIX", _OPENSSL),
}

# Options of Kafka's consumer and admin clients that its producer does not have. They are listed in the same
# warning, because jobs that read and write Kafka share their options.
OF_OTHER_CLIENTS = frozenset(
    {
        *("auto.commit.interval.ms", "auto.offset.reset", "bootstrap.controllers", "check.crcs"),
        *("default.api.timeout.ms", "enable.auto.commit", "exclude.internal.topics", "fetch.max.bytes"),
        *("fetch.max.wait.ms", "fetch.min.bytes", "group.id", "group.instance.id", "group.protocol"),
        *("group.remote.assignor", "heartbeat.interval.ms", "isolation.level", "key.deserializer"),
        *("max.partition.fetch.bytes", "max.poll.interval.ms", "max.poll.records"),
        *("partition.assignment.strategy", "session.timeout.ms", "share.acknowledgement.mode"),
        *("share.acquire.mode", "value.deserializer"),
    }
)

# The options of librdkafka, on which confluent-kafka is built, that Kafka's Java client calls otherwise.
OF_LIBRDKAFKA: Mapping[str, str] = {
    "message.max.bytes": "max.request.size",
    "message.send.max.retries": "retries",
    "message.timeout.ms": "delivery.timeout.ms",
    "metadata.broker.list": "bootstrap.servers",
    "queue.buffering.max.kbytes": "buffer.memory",
    "queue.buffering.max.ms": "linger.ms",
    "request.required.acks": "acks",
    "socket.timeout.ms": "request.timeout.ms",
}

_JVM_CLASS = "selects a Java class, which this sink cannot run"
_TOKEN_FUNCTION = f"{_JVM_CLASS}: for OAUTHBEARER, sasl.oauthbearer.token.provider takes a Python function"

# Setting these options to another value is an error: ignoring them would change where rows go, who can read
# them in transit, or what is guaranteed.
NOT_SUPPORTED: Mapping[str, tuple[str, str]] = {
    "key.serializer": ("", "is not supported: remove it; the column 'key' is sent as it is"),
    "value.serializer": ("", "is not supported: remove it; the column 'value' is sent as it is"),
    "partitioner.class": (
        "",
        f"{_JVM_CLASS}: compute the partition in a column 'partition' instead",
    ),
    "config.providers": ("", "is not supported: set the values themselves"),
    "security.providers": ("", _JVM_CLASS),
    "enable.ssl.certificate.verification": (
        "true",
        "cannot be false: set kafka.ssl.truststore.location to a file with the brokers' certificates",
    ),
    "sasl.client.callback.handler.class": ("", _TOKEN_FUNCTION),
    "sasl.login.callback.handler.class": ("", _TOKEN_FUNCTION),
    "sasl.login.class": ("", _JVM_CLASS),
    "sasl.oauthbearer.jwt.validator.class": (
        "org.apache.kafka.common.security.oauthbearer.DefaultJwtValidator",
        _JVM_CLASS,
    ),
    "ssl.engine.factory.class": ("", _JVM_CLASS),
    "ssl.provider": ("", f"{_JVM_CLASS}: remove it"),
    "transactional.id": (
        "",
        "is not supported: set delivery.guarantee=exactly-once and transactional.id.prefix",
    ),
    "transaction.two.phase.commit.enable": (
        "false",
        "is not supported: Kafka's brokers do not implement it completely yet (KIP-939)",
    ),
}

# Classes whose work this sink does itself, so that the options above may name them.
_OWN_CLASSES = frozenset(
    {
        "software.amazon.msk.auth.iam.IAMClientCallbackHandler",
        "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginCallbackHandler",
        "org.apache.kafka.common.security.oauthbearer.secured.OAuthBearerLoginCallbackHandler",
    }
)

# The prefixes of options whose names a user completes.
PREFIXES = ("config.providers.", "metrics.context.")

# Databricks ships Kafka's classes under this prefix, so its users write it in their options.
SHADED = "kafkashaded."
# Options that Spark or .save(path) adds. Spark's own Kafka sink also ignores them. Only a path has a warning.
SPARK_OWN = frozenset({"path", "paths", "checkpointlocation", "queryname", "includeheaders"})


def refusal(name: str, text: str) -> str | None:
    """Why this sink refuses Kafka's option with this value; None if it accepts or ignores it."""
    default, reason = NOT_SUPPORTED.get(_in_table(name), (text, ""))
    # Spark's sink refuses the serializers themselves, not a value of them.
    if name in ("key.serializer", "value.serializer"):
        return reason
    is_accepted = same_setting(text, default) or text.removeprefix(SHADED) in _OWN_CLASSES
    return None if is_accepted else reason


def is_ineffective(name: str, text: str) -> bool:
    """Whether Kafka's option has no effect here although the job sets it to another value than the
    default."""
    if _in_table(name) in NOT_SUPPORTED:
        return False
    return name not in WITHOUT_EFFECT or not same_setting(text, WITHOUT_EFFECT[name][0])


def _in_table(name: str) -> str:
    """The name with which the table lists the option."""
    return "config.providers" if name.startswith("config.providers.") else name


def same_setting(text: str, default: str) -> bool:
    """Whether a value equals Kafka's default. Case, and spaces in lists, do not matter."""

    def plain(value: str) -> list[str]:
        return [part.strip().lower() for part in value.split(",")]

    return plain(text) == plain(default)
