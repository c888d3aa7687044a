"""Each mechanism says, byte for byte, what kafka-python's says to the same broker; and its preparation."""

from __future__ import annotations

import base64
import socket
import threading
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from kafka.net.sasl.gssapi import SaslMechanismGSSAPI
from kafka.net.sasl.oauth import AbstractTokenProvider, SaslMechanismOAuth
from kafka.net.sasl.plain import SaslMechanismPlain
from kafka.net.sasl.scram import ScramClient

from kafka_sink.errors import AuthenticationError
from kafka_sink.secret import Secret
from kafka_sink.security import sasl
from kafka_sink.security.sasl import Preparation, Security
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

NAME, PASSWORD = "us=er,ü", "pässword"


def said(mechanism: Any, *challenges: bytes) -> list[bytes | None]:
    """What kafka-python's mechanism sends, None at its end."""
    found: list[bytes | None] = [mechanism.auth_bytes()]
    for challenge in challenges:
        mechanism.receive(challenge)
        found.append(None if mechanism.is_done() else mechanism.auth_bytes())
    return found


def ours(exchange: sasl.SaslExchange, *challenges: bytes) -> list[bytes | None]:
    return [exchange.first(), *map(exchange.respond, challenges)]


def test_plain() -> None:
    theirs = SaslMechanismPlain(sasl_plain_username=NAME, sasl_plain_password=PASSWORD)
    assert ours(sasl.plain(NAME, Secret(PASSWORD)), b"") == said(theirs, b"")


@pytest.mark.parametrize("extensions", [{}, {"logicalCluster": "lkc-1", "identityPoolId": "pool"}])
def test_oauthbearer(extensions: dict[str, str]) -> None:
    class Provider(AbstractTokenProvider):  # type: ignore[misc]
        def token(self) -> str:
            return "a.b.c"

        def extensions(self) -> dict[str, str]:
            return extensions

    theirs = SaslMechanismOAuth(sasl_oauth_token_provider=Provider())
    exchange = sasl.oauthbearer(Secret("a.b.c"), extensions.items())
    assert exchange.first() == theirs.auth_bytes()
    assert exchange.respond(b"") is None


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_scram(mechanism: str) -> None:
    nonce = "f" * 32
    theirs = ScramClient(NAME.replace("=", "=3D").replace(",", "=2C"), PASSWORD, mechanism)
    theirs.nonce = nonce.encode()
    challenge = b"r=" + nonce.encode() + b"more,s=c2FsdHNhbHQ=,i=4096"
    expected = [theirs.first_message()]
    theirs.process_server_first_message(challenge)
    expected.append(theirs.final_message())
    final = b"v=" + base64.b64encode(theirs.server_signature)

    def exchange(password: str) -> sasl.SaslExchange:
        return sasl.scram(mechanism, NAME, Secret(password), lambda: nonce)

    for ending in (b"", b",x=y"):
        assert ours(exchange(PASSWORD), challenge, final + ending) == [*expected, None]
    refused = exchange(PASSWORD + "x")
    ours(refused, challenge)
    with pytest.raises(AuthenticationError, match="does not know the password"):
        refused.respond(final)
    # An exchange that has failed stays so.
    with pytest.raises(AuthenticationError):
        refused.respond(final)


def test_scram_takes_no_nonce_of_another() -> None:
    exchange = sasl.scram("SCRAM-SHA-256", "u", Secret(PASSWORD))
    exchange.first()
    with pytest.raises(AuthenticationError, match="not one of this mechanism"):
        exchange.respond(b"r=" + b"0" * 40 + b",s=c2FsdA==,i=4096")


