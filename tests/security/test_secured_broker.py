"""A real broker with TLS, mutual TLS and each mechanism: rows arrive, and planning names each mistake."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from pyspark.sql.types import StringType, StructField, StructType

from kafka_sink import doctor
from kafka_sink.driver.topic_preparation import prepare_topic
from kafka_sink.errors import AuthenticationError, BrokersUnreachableError, ConfigurationError, KafkaSinkError
from kafka_sink.network import broker_connection
from kafka_sink.network.broker_protocol import ConnectionState
from kafka_sink.options import parse
from kafka_sink.options.table import SPECS
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.secret import Secret, redacted
from kafka_sink.spark.datasource import KafkaChunkedDataSource
from kafka_sink.task.producer import Producer
from tests.support.partitioners import row_batch
from tests.support.security.certificates import Authority
from tests.support.security.secured_broker import (
    KEY_PASSWORD,
    MAX_IDLE_MS,
    MAX_REQUEST_BYTES,
    PASSWORD,
    SHORT_SESSION_MS,
    Secured,
    jaas_quoted,
    options,
    plain_jaas,
    send,
    write,
)
from tests.support.security.token_server import TokenServer
from tests.support.surroundings import Environ
from tests.support.waiting import until

OAUTH_MODULE = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"
# Planning says what is wrong within this: its bound for connecting is 9 s. It tries for so long where a later
# attempt may succeed, unless it is told not to.
BOUND_S = 45.0
QUICK = {"kafka.max.block.ms": "2500"}


Options = Callable[[Secured], dict[str, str]]


def to(listener: str, at: str | None = None, **more: str) -> Options:
    """Options for this listener; ``at``: sent to another one."""

    def made(secured: Secured) -> dict[str, str]:
        elsewhere = {} if at is None else {"kafka.bootstrap.servers": secured.bootstrap(at)}
        return secured.options(listener, **more) | elsewhere

    return made


def mutual(secured: Secured) -> dict[str, str]:
    path = str(secured.client.pkcs12_file(secured.folder / "client.p12", "key, word"))
    store = {"ssl_keystore_type": "PKCS12", "ssl_keystore_location": path}
    return secured.options("MUTUAL", **store, ssl_keystore_password="key, word")


def by_token(secured: Secured, **claims: object) -> dict[str, str]:
    """With a file of a token, which has these claims, too."""
    path = secured.folder / f"token-{'-'.join(claims)}"
    path.write_text(secured.tokens.token(**claims))  # type: ignore[arg-type]
    return secured.options(
        "SASL",
        sasl_mechanism="OAUTHBEARER",
        sasl_oauthbearer_token_endpoint_url=path.as_uri(),
        sasl_jaas_config=f"kafkashaded.{OAUTH_MODULE} required extension_logicalCluster='lkc-1';",
    )


SCRAM = plain_jaas(module="scram.ScramLoginModule")
WAYS: dict[str, Options] = {
    "TLS": to("TLS"),
    "mutual TLS": mutual,
    "PLAIN": to("SASL", sasl_mechanism="PLAIN", sasl_username="bob", sasl_password=PASSWORD),
    "PLAIN in clear": to("CLEARSASL", sasl_mechanism="plain", sasl_jaas_config=plain_jaas("bob")),
    "SCRAM-SHA-256": to("SASL", sasl_mechanism="SCRAM-SHA-256", sasl_jaas_config=SCRAM),
    "SCRAM-SHA-512": to("SASL", sasl_mechanism="SCRAM-SHA-512", sasl_jaas_config=SCRAM),
    "OAUTHBEARER from a file": by_token,
    "OAUTHBEARER from a function": lambda secured: {
        **secured.options("SASL", sasl_mechanism="OAUTHBEARER"),
        "sasl.oauthbearer.token.provider": "tests.support.security.providers.from_file",
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_rows_arrive_and_topics_are_created(
    secured: Secured, way: str, tmp_path: Path, environ: Environ
) -> None:
    (tmp_path / "token").write_text(secured.tokens.token())
    environ(TEST_TOKEN_FILE=str(tmp_path / "token"))
    topic = "way-" + "".join(char if char.isalnum() else "-" for char in way)
    assert write(options(WAYS[way](secured), topic)).records == 1000


def test_tokens_come_from_an_endpoint_once_for_all_connections(secured: Secured) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(secured.folder / "server.pem")
    with TokenServer(context) as server:
        server.gives(secured.tokens.token, lifetime_s=300)
        trust = f"ssl.truststore.type=PEM ssl.truststore.location={jaas_quoted(secured.trust)}"
        jaas = f"{OAUTH_MODULE} required clientId='me' clientSecret={jaas_quoted(PASSWORD)} {trust};"
        raw = secured.options(
            "SASL",
            sasl_mechanism="OAUTHBEARER",
            sasl_oauthbearer_token_endpoint_url=server.url,
            sasl_jaas_config=jaas,
        )
        for number in range(3):
            assert write(options(raw, f"endpoint-{number}")).records == 1000
        assert len(server.requests) == 1
        untrusting = {**raw, "kafka.sasl.jaas.config": jaas.replace(trust, "")}
        with pytest.raises(AuthenticationError, match=r"TLS with the token endpoint .*trusted authority"):
            prepare_topic(options(untrusting))
        server.responds(401, b'{"error": "invalid_client"}')
        other = {**raw, "kafka.sasl.jaas.config": jaas.replace("'me'", "'you'")}
        with pytest.raises(AuthenticationError, match=r"responded 401 \(invalid_client\): check client id"):
            prepare_topic(options(other))


MISTAKES: dict[str, tuple[Options, type[KafkaSinkError], str]] = {
    "unknown name": (
        lambda _: {"kafka.bootstrap.servers": "no-such-host.invalid:9092", **QUICK},
        BrokersUnreachableError,
        r"no-such-host\.invalid:9092: looking up its name failed: .* \(check the host name in kafka\.boot",
    ),
    "TLS to a listener in clear": (
        lambda secured: {
            **secured.options("TLS"), "kafka.bootstrap.servers": secured.broker.bootstrap_servers, **QUICK,
        },
        BrokersUnreachableError,
        r"TLS handshake; unless it is restarting, it is not a TLS listener \(kafka\.security\.protocol\)",
    ),
    "clear to a TLS listener": (
        lambda secured: {"kafka.bootstrap.servers": secured.bootstrap("TLS")},
        BrokersUnreachableError,
        r"expects TLS: set kafka\.security\.protocol=SSL",
    ),
    "clear to a SASL listener": (
        lambda secured: {"kafka.bootstrap.servers": secured.bootstrap("CLEARSASL")},
        BrokersUnreachableError,
        r"may need a login \(kafka\.security\.protocol=SASL_PLAINTEXT\)",
    ),
    "TLS without the login": (
        to("TLS", at="SASL"),
        BrokersUnreachableError,
        r"may need a login \(kafka\.security\.protocol=SASL_SSL\)",
    ),
    "client certificate wanted": (
        to("MUTUAL"), AuthenticationError, r"certificate.*kafka\.ssl\.keystore\.location",
    ),
    "mechanism not offered": (
        to("SASL", sasl_mechanism="AWS_MSK_IAM"),
        AuthenticationError,
        r"does not offer AWS_MSK_IAM but .*PLAIN.*: set kafka\.sasl\.mechanism",
    ),
    "wrong password": (
        to("SASL", sasl_mechanism="PLAIN", sasl_jaas_config=plain_jaas("bob", "no")),
        AuthenticationError,
        r"refuses the credentials for SASL PLAIN .*check the user name and the password",
    ),
    "login where none is taken": (
        to("SASL", at="TLS", sasl_mechanism="PLAIN", sasl_username="bob", sasl_password="x"),
        AuthenticationError,
        r"its listener does not support a login",
    ),
    "token for somebody else": (
        lambda secured: by_token(secured, aud="other"),
        AuthenticationError,
        "check the token's issuer, audience and lifetime",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_has_its_own_message_at_planning_in_its_bound(
    secured: Secured, mistake: str, environ: Environ, caplog: pytest.LogCaptureFixture
) -> None:
    environ(AWS_ACCESS_KEY_ID="AKIDEXAMPLE", AWS_SECRET_ACCESS_KEY="x", AWS_DEFAULT_REGION="eu-west-1")
    make, kind, pattern = MISTAKES[mistake]
    schema = StructType([StructField("value", StringType())])
    source = KafkaChunkedDataSource({"topic": "never", "topic.create": "true", **make(secured)})
    begun = time.monotonic()
    with pytest.raises(kind, match=pattern) as caught:
        source.writer(schema, False)
    assert time.monotonic() - begun < BOUND_S
    *before, last = [one for one in caplog.records if one.name == "kafka_sink"]
    assert (last.levelname, last.getMessage()[:15]) == ("ERROR", "kafka-chunked: ")
    assert re.search(pattern, last.getMessage())
    # Warnings of planning: of secrets that Spark shows, of settings that are weak, of no broker for 3 s.
    assert {one.levelname for one in before} <= {"WARNING"}
    assert len(before) <= 3
    for secret in (PASSWORD, jaas_quoted(PASSWORD), "key, word", secured.client.key_pem().decode()[60:120]):
        assert secret not in str(caught.value)


def test_planning_needs_one_good_address_and_reports_all_bad_ones_in_time(secured: Secured) -> None:
    given = secured.options("TLS")
    with socket.create_server(("127.0.0.1", 0), backlog=5) as silent:
        mute = f"127.0.0.1:{silent.getsockname()[1]}"
        bad = f"127.0.0.1:1,{mute},{secured.broker.bootstrap_servers}"
        good = {**given, "kafka.bootstrap.servers": f"{bad},{secured.bootstrap('TLS')}"}
        for name in (
            "kafka.socket.connection.setup.timeout.ms",
            "kafka.socket.connection.setup.timeout.max.ms",
        ):
            good[name] = "60000"
        begun = time.monotonic()
        prepare_topic(options(good), connect_bound_ms=60_000.0)
        assert time.monotonic() - begun < 50, "the silent one is given up after a minute"
        begun = time.monotonic()
        with pytest.raises(BrokersUnreachableError) as caught:
            prepare_topic(options({**given, "kafka.bootstrap.servers": bad}))
        assert time.monotonic() - begun < BOUND_S
    text = str(caught.value)
    assert "127.0.0.1:1: connecting by TCP failed: Connection refused" in text
    assert re.search(f"{mute}: [^;]*(the TLS handshake|connecting by TCP) did not complete", text), text
    assert "it is not a TLS listener" in text


@pytest.mark.parametrize("way", ["mutual TLS", "PLAIN", "SCRAM-SHA-512", "OAUTHBEARER from a file"])
def test_the_doctor_checks_a_secured_cluster_and_writes_no_secret(
    secured: Secured,
    way: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Catches: kafka-python's admin client, which logged the password at DEBUG seven times."""
    given = {"topic": "secured", "topic.create": "true", **WAYS[way](secured)}
    prepare_topic(parse(given).options)
    (tmp_path / "options").write_text(json.dumps(given))
    out = io.StringIO()
    with caplog.at_level(logging.DEBUG):
        doctor.main(["--options-file", str(tmp_path / "options")], out)
    said = out.getvalue()
    assert "brokers, login and topic: usable" in said
    assert "topic 'secured': " in said
    written = said + caplog.text + "".join(capfd.readouterr())
    texts = [given[spec.name] for spec in SPECS if spec.secret and spec.name in given]
    texts += [PASSWORD, KEY_PASSWORD]
    if way == "OAUTHBEARER from a file":
        token = (secured.folder / "token-").read_text()
        texts += [token, *token.split(".")]
    secrets = list(map(Secret.known, texts))
    assert not [line for line in written.splitlines() if redacted(line) != line]
    assert secrets


