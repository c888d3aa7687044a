"""A real broker with a listener for each kind of security; certificates, users and tokens made here."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from confluent_kafka.admin import (
    AdminClient,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)
from joserfc import jwt
from joserfc.jwk import RSAKey

from kafka_sink.driver.topic_preparation import prepare_topic
from kafka_sink.model import TaskResult
from kafka_sink.options import SinkOptions, parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.task.producer import Producer
from local_kafka import LocalBroker
from tests.support.broker_settings import SETTINGS
from tests.support.security.certificates import Authority, Identity

# Every character that somebody's parser stumbles over.
PASSWORD = "p'a\"s,s\\w=o;r d#/*ä€*/"
KEY_PASSWORD = "key-word-7319"
USER = "ali=ce,"
ISSUER, AUDIENCE = "https://issuer.test", "kafka"
# Azure Event Hubs ends connections with larger requests, and that are not used for this long.
MAX_REQUEST_BYTES, MAX_IDLE_MS = 1_046_528, 240_000
# How long a login on the listener SHORT is valid.
SHORT_SESSION_MS = 4_000
_MODULES = "org.apache.kafka.common.security"
_OAUTH_MODULE = f"{_MODULES}.oauthbearer.OAuthBearerLoginModule"
# Listener -> security protocol. The numbers of a session's length are in seconds.
LISTENERS = {
    "TLS": "SSL",
    "MUTUAL": "SSL",
    "SASL": "SASL_SSL",
    "SHORT": "SASL_SSL",
    "CLEARSASL": "SASL_PLAINTEXT",
}


def jaas_quoted(text: str) -> str:
    """The text quoted as a value in a JAAS text."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def plain_jaas(user: str = USER, password: str = PASSWORD, module: str = "plain.PlainLoginModule") -> str:
    """The text that a Spark user has in kafka.sasl.jaas.config."""
    pair = f"username={jaas_quoted(user)} password={jaas_quoted(password)}"
    return f"{_MODULES}.{module} required {pair};"


class TokenIssuer:
    """Signs JWTs that the broker accepts."""

    def __init__(self) -> None:
        self._key = RSAKey.generate_key(2048, {"kid": "k1", "use": "sig", "alg": "RS256"})

    def jwks(self) -> str:
        return json.dumps({"keys": [self._key.as_dict(private=False)]})

    def token(self, subject: str = "carol", lifetime_s: float = 300, **claims: Any) -> str:
        now = int(time.time())
        body = {"iss": ISSUER, "aud": AUDIENCE, "sub": subject, "iat": now - 1, "exp": now + int(lifetime_s)}
        return jwt.encode({"alg": "RS256", "kid": "k1"}, {**body, "scope": "kafka", **claims}, self._key)


@dataclass
class Secured:
    """The broker with all that a client needs."""

    broker: LocalBroker
    folder: Path
    authority: Authority
    client: Identity
    tokens: TokenIssuer = field(repr=False)

    def bootstrap(self, listener: str) -> str:
        return self.broker.bootstrap_for(listener)

    @property
    def trust(self) -> str:
        return str(self.folder / "authority.pem")

    def options(self, listener: str, **more: str) -> dict[str, str]:
        """Options that reach this listener, but for a login; names in ``more`` with underscores for dots."""
        given = {
            "kafka.bootstrap.servers": self.bootstrap(listener),
            "kafka.security.protocol": LISTENERS[listener],
        }
        if LISTENERS[listener].endswith("SSL"):
            given |= {"kafka.ssl.truststore.type": "PEM", "kafka.ssl.truststore.location": self.trust}
        return given | {f"kafka.{name.replace('_', '.')}": text for name, text in more.items()}