class Context:
    """A security context that is complete after so many steps; it wraps by adding one byte."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    @property
    def complete(self) -> bool:
        return self.left <= 0

    def step(self, token: bytes | None) -> bytes | None:
        self.left -= 1
        # The last step of a client often has nothing to send.
        return None if self.complete else b"T" + (token or b"")

    def unwrap(self, message: bytes) -> Any:
        return SimpleNamespace(message=message[1:])

    def wrap(self, message: bytes, encrypt: bool) -> Any:
        assert not encrypt
        return SimpleNamespace(message=b"W" + message)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_kerberos(steps: int, modules: Modules) -> None:
    name = SimpleNamespace(canonicalize=lambda kind: "name")
    gssapi = SimpleNamespace(
        Name=lambda *_, **__: name,
        NameType=SimpleNamespace(hostbased_service=1),
        MechType=SimpleNamespace(kerberos=1),
        SecurityContext=lambda **_: Context(steps),
        exceptions=SimpleNamespace(GSSError=OSError),
    )
    modules(gssapi=gssapi)
    theirs = SaslMechanismGSSAPI(sasl_kerberos_service_name="kafka", host="h")
    challenges = [*[b"token"] * (steps - 1), b"U\x07\0\x10\0", b""]
    exchange = sasl.kerberos(KerberosSettings("kafka"), "h")
    assert ours(exchange, *challenges) == said(theirs, *challenges)
    refused = sasl.kerberos(KerberosSettings("kafka"), "h")
    ours(refused, *challenges[:-1])
    with pytest.raises(AuthenticationError):
        refused.respond(b"more")
    with pytest.raises(AuthenticationError):
        ours(sasl.kerberos(KerberosSettings("kafka"), "h"), *challenges[:-2], b"U")


# -- preparations end with a context and an exchange, or with an error that says on which host ---------


def prepared(settings: SecuritySettings) -> Preparation:
    ended = threading.Event()
    preparation = Security(settings).begin("broker.test", ended.set)
    assert ended.wait(20)
    assert preparation.done
    return preparation


def login(settings: SaslSettings) -> SecuritySettings:
    return SecuritySettings("SASL_PLAINTEXT", None, settings)


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_passwords_are_prepared(mechanism: str) -> None:
    found = prepared(login(SaslSettings(mechanism, "u", Secret("p"))))
    assert found.error is None
    assert found.context is None
    assert found.exchange is not None
    assert found.exchange.mechanism == mechanism
    assert "p" not in repr(found.exchange).replace("SaslExchange", "")


def test_what_this_host_lacks_is_said_with_its_name() -> None:
    store = Store("kafka.ssl.truststore.location", "PEM", "/nowhere/ca.pem")
    found = prepared(SecuritySettings("SSL", TlsSettings(store)))
    assert isinstance(found.error, AuthenticationError)
    assert "/nowhere/ca.pem cannot be read" in str(found.error)
    assert f"(on host {socket.gethostname()})" in str(found.error)


def test_a_missing_package_is_named_with_its_extra(modules: Modules) -> None:
    modules(gssapi=None)
    found = prepared(login(SaslSettings("GSSAPI", kerberos=KerberosSettings("kafka"))))
    assert isinstance(found.error, AuthenticationError)
    assert "pip install gssapi" in str(found.error)


def test_an_endpoint_that_is_away_is_no_final_error_and_carries_no_frames() -> None:
    tokens = TokenSettings(
        url="http://127.0.0.1:1/", client_id="c", client_secret=Secret("s"), retry_backoff_s=0.0
    )
    found = prepared(login(SaslSettings("OAUTHBEARER", tokens=tokens)))
    assert isinstance(found.error, TokenUnavailableError)
    assert found.error.__traceback__ is None
    assert found.error.__context__ is None


def test_a_bug_in_preparing_ends_it_with_its_class_alone(modules: Modules) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("hunter2")

    modules(
        gssapi=SimpleNamespace(Name=fail, NameType=mock.Mock(), exceptions=SimpleNamespace(GSSError=OSError))
    )
    found = prepared(login(SaslSettings("GSSAPI", kerberos=KerberosSettings("kafka"))))
    assert isinstance(found.error, AuthenticationError)
    assert "RuntimeError" in str(found.error)
    assert "hunter2" not in str(found.error)