def test_rights_that_are_missing_are_named(secured: Secured) -> None:
    admin = AdminClient({"bootstrap.servers": secured.broker.bootstrap_servers, "log_level": 0})
    for topic, operation, permission in (
        ("readable", AclOperation.READ, AclPermissionType.ALLOW),
        ("hidden", AclOperation.ALL, AclPermissionType.DENY),
    ):
        secured.broker.create_topic(topic, 1)
        of = (ResourceType.TOPIC, topic, ResourcePatternType.LITERAL)
        for done in admin.create_acls([AclBinding(*of, "User:bob", "*", operation, permission)]).values():
            done.result(30)

    def said(topic: str) -> str:
        """Empty where planning succeeds: brokers learn of ACLs some time after they are made."""
        try:
            prepare_topic(options(WAYS["PLAIN"](secured), topic))
        except ConfigurationError as error:
            return str(error)
        return ""

    assert "may not write to 'readable'. Grant it WRITE" in until(lambda: said("readable"))
    assert "'hidden' cannot be used: topic authorization failed" in until(lambda: said("hidden"))


def test_logins_are_renewed_before_they_run_out(secured: Secured, monkeypatch: pytest.MonkeyPatch) -> None:
    """KIP-368: brokers close connections whose login ran out. Here no connection is lost over a session's
    end."""
    # After the usual share of so short a session, less than half a second would be left for the login.
    monkeypatch.setattr(broker_connection, "_SESSION_SHARE", 0.25)
    login = {"sasl_mechanism": "PLAIN", "sasl_username": "bob", "sasl_password": PASSWORD}
    given = options(secured.options("SHORT", **login), "short")
    prepare_topic(given)
    producer = Producer(given)

    def made() -> set[float]:
        kept = (ConnectionState.READY, ConnectionState.REAUTHENTICATING)
        links = producer.network.connections.values()
        return {link.connecting_since_ms for link in links if link.state in kept}

    def set_up() -> dict[int, float]:
        return {one.id: one.setup_ms for one in producer.cluster.brokers.values() if one.setup_ms is not None}

    def write_rows(count: int) -> int:
        send(producer, count)
        until(lambda: producer.acknowledged == producer.rows, "these rows")
        return count

    try:
        producer.begin()
        rows = write_rows(1)
        at_first, set_up_at_first = made(), set_up()
        # A broker may learn late that it leads a partition of a new topic.
        at_first_retries = producer.accumulator.deliveries.counts().retries
        begun = time.monotonic()
        while time.monotonic() - begun < 1.3 * SHORT_SESSION_MS / 1000:
            rows += write_rows(100)
        result = producer.finish()
        assert made()
        assert made() <= at_first, "there was a new connection"
        assert set_up().items() >= set_up_at_first.items(), "a renewed login was taken for a new connection"
    finally:
        producer.close()
    assert result.records == rows
    assert result.retries == at_first_retries


