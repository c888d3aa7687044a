"""Kafka producer options that this sink does not implement, and what becomes of each.

Together with the table of SinkOptions these are all options of Kafka 4.3's ``ProducerConfig``; the defaults
are Kafka's. A value equal to the default asks for nothing and is always accepted.
"""

from __future__ import annotations

from collections.abc import Mapping

# Options about the JVM client itself: they change nothing about what is sent. One warning names those set.
WITHOUT_EFFECT: Mapping[str, str] = {
    "enable.metrics.push": "true",
    "interceptor.classes": "",
    "metric.reporters": "org.apache.kafka.common.metrics.JmxReporter",
    "metrics.num.samples": "2",
    "metrics.recording.level": "INFO",
    "metrics.sample.window.ms": "30000",
    # Named by jobs written for clients older than 4.0, where they were still options or had become inert.
    "auto.include.jmx.reporter": "true",
}

_JVM_CLASS = "names a Java class, which cannot run in this sink"

# Options whose loss would change where rows go, who can read them on the way, or what is guaranteed: refused.
REFUSED: Mapping[str, tuple[str, str]] = {
    "key.serializer": ("", "is not supported as keys are sent as the bytes of the key column"),
    "value.serializer": ("", "is not supported as values are sent as the bytes of the value column"),
    "partitioner.class": (
        "",
        f"{_JVM_CLASS}: compute the partition yourself and give it as the column 'partition'",
    ),
    "config.providers": ("", "is not supported: give the values themselves"),
    "security.protocol": ("PLAINTEXT", "is not supported yet: only PLAINTEXT connections are"),
    "security.providers": ("", _JVM_CLASS),
    "transactional.id": ("", "is not supported yet: rows are written without transactions"),
    "transaction.timeout.ms": ("60000", "is not supported yet: rows are written without transactions"),
    "transaction.two.phase.commit.enable": (
        "false",
        "is not supported yet: rows are written without transactions",
    ),
}

_OAUTH = "org.apache.kafka.common.security.oauthbearer"

# ssl.* and sasl.* have no effect on PLAINTEXT connections; set, they say that something else was wanted.
SECURITY_DEFAULTS: Mapping[str, str] = {
    "sasl.client.callback.handler.class": "",
    "sasl.jaas.config": "",
    "sasl.kerberos.kinit.cmd": "/usr/bin/kinit",
    "sasl.kerberos.min.time.before.relogin": "60000",
    "sasl.kerberos.service.name": "",
    "sasl.kerberos.ticket.renew.jitter": "0.05",
    "sasl.kerberos.ticket.renew.window.factor": "0.8",
    "sasl.login.callback.handler.class": "",
    "sasl.login.class": "",
    "sasl.login.connect.timeout.ms": "",
    "sasl.login.read.timeout.ms": "",
    "sasl.login.refresh.buffer.seconds": "300",
    "sasl.login.refresh.min.period.seconds": "60",
    "sasl.login.refresh.window.factor": "0.8",
    "sasl.login.refresh.window.jitter": "0.05",
    "sasl.login.retry.backoff.max.ms": "10000",
    "sasl.login.retry.backoff.ms": "100",
    "sasl.mechanism": "GSSAPI",
    "sasl.oauthbearer.assertion.algorithm": "RS256",
    "sasl.oauthbearer.assertion.claim.aud": "",
    "sasl.oauthbearer.assertion.claim.exp.seconds": "300",
    "sasl.oauthbearer.assertion.claim.iss": "",
    "sasl.oauthbearer.assertion.claim.jti.include": "false",
    "sasl.oauthbearer.assertion.claim.nbf.seconds": "60",
    "sasl.oauthbearer.assertion.claim.sub": "",
    "sasl.oauthbearer.assertion.file": "",
    "sasl.oauthbearer.assertion.private.key.file": "",
    "sasl.oauthbearer.assertion.private.key.passphrase": "",
    "sasl.oauthbearer.assertion.template.file": "",
    "sasl.oauthbearer.client.credentials.client.id": "",
    "sasl.oauthbearer.client.credentials.client.secret": "",
    "sasl.oauthbearer.clock.skew.seconds": "30",
    "sasl.oauthbearer.expected.audience": "",
    "sasl.oauthbearer.expected.issuer": "",
    "sasl.oauthbearer.header.urlencode": "false",
    "sasl.oauthbearer.jwks.endpoint.refresh.ms": "3600000",
    "sasl.oauthbearer.jwks.endpoint.retry.backoff.max.ms": "10000",
    "sasl.oauthbearer.jwks.endpoint.retry.backoff.ms": "100",
    "sasl.oauthbearer.jwks.endpoint.url": "",
    "sasl.oauthbearer.jwt.retriever.class": f"{_OAUTH}.DefaultJwtRetriever",
    "sasl.oauthbearer.jwt.validator.class": f"{_OAUTH}.DefaultJwtValidator",
    "sasl.oauthbearer.scope": "",
    "sasl.oauthbearer.scope.claim.name": "scope",
    "sasl.oauthbearer.sub.claim.name": "sub",
    "sasl.oauthbearer.token.endpoint.url": "",
    "ssl.cipher.suites": "",
    "ssl.enabled.protocols": "TLSv1.2,TLSv1.3",
    "ssl.endpoint.identification.algorithm": "https",
    "ssl.engine.factory.class": "",
    "ssl.key.password": "",
    "ssl.keymanager.algorithm": "SunX509",
    "ssl.keystore.certificate.chain": "",
    "ssl.keystore.key": "",
    "ssl.keystore.location": "",
    "ssl.keystore.password": "",
    "ssl.keystore.type": "JKS",
    "ssl.protocol": "TLSv1.3",
    "ssl.provider": "",
    "ssl.secure.random.implementation": "",
    "ssl.trustmanager.algorithm": "PKIX",
    "ssl.truststore.certificates": "",
    "ssl.truststore.location": "",
    "ssl.truststore.password": "",
    "ssl.truststore.type": "JKS",
}
SECURITY_REASON = "is not supported yet: only PLAINTEXT connections are"

# Set by people who want a guarantee; dropped in silence they would get a job without it.
GUARANTEES = ("security.protocol", "transactional.id")

# What Spark itself, or .save(path), puts among a sink's options, and Spark's Kafka sink ignores.
SPARK_OWN = frozenset({"path", "paths", "checkpointlocation", "queryname"})


def refusal(name: str) -> tuple[str, str] | None:
    """(Kafka's default, why it is refused) of an option that this sink refuses, or None."""
    if name in SECURITY_DEFAULTS:
        return SECURITY_DEFAULTS[name], SECURITY_REASON
    if name.startswith("config.providers."):
        return REFUSED["config.providers"]
    return REFUSED.get(name)


def same_setting(text: str, default: str) -> bool:
    """Whether a value asks for Kafka's default; lists may be spaced, words in any case."""

    def plain(value: str) -> list[str]:
        return [part.strip().lower() for part in value.split(",")]

    return plain(text) == plain(default)
