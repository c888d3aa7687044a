"""Kerberos (GSSAPI) with a KDC and a broker of this test: by ticket cache, by keytab, and without either.

Skipped where MIT's KDC or the package gssapi is missing. ``make kerberos`` fetches both.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("gssapi", exc_type=ImportError)

import gssapi

from kafka_sink.errors import AuthenticationError
from kafka_sink.options import SinkOptions
from kafka_sink.security.sasl import kerberos_credentials
from kafka_sink.security.settings import KerberosSettings
from local_kafka import LocalBroker
from tests.support.ports import free_port
from tests.support.security.secured_broker import options, write
from tests.support.surroundings import Environ
from tests.support.waiting import until

REALM = "TEST.LOCAL"
# MIT's KDC (Debian: krb5-kdc, krb5-user).
if not all(map(shutil.which, ("krb5kdc", "kdb5_util", "kadmin.local", "kinit"))):
    pytest.skip("no KDC is installed", allow_module_level=True)

MODULE = "com.sun.security.auth.module.Krb5LoginModule required"


class KeyDistribution:
    """MIT's krb5kdc in a folder, on a port of 127.0.0.1: a context manager. ``environ`` is what clients need
    in theirs; ``conf`` is the krb5.conf."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.conf = folder / "krb5.conf"
        self.environ = {"KRB5_CONFIG": str(self.conf), "KRB5CCNAME": f"FILE:{folder}/tickets"}
        self._kdc: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> KeyDistribution:
        port = free_port()
        plugins = Path(shutil.which("krb5kdc") or "/usr/sbin/krb5kdc").parents[1]
        found = next(plugins.glob("lib/**/krb5/plugins/kdb"), None)
        modules = f"[dbmodules]\n db_module_dir = {found}\n" if found else ""
        self.conf.write_text(
            f"[libdefaults]\n default_realm = {REALM}\n dns_lookup_kdc = false\n rdns = false\n"
            " dns_canonicalize_hostname = false\n udp_preference_limit = 1\n"
            f"[realms]\n {REALM} = {{\n  kdc = 127.0.0.1:{port}\n }}\n{modules}"
        )
        (self._folder / "kdc.conf").write_text(
            f"[kdcdefaults]\n kdc_listen = 127.0.0.1:{port}\n kdc_tcp_listen = 127.0.0.1:{port}\n"
            f"[realms]\n {REALM} = {{\n  database_name = {self._folder}/principal\n"
            f"  key_stash_file = {self._folder}/stash\n  max_life = 1h\n }}\n"
        )
        self._tool("kdb5_util", "create", "-s", "-r", REALM, "-P", "master")
        command = [shutil.which("krb5kdc") or "krb5kdc", "-n"]
        self._kdc = subprocess.Popen(command, env=self._environment())

        def listens() -> bool:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port), 1).close()
                return True
            return False

        until(listens, "a KDC that listens", 20, 0.05)
        return self

    def __exit__(self, *_: object) -> None:
        if self._kdc is not None:
            self._kdc.kill()
            self._kdc.wait()

    def keytab(self, principal: str) -> Path:
        """A new principal with a random key, and the file that holds it."""
        path = self._folder / f"{principal.replace('/', '-')}.keytab"
        self._tool("kadmin.local", "-q", f"addprinc -randkey {principal}")
        self._tool("kadmin.local", "-q", f"ktadd -k {path} {principal}")
        return path

    def log_in(self, principal: str, keytab: Path) -> None:
        """A ticket in the cache that ``environ`` names."""
        self._tool("kinit", "-k", "-t", str(keytab), principal)

    def _environment(self) -> dict[str, str]:
        return {**os.environ, **self.environ, "KRB5_KDC_PROFILE": str(self._folder / "kdc.conf")}

    def _tool(self, *command: str) -> None:
        done = subprocess.run(
            command, env=self._environment(), capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stderr or done.stdout}")


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
def kerberised(_programs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kerberised]:
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
    with pytest.raises(
        AuthenticationError, match=r"no ticket for kafka@127\.0\.0\.1: .*run kinit on every host"
    ):
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


def test_second_keytab_in_one_process_logs_in_as_its_own_principal(
    kerberised: Kerberised, environ: Environ, tmp_path: Path
) -> None:
    """Catches: all keytabs shared one ticket cache, so a worker's second job was the first one's user."""
    environ(KRB5CCNAME=f"FILE:{tmp_path}/none")
    keytabs = {name: kerberised.kdc.keytab(name) for name in ("carol", "dave")}
    replaced = tmp_path / "replaced.keytab"

    def user(keytab: Path, principal: str = "") -> str:
        return str(kerberos_credentials(gssapi, KerberosSettings("kafka", principal, str(keytab))).name)

    for name, keytab in keytabs.items():
        assert user(keytab) == f"{name}@{REALM}"
        assert user(keytab, f"{name}@{REALM}") == f"{name}@{REALM}"
        replaced.write_bytes(keytab.read_bytes())
        assert user(replaced) == f"{name}@{REALM}", "the file's keys are another principal's now"
