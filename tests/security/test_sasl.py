"""Each mechanism says, byte for byte, what kafka-python's says to the same broker."""

from __future__ import annotations

import base64
import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from kafka.net.sasl.gssapi import SaslMechanismGSSAPI
from kafka.net.sasl.msk import AwsMskIamClient
from kafka.net.sasl.oauth import SaslMechanismOAuth
from kafka.net.sasl.plain import SaslMechanismPlain
from kafka.net.sasl.scram import SaslMechanismScram, ScramClient

from kafka_sink.errors import AuthenticationError
from kafka_sink.secret import Secret
from kafka_sink.security import sasl
from kafka_sink.security.aws import _signed
from kafka_sink.security.settings import KerberosSettings

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
    provider = SimpleNamespace(token=lambda: "a.b.c", extensions=lambda: extensions)
    theirs = object.__new__(SaslMechanismOAuth)
    theirs.token_provider = provider
    theirs._error = None
    exchange = sasl.oauthbearer(Secret("a.b.c"), extensions.items())
    assert exchange.first() == theirs.auth_bytes()
    assert exchange.respond(b"") is None


def server_final(client: ScramClient) -> bytes:
    return b"v=" + base64.b64encode(client.server_signature)


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_scram(mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nonce = "f" * 32
    monkeypatch.setattr("secrets.token_hex", lambda size: nonce)
    theirs = SaslMechanismScram(
        sasl_plain_username=NAME.replace("=", "=3D").replace(",", "=2C"),
        sasl_plain_password=PASSWORD,
        sasl_mechanism=mechanism,
    )
    theirs._scram_client.nonce = nonce.encode()
    challenge = b"r=" + nonce.encode() + b"more,s=c2FsdHNhbHQ=,i=4096"
    expected = said(theirs, challenge)
    final = server_final(theirs._scram_client)
    for ending in (b"", b",x=y"):
        exchange = sasl.scram(mechanism, NAME, Secret(PASSWORD))
        assert ours(exchange, challenge, final + ending) == [*expected, None]
    exchange = sasl.scram(mechanism, NAME, Secret(PASSWORD + "x"))
    ours(exchange, challenge)
    with pytest.raises(AuthenticationError, match="does not know the password"):
        exchange.respond(final)
    # An exchange that has failed stays so.
    with pytest.raises(AuthenticationError):
        exchange.respond(final)


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
def test_kerberos(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    name = SimpleNamespace(canonicalize=lambda kind: "name")
    gssapi = SimpleNamespace(
        Name=lambda *_, **__: name,
        NameType=SimpleNamespace(hostbased_service=1),
        MechType=SimpleNamespace(kerberos=1),
        SecurityContext=lambda **_: Context(steps),
        exceptions=SimpleNamespace(GSSError=OSError),
    )
    monkeypatch.setitem(sys.modules, "gssapi", gssapi)
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


@pytest.mark.parametrize("token", [None, "FwoGZXIvYXdzE//token=="])
def test_aws(token: str | None) -> None:
    host, region = "b-1.demo.abc123.c2.kafka.eu-west-1.amazonaws.com", "eu-west-1"
    credentials = SimpleNamespace(access_key="AKID", secret_key="key/+", token=token)
    found = json.loads(_signed(host, region, credentials))
    client = AwsMskIamClient(host, "AKID", "key/+", region, token)
    client.timestamp, client.datestamp = found["x-amz-date"], found["x-amz-date"][:8]
    assert {**json.loads(client.first_message()), "user-agent": "kafka-chunked"} == found
