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
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql.types import StringType, StructField, StructType

from kafka_sink import doctor
from kafka_sink.driver.topic_preparation import prepare_topic
from kafka_sink.errors import AuthenticationError, BrokersUnreachableError, ConfigurationError, KafkaSinkError
from kafka_sink.network.broker_connection import ConnectionState
from kafka_sink.options import SinkOptions, parse
from kafka_sink.options.table import SPECS
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.secret import Secret, repeats_secret
from kafka_sink.spark.datasource import KafkaChunkedDataSource
from kafka_sink.task.producer import Producer
from local_kafka import LocalBroker
from tests.support.proxy import RESPONSE, Proxy
from tests.support.security.certificates import Authority
from tests.support.security.secured_broker import (
    CONNECTION_STRING,
    CONNECTION_STRING_USER,
    KEY_PASSWORD,
    PASSWORD,
    USER,
    Secured,
    jaas_quoted,
    plain_jaas,
    secured_broker,
)
from tests.support.security.token_server import TokenServer
from tests.support.surroundings import Environ
from tests.support.waiting import until

OAUTH_MODULE = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"
# Planning says what is wrong within this: its bound for connecting is 9 s.
BOUND_S = 15.0


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured_broker(tmp_path_factory.mktemp("secured")) as running:
        yield running


def options(raw: dict[str, str], topic: str = "secured") -> SinkOptions:
    return parse({"topic": topic, "topic.create": "true", **raw}).options


def write(given: SinkOptions, rows: int = 1000) -> int:
    """Plans as the data source does, then writes as a task does; rows acknowledged."""
    prepare_topic(given)
    producer = Producer(given)
    plan = ColumnPlan.of([("value", "string")], given.topic).narrowed()
    try:
        producer.begin()
        producer.send(pa.record_batch([pa.array(["x" * 50] * rows)], names=["value"]), plan=plan)
        return producer.finish().records
    finally:
        producer.close()


def mutual(secured: Secured) -> dict[str, str]:
    path = secured.client.pkcs12_file(secured.folder / "client.p12", "key, word")
    return secured.options(
        "MUTUAL",
        ssl_keystore_type="PKCS12",
        ssl_keystore_location=str(path),
        ssl_keystore_password="key, word",
    )


def by_token(secured: Secured) -> dict[str, str]:
    path = secured.folder / "token"
    path.write_text(secured.tokens.token())
    return secured.options(
        "SASL",
        sasl_mechanism="OAUTHBEARER",
        sasl_oauthbearer_token_endpoint_url=path.as_uri(),
        sasl_jaas_config=f"kafkashaded.{OAUTH_MODULE} required extension_logicalCluster='lkc-1';",
    )


def scram(secured: Secured, mechanism: str) -> dict[str, str]:
    jaas = plain_jaas(module="scram.ScramLoginModule")
    return secured.options("SASL", sasl_mechanism=mechanism, sasl_jaas_config=jaas)


