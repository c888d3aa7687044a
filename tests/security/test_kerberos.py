"""Kerberos (GSSAPI) with a KDC and a broker of this test: by ticket cache, by keytab, and without either.

Skipped where MIT's KDC or the package gssapi is missing.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("gssapi", exc_type=ImportError)

from kafka_sink.errors import AuthenticationError
from kafka_sink.options import parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.task.producer import Producer
from local_kafka import LocalBroker
from tests.support.security.key_distribution import REALM, KeyDistribution, is_available
from tests.support.surroundings import Environ
from tests.support.waiting import until

if not is_available():
    pytest.skip("no KDC is installed", allow_module_level=True)

MODULE = "com.sun.security.auth.module.Krb5LoginModule required"


@dataclass
class Kerberised:
    kdc: KeyDistribution
    broker: LocalBroker
    keytab: Path

    def options(self, **more: str) -> dict[str, str]:
        return {
            "kafka.bootstrap.servers": self.broker.bootstrap_for("KERBEROS"),
            "kafka.security.protocol": "SASL_PLAINTEXT",
            "kafka.sasl.kerberos.service.name": "kafka",
            "topic": "kerberised",
            **{f"kafka.{name.replace('_', '.')}": text for name, text in more.items()},
        }


@pytest.fixture(scope="module")
def kerberised(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kerberised]:
    folder = tmp_path_factory.mktemp("kerberos")
    with KeyDistribution(folder) as kdc:
        service, client = kdc.keytab("kafka/127.0.0.1"), kdc.keytab("alice")
        login = (
            f'{MODULE} useKeyTab=true storeKey=true keyTab="{service}" principal="kafka/127.0.0.1@{REALM}";'
        )
        properties = {
            "sasl.kerberos.service.name": "kafka",
            "listener.name.kerberos.sasl.enabled.mechanisms": "GSSAPI",
            "listener.name.kerberos.gssapi.sasl.jaas.config": login,
            # Short enough to be renewed in a test's time.
            "listener.name.kerberos.connections.max.reauth.ms": 4000,
        }
        with LocalBroker(
            properties=properties,
            extra_listeners={"KERBEROS": "SASL_PLAINTEXT"},
            java_options=[f"-Djava.security.krb5.conf={kdc.conf}"],
        ) as broker:
            yield Kerberised(kdc, broker, client)


@pytest.fixture(autouse=True)
def _where_kerberos_looks(kerberised: Kerberised, environ: Environ) -> None:
    environ(**kerberised.kdc.environ)


def write(raw: dict[str, str], for_s: float = 0.0) -> int:
    """Rows acknowledged of a task that goes on for that long."""
    import pyarrow as pa

    from kafka_sink.driver.topic_preparation import prepare_topic

    given = parse(raw).options
    prepare_topic(given)
    producer = Producer(given)
    try:
        producer.begin()
        plan = ColumnPlan.of([("value", "string")], given.topic).narrowed()
        rows = pa.record_batch([pa.array(["x" * 50] * 500)], names=["value"])
        begun, sent = time.monotonic(), 0
        while not sent or time.monotonic() - begun < for_s:
            producer.send(rows, plan=plan)
            sent += 500
            until(lambda: producer.acknowledged == producer.rows, "acknowledgements")
        result = producer.finish()
        assert (result.records, result.retries) == (sent, 0)
        return sent
    finally:
        producer.close()


def test_without_a_ticket_planning_says_what_to_do(
    kerberised: Kerberised, environ: Environ, tmp_path: Path
) -> None:
    environ(KRB5CCNAME=f"FILE:{tmp_path}/none")
    with pytest.raises(AuthenticationError, match=r"no ticket for kafka@127\.0\.0\.1: .*kinit on every host"):
        write(kerberised.options())


def test_a_ticket_in_the_cache_is_used(kerberised: Kerberised) -> None:
    kerberised.kdc.log_in("alice", kerberised.keytab)
    assert write(kerberised.options()) == 500


def test_a_keytab_of_the_jaas_options_is_used(
    kerberised: Kerberised, environ: Environ, tmp_path: Path
) -> None:
    environ(KRB5CCNAME=f"FILE:{tmp_path}/none")
    jaas = (
        f'{MODULE} useKeyTab=true keyTab="{kerberised.keytab}" principal="alice@{REALM}" serviceName="kafka";'
    )
    assert write(kerberised.options(sasl_jaas_config=jaas)) == 500
    assert not (tmp_path / "none").exists()


def test_logins_are_renewed_before_the_session_ends(kerberised: Kerberised) -> None:
    kerberised.kdc.log_in("alice", kerberised.keytab)
    assert write(kerberised.options(), for_s=10.0) > 500


def test_a_service_that_the_realm_does_not_have_is_named(kerberised: Kerberised) -> None:
    kerberised.kdc.log_in("alice", kerberised.keytab)
    with pytest.raises(AuthenticationError, match=r"no ticket for other@127\.0\.0\.1"):
        write(kerberised.options(sasl_kerberos_service_name="other"))
