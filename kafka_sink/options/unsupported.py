"""Kafka producer options that this sink does not implement, and what becomes of each.

Together with the table of SinkOptions these are all options of Kafka 4.3's ``ProducerConfig``; the defaults
are Kafka's. A value equal to the default asks for nothing and is always accepted.
"""

from __future__ import annotations

from collections.abc import Mapping

_JVM = "it is about the Java client itself"
_TICKETS = "Kerberos tickets are taken from the ticket cache, or by keytab, when a connection needs one"
_OPENSSL = "OpenSSL does what this chooses in Java"
_BROKER_SIDE = "it is for the checks that brokers make of a token"

# (Kafka's default, why it has no effect). They change nothing about what is sent, or to whom: one warning
# names those set to something else.
WITHOUT_EFFECT: Mapping[str, tuple[str, str]] = {
    "enable.metrics.push": ("true", _JVM),
    "interceptor.classes": ("", _JVM),
    "metric.reporters": ("org.apache.kafka.common.metrics.JmxReporter", _JVM),
    "metrics.num.samples": ("2", _JVM),
    "metrics.recording.level": ("INFO", _JVM),
    "metrics.sample.window.ms": ("30000", _JVM),
    # Named by jobs written for clients older than 4.0, where they were still options or had become inert.
    "auto.include.jmx.reporter": ("true", _JVM),
    "sasl.kerberos.kinit.cmd": ("/usr/bin/kinit", _TICKETS),
    "sasl.kerberos.min.time.before.relogin": ("60000", _TICKETS),
    "sasl.kerberos.ticket.renew.jitter": ("0.05", _TICKETS),
    "sasl.kerberos.ticket.renew.window.factor": ("0.8", _TICKETS),
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
    "ssl.secure.random.implementation": ("", _OPENSSL),
    "ssl.trustmanager.algorithm": ("PKIX", _OPENSSL),
}

_JVM_CLASS = "names a Java class, which cannot run in this sink"

_OAUTH = "org.apache.kafka.common.security.oauthbearer"
_NO_ASSERTION = (
    "is not supported: tokens are fetched by client credentials, read from a file, or come from a function "
    "of yours (sasl.oauthbearer.token.provider)"
)

# Options whose loss would change where rows go, who can read them on the way, or what is guaranteed: refused.
REFUSED: Mapping[str, tuple[str, str]] = {
    "key.serializer": ("", "is not supported as keys are sent as the bytes of the key column"),
    "value.serializer": ("", "is not supported as values are sent as the bytes of the value column"),
    "partitioner.class": (
        "",
        f"{_JVM_CLASS}: compute the partition yourself and give it as the column 'partition'",
    ),
    "config.providers": ("", "is not supported: give the values themselves"),
    "security.providers": ("", _JVM_CLASS),
    "sasl.login.class": ("", _JVM_CLASS),
    "sasl.oauthbearer.assertion.algorithm": ("RS256", _NO_ASSERTION),
    "sasl.oauthbearer.assertion.claim.aud": ("", _NO_ASSERTION),
    "sasl.oauthbearer.assertion.claim.exp.seconds": ("300", _NO_ASSERTION),
    "sasl.oauthbearer.assertion.claim.iss": ("", _NO_ASSERTION),
    "sasl.oauthbearer.assertion.claim.jti.include": ("false", _NO_ASSERTION),
    "sasl.oauthbearer.assertion.claim.nbf.seconds": ("60", _NO_ASSERTION),
    "sasl.oauthbearer.assertion.claim.sub": ("", _NO_ASSERTION),
    "sasl.oauthbearer.assertion.file": ("", _NO_ASSERTION),
    "sasl.oauthbearer.assertion.private.key.file": ("", _NO_ASSERTION),
    "sasl.oauthbearer.assertion.private.key.passphrase": ("", _NO_ASSERTION),
    "sasl.oauthbearer.assertion.template.file": ("", _NO_ASSERTION),
    "sasl.oauthbearer.jwt.retriever.class": (f"{_OAUTH}.DefaultJwtRetriever", _JVM_CLASS),
    "sasl.oauthbearer.jwt.validator.class": (f"{_OAUTH}.DefaultJwtValidator", _JVM_CLASS),
    "ssl.engine.factory.class": ("", _JVM_CLASS),
    "ssl.provider": ("", f"{_JVM_CLASS}: remove it"),
    "transactional.id": (
        "",
        "is not supported: set delivery.guarantee=exactly-once and transactional.id.prefix",
    ),
    "transaction.two.phase.commit.enable": (
        "false",
        "is not supported: brokers have not finished it (KIP-939)",
    ),
}

# Set by people who want a guarantee; dropped in silence they would get a job without it.
GUARANTEES = ("security.protocol", "transactional.id")

# What Spark itself, or .save(path), puts among a sink's options, and Spark's Kafka sink ignores.
SPARK_OWN = frozenset({"path", "paths", "checkpointlocation", "queryname", "includeheaders"})


def refusal(name: str) -> tuple[str, str] | None:
    """(Kafka's default, why it is refused) of an option that this sink refuses, or None."""
    if name.startswith("config.providers."):
        return REFUSED["config.providers"]
    return REFUSED.get(name)


def same_setting(text: str, default: str) -> bool:
    """Whether a value asks for Kafka's default; lists may be spaced, words in any case."""

    def plain(value: str) -> list[str]:
        return [part.strip().lower() for part in value.split(",")]

    return plain(text) == plain(default)
