"""Each mechanism says, byte for byte, what kafka-python's says to the same broker."""

from __future__ import annotations

import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kafka.net.sasl.gssapi import SaslMechanismGSSAPI
from kafka.net.sasl.oauth import AbstractTokenProvider, SaslMechanismOAuth
from kafka.net.sasl.plain import SaslMechanismPlain
from kafka.net.sasl.scram import ScramClient

from kafka_sink.errors import AuthenticationError
from kafka_sink.secret import Secret
from kafka_sink.security import sasl
from kafka_sink.security.sasl import SaslExchange
from kafka_sink.security.settings import (
    KerberosSettings,
)
from tests.support.surroundings import Modules

NAME, PASSWORD = "us=er,ü", "pässword"


def said(mechanism: Any, *challenges: bytes) -> list[bytes | None]:
    """What kafka-python's mechanism sends, None at its end."""
    found: list[bytes | None] = [mechanism.auth_bytes()]
    for challenge in challenges:
        mechanism.receive(challenge)
        found.append(None if mechanism.is_done() else mechanism.auth_bytes())
    return found


def ours(exchange: SaslExchange, *challenges: bytes) -> list[bytes | None]:
    return [exchange.first(), *map(exchange.respond, challenges)]


def test_plain() -> None:
    theirs = SaslMechanismPlain(sasl_plain_username=NAME, sasl_plain_password=PASSWORD)
    assert ours(SaslExchange("PLAIN", sasl.plain(NAME, Secret(PASSWORD))), b"") == said(theirs, b"")


def test_oauthbearer() -> None:
    given: dict[str, str] = {}

    class Provider(AbstractTokenProvider):  # type: ignore[misc]
        def token(self) -> str:
            return "a.b.c"

        def extensions(self) -> dict[str, str]:
            return given

    for extensions in ({}, {"logicalCluster": "lkc-1", "identityPoolId": "pool"}):
        given = extensions
        theirs = SaslMechanismOAuth(sasl_oauth_token_provider=Provider())
        steps = sasl.oauthbearer(Secret("a.b.c"), extensions.items())
        assert ours(SaslExchange("OAUTHBEARER", steps), b"") == [theirs.auth_bytes(), None]


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

    def exchange(password: str) -> SaslExchange:
        return SaslExchange(mechanism, sasl.scram(mechanism, NAME, Secret(password), lambda: nonce))

    for ending in (b"", b",x=y"):
        assert ours(exchange(PASSWORD), challenge, final + ending) == [*expected, None]
    refused = exchange(PASSWORD + "x")
    ours(refused, challenge)
    # An exchange that has failed stays so.
    for problem in ("does not know the password", None):
        with pytest.raises(AuthenticationError, match=problem):
            refused.respond(final)
    with pytest.raises(AuthenticationError, match="is invalid for this mechanism"):
        ours(exchange(PASSWORD), challenge.replace(b"f" * 32, b"0" * 40))


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
    exchange, refused, damaged = (
        SaslExchange("GSSAPI", sasl.kerberos(KerberosSettings("kafka"), "h")) for _ in range(3)
    )
    assert ours(exchange, *challenges) == said(theirs, *challenges)
    ours(refused, *challenges[:-1])
    with pytest.raises(AuthenticationError):
        refused.respond(b"more")
    with pytest.raises(AuthenticationError):
        ours(damaged, *challenges[:-2], b"U")


def test_each_keytab_and_principal_has_a_ticket_cache_of_its_own(tmp_path: Path) -> None:
    """Catches: all shared one, so a worker's second job logged in as the first one's user. With a KDC:
    test_kerberos.py."""
    keytab = tmp_path / "a.keytab"
    keytab.write_bytes(b"alice")

    def cache(keytab: Path, principal: str) -> str:
        gssapi = SimpleNamespace(
            Name=lambda *_: None,
            NameType=SimpleNamespace(kerberos_principal=None),
            Credentials=lambda store, **_: store["ccache"],
        )
        found: str = sasl.kerberos_credentials(gssapi, KerberosSettings("kafka", principal, str(keytab)))
        assert found.startswith("MEMORY:"), "no other process sees the tickets"
        return found

    first = cache(keytab, "")
    assert cache(keytab, "") == first, "one ticket serves all connections"
    others = {cache(keytab, "alice"), cache(keytab, "bob"), cache(tmp_path / "b.keytab", "")}
    keytab.write_bytes(b"another")
    assert len({first, *others, cache(keytab, "")}) == 5
