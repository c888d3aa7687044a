"""A Kerberos KDC of a test's own: MIT's krb5kdc in a folder, on a port of 127.0.0.1."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
from pathlib import Path

from tests.support.ports import free_port
from tests.support.waiting import until

REALM = "TEST.LOCAL"
TOOLS = ("krb5kdc", "kdb5_util", "kadmin.local", "kinit")


def is_available() -> bool:
    """Whether MIT's KDC is installed here (Debian: krb5-kdc, krb5-user)."""
    return all(shutil.which(tool) for tool in TOOLS)


class KeyDistribution:
    """A context manager. ``environ`` is what clients need in theirs; ``conf`` is the krb5.conf."""

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
