"""TLS contexts follow their files, and a key never touches a disk."""

from __future__ import annotations

import errno
import os
import ssl
from pathlib import Path
from typing import Any

import pytest

from kafka_sink.errors import ConfigurationError
from kafka_sink.security.key_material import read_key
from kafka_sink.security.settings import Store, TlsSettings
from kafka_sink.security.tls_context import TlsContexts, load_key
from tests.support.security.certificates import Authority
from tests.support.surroundings import Environ


def test_renewed_files_are_used_by_new_connections_and_damaged_ones_are_not(tmp_path: Path) -> None:
    authority, path = Authority(), tmp_path / "client.pem"
    authority.issue("one").pem_file(path)
    contexts = TlsContexts(TlsSettings(key=Store("kafka.ssl.keystore.location", "PEM", str(path))))
    first = contexts.current()
    assert contexts.current() is first
    authority.issue("two").pem_file(path)
    os.utime(path, ns=(1, 1))
    second = contexts.current()
    assert second is not first
    path.write_bytes(b"half a fil")
    assert contexts.current() is second
    path.unlink()
    assert contexts.current() is second
    authority.issue("three").pem_file(path)
    assert contexts.current() not in (first, second)


def test_no_key_touches_a_disk(tmp_path: Path, environ: Environ) -> None:
    client = Authority().issue("client").pem_file(tmp_path / "c.pem")
    (tmp_path / "tmp").mkdir()
    environ(TMPDIR=str(tmp_path / "tmp"))
    opened: list[str] = []

    class Watched(ssl.SSLContext):
        def load_cert_chain(self, certificate: Any, key: Any = None, password: Any = None) -> None:
            opened.extend([certificate, key])
            super().load_cert_chain(certificate, key, password)

    key = read_key(Store("kafka.ssl.keystore.location", "PEM", str(client)))
    load_key(Watched(ssl.PROTOCOL_TLS_CLIENT), key, "kafka.ssl.keystore.location")
    assert len(opened) == 2
    assert all(path.startswith("/dev/fd/") for path in opened)
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_key_needs_dev_fd(tmp_path: Path) -> None:
    """Where /proc is not mounted, the error was only "No such file or directory"."""
    client = Authority().issue("client").pem_file(tmp_path / "c.pem")

    class Without(ssl.SSLContext):
        def load_cert_chain(self, certificate: Any, key: Any = None, password: Any = None) -> None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    key = read_key(Store("kafka.ssl.keystore.location", "PEM", str(client)))
    with pytest.raises(ConfigurationError, match=r"'kafka\.ssl\.keystore\.location': a key"):
        load_key(Without(ssl.PROTOCOL_TLS_CLIENT), key, "kafka.ssl.keystore.location")