def test_limits_as_azure_event_hubs_has_them_are_kept(secured: Secured) -> None:
    """This broker has them: larger requests and unused connections end connections there."""
    rows = pa.record_batch([pa.array([os.urandom(300).hex() for _ in range(20_000)])], names=["value"])
    secured.broker.create_topic("limited", 8)
    given = {"kafka.bootstrap.servers": "x.servicebus.windows.net:9093", "topic": "limited"}
    host, port = secured.broker.bootstrap_servers.split(":")
    adapted = replace(parse(given).options, bootstrap_servers=((host, int(port)),))
    producer = Producer(adapted)
    try:
        producer.begin()
        # A broker may learn late that it leads a partition of a new topic.
        first = ColumnPlan.of([("value", "binary"), ("partition", "int")], "limited")
        producer.send(row_batch([b"x"] * 8, range(8)), plan=first)
        producer.flush()
        at_first_retries = producer.accumulator.deliveries.counts().retries
        for _ in range(3):
            producer.send(rows, plan=ColumnPlan.of([("value", "string")], "limited").narrowed())
        result = producer.finish()
    finally:
        producer.close()
    assert result.records == 60_008
    assert result.retries == at_first_retries, "a request was too large for it"
    assert adapted.max_request_size < MAX_REQUEST_BYTES
    assert adapted.connections_max_idle_ms < MAX_IDLE_MS


def test_renewed_certificates_on_disk_are_used_by_new_connections(secured: Secured, tmp_path: Path) -> None:
    path = tmp_path / "client.pem"
    Authority("Not trusted").issue("dave").pem_file(path)
    given = options(
        secured.options("MUTUAL", ssl_keystore_type="PEM", ssl_keystore_location=str(path)), "renewed"
    )
    with pytest.raises(AuthenticationError, match="keystore"):
        prepare_topic(given)
    secured.client.pem_file(path)
    os.utime(path, ns=(1, 1))
    assert write(given).records == 1000