def _properties(folder: Path) -> dict[str, object]:
    handler = f"{_MODULES}.oauthbearer.OAuthBearerValidatorCallbackHandler"
    values: dict[str, object] = {
        **SETTINGS,
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS;User:admin",
        "allow.everyone.if.no.acl.found": "true",
        "listener.name.mutual.ssl.client.auth": "required",
        "listener.name.mutual.ssl.truststore.type": "PEM",
        "listener.name.mutual.ssl.truststore.location": folder / "authority.pem",
        "listener.name.short.connections.max.reauth.ms": SHORT_SESSION_MS,
    }
    for name, protocol in LISTENERS.items():
        prefix = f"listener.name.{name.lower()}"
        if protocol.endswith("SSL"):
            values[f"{prefix}.ssl.keystore.type"] = "PEM"
            values[f"{prefix}.ssl.keystore.location"] = folder / "server.pem"
        if not protocol.startswith("SASL"):
            continue
        values |= {
            f"{prefix}.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
            f"{prefix}.plain.sasl.jaas.config": f"{_MODULES}.plain.PlainLoginModule required "
            f"user_bob={jaas_quoted(PASSWORD)} {jaas_quoted('user_' + USER)}={jaas_quoted(PASSWORD)};",
            f"{prefix}.scram-sha-256.sasl.jaas.config": f"{_MODULES}.scram.ScramLoginModule required;",
            f"{prefix}.scram-sha-512.sasl.jaas.config": f"{_MODULES}.scram.ScramLoginModule required;",
            f"{prefix}.oauthbearer.sasl.jaas.config": f"{_OAUTH_MODULE} required;",
            f"{prefix}.oauthbearer.sasl.server.callback.handler.class": handler,
            f"{prefix}.oauthbearer.sasl.oauthbearer.jwks.endpoint.url": (folder / "jwks.json").as_uri(),
            f"{prefix}.oauthbearer.sasl.oauthbearer.expected.audience": AUDIENCE,
            f"{prefix}.oauthbearer.sasl.oauthbearer.expected.issuer": ISSUER,
        }
    return values


@contextmanager
def secured_broker(folder: Path, *, brokers: int = 1, **settings: object) -> Iterator[Secured]:
    """The broker runs within the block. ``settings``: further broker settings, with underscores for dots."""
    authority = Authority()
    authority.pem_file(folder / "authority.pem")
    authority.issue("server", "127.0.0.1", "localhost").pem_file(folder / "server.pem")
    tokens = TokenIssuer()
    (folder / "jwks.json").write_text(tokens.jwks())
    urls = (folder / "jwks.json").as_uri()
    with LocalBroker(
        brokers=brokers,
        properties=_properties(folder) | {name.replace("_", "."): value for name, value in settings.items()},
        extra_listeners=LISTENERS,
        java_options=[f"-Dorg.apache.kafka.sasl.oauthbearer.allowed.urls={urls}"],
    ) as broker:
        _make_scram_users(broker)
        yield Secured(broker, folder, authority, authority.issue("dave"), tokens)


def given(secured: Secured) -> dict[str, str]:
    """Options of a job: a mechanism, a key and its password all in one. Each call encrypts the key anew."""
    chain = secured.client.chain_pem.decode()
    key = secured.client.key_pem(KEY_PASSWORD).decode()
    return {
        **secured.options("SASL"),
        "kafka.sasl.mechanism": "SCRAM-SHA-512",
        "kafka.sasl.jaas.config": plain_jaas(module="scram.ScramLoginModule"),
        "kafka.ssl.keystore.type": "PEM",
        "kafka.ssl.keystore.key": key,
        "kafka.ssl.keystore.certificate.chain": chain,
        "kafka.ssl.key.password": KEY_PASSWORD,
    }


def options(raw: dict[str, str], topic: str = "secured") -> SinkOptions:
    return parse({"topic": topic, "topic.create": "true", **raw}).options


def write(given: SinkOptions, rows: int = 1000) -> TaskResult:
    """Plans as the data source does, then writes as a task does."""
    prepare_topic(given)
    producer = Producer(given)
    try:
        producer.begin()
        send(producer, rows)
        return producer.finish()
    finally:
        producer.close()


def send(producer: Producer, rows: int) -> int:
    plan = ColumnPlan.of([("value", "string")], producer.options.topic).narrowed()
    producer.send(pa.record_batch([pa.array(["x" * 50] * rows)], names=["value"]), plan=plan)
    return rows


def _make_scram_users(broker: LocalBroker) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})
    for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
        user = UserScramCredentialUpsertion(USER, ScramCredentialInfo(mechanism, 4096), PASSWORD.encode())
        for done in admin.alter_user_scram_credentials([user]).values():
            done.result(30)
