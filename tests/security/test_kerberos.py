"""Kerberos (GSSAPI) with a KDC and a broker of this test: by ticket cache, by keytab, and without either.

Skipped where MIT's KDC or the package gssapi is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("gssapi", exc_type=ImportError)

from kafka_sink.errors import AuthenticationError
from kafka_sink.options import SinkOptions
from local_kafka import LocalBroker
from tests.support.security.key_distribution import REALM, KeyDistribution, is_available
from tests.support.security.secured_broker import options, write
from tests.support.surroundings import Environ

if not is_available():
    pytest.skip("no KDC is installed", allow_module_level=True)

MODULE = "com.sun.security.auth.module.Krb5LoginModule required"


@dataclass
class Kerberised:
    kdc: KeyDistribution
    broker: LocalBroker
    keytab: Path

    def options(self, **more: str) -> SinkOptions:
        given = {
            "kafka.bootstrap.servers": self.broker.bootstrap_for("KERBEROS"),
            "kafka.security.protocol": "SASL_PLAINTEXT",
            "kafka.sasl.kerberos.service.name": "kafka",
        }
        more = {f"kafka.{name.replace('_', '.')}": text for name, text in more.items()}
        return options(given | more, "kerberised")


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


def test_without_a_ticket_planning_says_what_to_do(
    kerberised: Kerberised, environ: Environ, tmp_path: Path
) -> None:
    environ(KRB5CCNAME=f"FILE:{tmp_path}/none")
    with pytest.raises(AuthenticationError, match=r"no ticket for kafka@127\.0\.0\.1: .*kinit on every host"):
        write(kerberised.options())


def test_a_ticket_in_the_cache_is_used_and_another_service_is_named(kerberised: Kerberised) -> None:
    kerberised.kdc.log_in("alice", kerberised.keytab)
    assert write(kerberised.options()).records == 1000
    with pytest.raises(AuthenticationError, match=r"no ticket for other@127\.0\.0\.1"):
        write(kerberised.options(sasl_kerberos_service_name="other"))


def test_a_keytab_of_the_jaas_options_is_used(
    kerberised: Kerberised, environ: Environ, tmp_path: Path
) -> None:
    environ(KRB5CCNAME=f"FILE:{tmp_path}/none")
    jaas = (
        f'{MODULE} useKeyTab=true keyTab="{kerberised.keytab}" principal="alice@{REALM}" serviceName="kafka";'
    )
    assert write(kerberised.options(sasl_jaas_config=jaas)).records == 1000
    assert not (tmp_path / "none").exists()
