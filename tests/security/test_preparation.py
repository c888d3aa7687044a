"""Preparations end with a context and an exchange, or with an error that says on which host."""

from __future__ import annotations

import socket
import threading

import pytest

from kafka_sink.errors import AuthenticationError
from kafka_sink.secret import Secret
from kafka_sink.security.preparation import Preparation, Security
from kafka_sink.security.settings import (
    KerberosSettings,
    SaslSettings,
    SecuritySettings,
    Store,
    TlsSettings,
    TokenSettings,
)
from kafka_sink.security.token import TokenUnavailableError


def prepared(settings: SecuritySettings) -> Preparation:
    ended = threading.Event()
    preparation = Security(settings).begin("broker.test", ended.set)
    assert ended.wait(20)
    assert preparation.done
    return preparation


def sasl(settings: SaslSettings) -> SecuritySettings:
    return SecuritySettings("SASL_PLAINTEXT", None, settings)


def test_in_clear_without_a_login_nothing_is_prepared() -> None:
    assert not Security(SecuritySettings()).needs_preparation
    assert Security(SecuritySettings("SSL", TlsSettings())).needs_preparation


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_passwords_are_prepared(mechanism: str) -> None:
    found = prepared(sasl(SaslSettings(mechanism, "u", Secret("p"))))
    assert found.error is None
    assert found.context is None
    assert found.exchange is not None
    assert found.exchange.mechanism == mechanism
    assert "p" not in repr(found.exchange).replace("MechanismExchange", "").replace("ScramExchange", "")


def test_what_this_host_lacks_is_said_with_its_name() -> None:
    store = Store("kafka.ssl.truststore.location", "PEM", "/nowhere/ca.pem")
    found = prepared(SecuritySettings("SSL", TlsSettings(store)))
    assert isinstance(found.error, AuthenticationError)
    assert "/nowhere/ca.pem cannot be read" in str(found.error)
    assert f"(on host {socket.gethostname()})" in str(found.error)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gssapi", None)
    found = prepared(sasl(SaslSettings("GSSAPI", kerberos=KerberosSettings("kafka"))))
    assert isinstance(found.error, AuthenticationError)
    assert "pip install gssapi" in str(found.error)


def test_an_endpoint_that_is_away_is_no_final_error_and_carries_no_frames() -> None:
    tokens = TokenSettings(
        url="http://127.0.0.1:1/", client_id="c", client_secret=Secret("s"), retry_backoff_s=0.0
    )
    found = prepared(sasl(SaslSettings("OAUTHBEARER", tokens=tokens)))
    assert isinstance(found.error, TokenUnavailableError)
    assert found.error.__traceback__ is None
    assert found.error.__context__ is None


def test_a_bug_in_preparing_ends_it_with_its_class_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("hunter2")

    monkeypatch.setattr("kafka_sink.security.sasl.plain", fail)
    found = prepared(sasl(SaslSettings("PLAIN", "u", Secret("hunter2"))))
    assert isinstance(found.error, AuthenticationError)
    assert "RuntimeError" in str(found.error)
    assert "hunter2" not in str(found.error)