WAYS: dict[str, Callable[[Secured], dict[str, str]]] = {
    "TLS": lambda secured: secured.options("TLS"),
    "TLS 1.2": lambda secured: secured.options("TLS", ssl_enabled_protocols="TLSv1.2"),
    "TLS, any name": lambda secured: secured.options("WRONGHOST", ssl_endpoint_identification_algorithm=""),
    "mutual TLS": mutual,
    "PLAIN": lambda secured: secured.options(
        "SASL", sasl_mechanism="PLAIN", sasl_username="bob", sasl_password=PASSWORD
    ),
    "PLAIN in clear": lambda secured: secured.options(
        "CLEARSASL", sasl_mechanism="plain", sasl_jaas_config=plain_jaas("bob")
    ),
    "SCRAM-SHA-256": lambda secured: scram(secured, "SCRAM-SHA-256"),
    "SCRAM-SHA-512": lambda secured: scram(secured, "SCRAM-SHA-512"),
    "OAUTHBEARER from a file": by_token,
    "OAUTHBEARER from a function": lambda secured: {
        **secured.options("SASL", sasl_mechanism="OAUTHBEARER"),
        "sasl.oauthbearer.token.provider": "tests.support.security.providers.from_file",
    },
    "a connection string": lambda secured: secured.options(
        "SASL", sasl_mechanism="PLAIN", sasl_username=CONNECTION_STRING_USER, sasl_password=CONNECTION_STRING
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_rows_arrive_and_topics_are_created(
    secured: Secured, way: str, tmp_path: Path, environ: Environ
) -> None:
    (tmp_path / "token").write_text(secured.tokens.token())
    environ(TEST_TOKEN_FILE=str(tmp_path / "token"))
    topic = "way-" + "".join(char if char.isalnum() else "-" for char in way)
    assert write(options(WAYS[way](secured), topic)) == 1000


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
            assert write(options(raw, f"endpoint-{number}")) == 1000
        assert len(server.requests) == 1
        untrusting = {**raw, "kafka.sasl.jaas.config": jaas.replace(trust, "")}
        with pytest.raises(AuthenticationError, match=r"TLS with the token endpoint .*trusted authority"):
            prepare_topic(options(untrusting))
        server.response = lambda: (401, b'{"error": "invalid_client"}')
        other = {**raw, "kafka.sasl.jaas.config": jaas.replace("'me'", "'you'")}
        with pytest.raises(AuthenticationError, match=r"responded 401 \(invalid_client\): check client id"):
            prepare_topic(options(other))


MISTAKES: dict[str, tuple[Callable[[Secured], dict[str, str]], type[KafkaSinkError], str]] = {
    "unknown name": (
        lambda secured: {"kafka.bootstrap.servers": "no-such-host.invalid:9092"},
        BrokersUnreachableError,
        r"no-such-host\.invalid:9092: looking up its name failed: cannot resolve",
    ),
    "nobody listens": (
        lambda secured: {"kafka.bootstrap.servers": "127.0.0.1:1"},
        BrokersUnreachableError,
        r"127\.0\.0\.1:1: connecting by TCP failed: Connection refused .*check host and port",
    ),
    "TLS to a listener in clear": (
        lambda secured: {
            **secured.options("TLS"), "kafka.bootstrap.servers": secured.broker.bootstrap_servers,
        },
        BrokersUnreachableError,
        r"TLS handshake; if this happens again, it is not a TLS listener \(kafka\.security\.protocol\)",
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
        lambda secured: {**secured.options("TLS"), "kafka.bootstrap.servers": secured.bootstrap("SASL")},
        BrokersUnreachableError,
        r"may need a login \(kafka\.security\.protocol=SASL_SSL\)",
    ),
    "unknown authority": (
        lambda secured: {
            **secured.options("TLS"),
            "kafka.ssl.truststore.location": str(Authority().pem_file(secured.folder / "other.pem")),
        },
        AuthenticationError,
        r"not of a trusted authority .*kafka\.ssl\.truststore\.location",
    ),
    "wrong host": (
        lambda secured: secured.options("WRONGHOST"),
        AuthenticationError,
        r"certificate is not for 127\.0\.0\.1 .*advertised\.listeners",
    ),
    "expired certificate": (
        lambda secured: secured.options("EXPIRED"),
        AuthenticationError,
        "has expired",
    ),
    "client certificate wanted": (
        lambda secured: secured.options("MUTUAL"),
        AuthenticationError,
        r"certificate.*kafka\.ssl\.keystore\.location",
    ),
    "mechanism not offered": (
        lambda secured: secured.options("SASL", sasl_kerberos_service_name="kafka")
        | {"kafka.sasl.mechanism": "AWS_MSK_IAM", "kafka.sasl.kerberos.service.name": ""},
        AuthenticationError,
        r"does not offer AWS_MSK_IAM but .*PLAIN.*: set kafka\.sasl\.mechanism",
    ),
    "wrong password": (
        lambda secured: secured.options(
            "SASL", sasl_mechanism="PLAIN", sasl_jaas_config=plain_jaas("bob", "no")
        ),
        AuthenticationError,
        r"refuses the credentials for SASL PLAIN .*check the user name and the password",
    ),
    "wrong SCRAM password": (
        lambda secured: secured.options(
            "SASL", sasl_mechanism="SCRAM-SHA-512", sasl_username=USER, sasl_password="no"
        ),
        AuthenticationError,
        r"refuses the credentials for SASL SCRAM-SHA-512",
    ),
    "login where none is taken": (
        lambda secured: {
            **secured.options("SASL", sasl_mechanism="PLAIN", sasl_username="bob", sasl_password="x"),
            "kafka.bootstrap.servers": secured.bootstrap("TLS"),
        },
        AuthenticationError,
        r"its listener takes no login",
    ),
    "missing file": (
        lambda secured: {**secured.options("TLS"), "kafka.ssl.truststore.location": "/nowhere/ca.pem"},
        ConfigurationError,
        r"kafka\.ssl\.truststore\.location' = /nowhere/ca\.pem cannot be read: No such file",
    ),
    "token for somebody else": (
        lambda secured: {
            **by_token(secured),
            "kafka.sasl.oauthbearer.token.endpoint.url": _token_file(secured, aud="other"),
        },
        AuthenticationError,
        "check the token's issuer, audience and lifetime",
    ),
}  # fmt: skip


def _token_file(secured: Secured, **claims: object) -> str:
    path = secured.folder / f"token-{'-'.join(claims)}"
    path.write_text(secured.tokens.token(**claims))  # type: ignore[arg-type]
    return path.as_uri()


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


def test_one_good_address_of_several_is_enough_and_all_bad_ones_are_named_in_time(secured: Secured) -> None:
    given = secured.options("TLS")
    with socket.create_server(("127.0.0.1", 0), backlog=5) as silent:
        mute = f"127.0.0.1:{silent.getsockname()[1]}"
        bad = f"127.0.0.1:1,{mute},{secured.broker.bootstrap_servers}"
        good = {**given, "kafka.bootstrap.servers": f"{bad},{secured.bootstrap('TLS')}"}
        begun = time.monotonic()
        prepare_topic(options(good))
        assert time.monotonic() - begun < 8.5, "the silent one is given up after 9 s"
        with pytest.raises(BrokersUnreachableError) as caught:
            prepare_topic(options({**given, "kafka.bootstrap.servers": bad}))
        assert time.monotonic() - begun < BOUND_S + 5
    text = str(caught.value)
    assert "127.0.0.1:1: connecting by TCP failed: Connection refused" in text
    assert re.search(f"{mute}: [^;]*(the TLS handshake|connecting by TCP) did not end", text), text
    assert "it is not a TLS listener" in text


@pytest.mark.parametrize("way", ["mutual TLS", "PLAIN", "SCRAM-SHA-512", "OAUTHBEARER from a file"])
def test_the_doctor_checks_a_secured_cluster_and_writes_no_secret(
    secured: Secured,
    way: str,
    tmp_path: Path,
    environ: Environ,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Catches: kafka-python's admin client, which logged the password at DEBUG seven times."""
    token = secured.tokens.token()
    (tmp_path / "token").write_text(token)
    environ(TEST_TOKEN_FILE=str(tmp_path / "token"))
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
    texts += [PASSWORD, KEY_PASSWORD, CONNECTION_STRING, token, *token.split(".")]
    texts += [(secured.folder / "token").read_text()] if way == "OAUTHBEARER from a file" else []
    secrets = list(map(Secret.known, texts))
    assert not [line for line in written.splitlines() if repeats_secret(line)]
    assert secrets


def test_rights_that_are_missing_are_named(secured: Secured) -> None:
    from confluent_kafka.admin import (
        AclBinding,
        AclOperation,
        AclPermissionType,
        AdminClient,
        ResourcePatternType,
        ResourceType,
    )

    admin = AdminClient({"bootstrap.servers": secured.broker.bootstrap_servers, "log_level": 0})
    secured.broker.create_topic("readable", 1)
    acls = [
        AclBinding(
            ResourceType.TOPIC, name, ResourcePatternType.LITERAL, "User:bob", "*", operation, permission
        )
        for name, operation, permission in (
            ("readable", AclOperation.READ, AclPermissionType.ALLOW),
            ("hidden", AclOperation.ALL, AclPermissionType.DENY),
        )
    ]
    for done in admin.create_acls(acls).values():
        done.result(30)
    secured.broker.create_topic("hidden", 1)
    given = WAYS["PLAIN"](secured)

    def denied() -> bool:
        """Brokers learn of ACLs some time after they are made."""
        try:
            prepare_topic(options(given, "readable"))
        except ConfigurationError as error:
            return "may not write to 'readable'. Grant it WRITE" in str(error)
        return False

    until(denied, "a refusal")
    with pytest.raises(ConfigurationError, match="'hidden' cannot be used: topic authorization failed"):
        prepare_topic(options(given, "hidden"))


def test_logins_are_renewed_before_they_run_out(secured: Secured) -> None:
    """KIP-368: brokers close connections whose login ran out. Here four sessions lose no connection."""
    given = options(
        secured.options("SHORT", sasl_mechanism="PLAIN", sasl_username="bob", sasl_password=PASSWORD), "short"
    )
    prepare_topic(given)
    producer = Producer(given)
    plan = ColumnPlan.of([("value", "string")], "short").narrowed()
    try:
        producer.begin()

        def made() -> set[float]:
            links = producer.network.connections.values()
            made = (ConnectionState.READY, ConnectionState.REAUTHENTICATING)
            return {link.connecting_since_ms for link in links if link.state in made}

        def set_up() -> dict[int, float]:
            brokers = producer.cluster.brokers.values()
            return {one.id: one.setup_ms for one in brokers if one.setup_ms is not None}

        producer.send(pa.record_batch([pa.array(["x"])], names=["value"]), plan=plan)
        until(lambda: producer.acknowledged == producer.rows, "the first row")
        at_first, set_up_at_first = made(), set_up()
        # A broker may learn late that it leads a partition of a new topic.
        at_first_retries = producer.sender.deliveries.counts().retries
        rows, begun = 1, time.monotonic()
        while time.monotonic() - begun < 12.5:
            producer.send(pa.record_batch([pa.array(["x" * 50] * 100)], names=["value"]), plan=plan)
            rows += 100
            until(lambda: producer.acknowledged == producer.rows, "the next rows")
        result = producer.finish()
        assert made()
        assert made() <= at_first, "there was a new connection"
        assert set_up().items() >= set_up_at_first.items(), "a renewed login was taken for a new connection"
    finally:
        producer.close()
    assert result.records == rows
    assert result.retries == at_first_retries


def test_connections_cut_anywhere_in_handshake_and_login_are_made_anew(secured: Secured) -> None:
    """A proxy cuts after so many bytes from the broker; the next connection goes through."""
    given = WAYS["SCRAM-SHA-256"](secured)
    host, port = secured.bootstrap("SASL").split(":")
    for count in (1, 5, 100, 500, 900, 1200, 1300, 1400, 1500, 1600):
        with Proxy((host, int(port)), parse=False) as proxy:
            proxy.cut_after(count, RESPONSE)
            prepare_topic(options({**given, "kafka.bootstrap.servers": proxy.address}, "cut"))
            assert proxy.connections > 1, count


def test_limits_as_azure_event_hubs_has_them_are_kept() -> None:
    """A broker with the service's limits: larger requests and unused connections end connections there."""
    limits = {"socket.request.max.bytes": 1_046_528, "connections.max.idle.ms": 240_000}
    rows = pa.record_batch([pa.array([os.urandom(300).hex() for _ in range(20_000)])], names=["value"])
    with LocalBroker(properties=limits) as broker:
        broker.create_topic("limited", 8)
        given = {"kafka.bootstrap.servers": "x.servicebus.windows.net:9093", "topic": "limited"}
        host, port = broker.bootstrap_servers.split(":")
        adapted = replace(parse(given).options, bootstrap_servers=((host, int(port)),))
        producer = Producer(adapted)
        try:
            producer.begin()
            for _ in range(3):
                producer.send(rows, plan=ColumnPlan.of([("value", "string")], "limited").narrowed())
            result = producer.finish()
        finally:
            producer.close()
    assert result.records == 60_000
    assert result.retries == 0, "a request was too large for it"
    assert adapted.max_request_size < limits["socket.request.max.bytes"]
    assert adapted.connections_max_idle_ms < limits["connections.max.idle.ms"]


def test_renewed_certificates_on_disk_are_used_by_new_connections(secured: Secured, tmp_path: Path) -> None:
    path = tmp_path / "client.pem"
    Authority("Not trusted").issue("dave").pem_file(path)
    given = secured.options("MUTUAL", ssl_keystore_type="PEM", ssl_keystore_location=str(path))
    with pytest.raises(AuthenticationError, match="keystore"):
        prepare_topic(options(given))
    secured.client.pem_file(path)
    os.utime(path, ns=(1, 1))
    assert write(options(given, "renewed")) == 1000
