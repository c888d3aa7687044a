"""A preparation ends with a context and an exchange, or with an error that contains the host's name."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from unittest import mock

from kafka_sink.errors import AuthenticationError
from kafka_sink.secret import Secret
from kafka_sink.security.preparation import Prepared, Security
from kafka_sink.security.settings import (
    KerberosSettings,
    SaslSettings,
    SecuritySettings,
    Store,
    TlsSettings,
    TokenSettings,
)
from kafka_sink.security.token import TokenUnavailableError
from tests.support.surroundings import Modules


def prepared(login: SaslSettings | None = None, tls: TlsSettings | None = None) -> Future[Prepared]:
    ended = threading.Event()
    settings = SecuritySettings("SASL_PLAINTEXT" if login else "SSL", tls, login)
    preparation = Security(settings).begin("broker.test", ended.set)
    assert ended.wait(20)
    assert preparation.done()
    return preparation


def refused(login: SaslSettings | None = None, tls: TlsSettings | None = None) -> str:
    """The text of the preparation's final error."""
    error = prepared(login, tls).exception()
    assert isinstance(error, AuthenticationError)
    return str(error)


KERBEROS = SaslSettings("GSSAPI", kerberos=KerberosSettings("kafka"))


def test_passwords_are_prepared() -> None:
    for mechanism in ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"):
        context, exchange = prepared(SaslSettings(mechanism, "u", Secret("p"))).result()
        assert context is None
        assert exchange is not None
        assert exchange.mechanism == mechanism
        assert "p" not in repr(exchange).replace("SaslExchange", "")


def test_a_token_is_prepared_with_a_remedy() -> None:
    tokens = TokenSettings(provider="tests.support.security.providers.fixed")
    _, exchange = prepared(SaslSettings("OAUTHBEARER", tokens=tokens)).result()
    assert exchange is not None
    assert "fixed-token" in exchange.first().decode()
    assert "audience" in exchange.remedy


def test_errors_of_this_host_contain_its_name(modules: Modules) -> None:
    text = refused(tls=TlsSettings(Store("kafka.ssl.truststore.location", "PEM", "/nowhere/ca.pem")))
    assert "/nowhere/ca.pem cannot be read" in text
    assert f"(on host {socket.gethostname()})" in text
    modules(gssapi=None)
    assert "pip install gssapi" in refused(KERBEROS)


def test_error_of_an_unreachable_endpoint_is_not_final_and_carries_no_frames() -> None:
    tokens = TokenSettings(
        url="http://127.0.0.1:1/", client_id="c", client_secret=Secret("s"), retry_backoff_s=0.0
    )
    error = prepared(SaslSettings("OAUTHBEARER", tokens=tokens)).exception()
    assert isinstance(error, TokenUnavailableError)
    assert error.__traceback__ is None
    assert error.__context__ is None


def test_a_bug_in_preparing_ends_it_with_its_class_alone(modules: Modules) -> None:
    exceptions = SimpleNamespace(GSSError=OSError)
    # Panics of libraries in Rust are no Exception.
    for kind in (RuntimeError, SystemExit):
        fail = mock.Mock(side_effect=kind("hunter2"))
        modules(gssapi=SimpleNamespace(Name=fail, NameType=mock.Mock(), exceptions=exceptions))
        text = refused(KERBEROS)
        assert kind.__name__ in text
        assert "hunter2" not in text
