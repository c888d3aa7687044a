"""SASL exchanges as bytes in, bytes out, through kafka-python's mechanisms.

A mechanism is made with all it needs, off the sender's thread; from then on nothing in it blocks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from kafka.net.sasl.abc import SaslMechanism
from kafka.net.sasl.plain import SaslMechanismPlain
from kafka.net.sasl.scram import SaslMechanismScram

from kafka_sink.errors import AuthenticationError
from kafka_sink.printable import printable
from kafka_sink.secret import Secret
from kafka_sink.security.settings import KerberosSettings, SaslSettings

# RFC 5802; Java accepts no fewer, either: a forged broker would get a proof from which passwords are soon
# guessed.
_MIN_ITERATIONS = 4096
# They are computed on the sender's thread, which takes some 60 ms. Kafka lets nobody set more than 16,384
# (KIP-554).
_MAX_ITERATIONS = 131_072
# The server's first message, as strict as Java's. kafka-python takes the last of doubled attributes, and
# numbers such as " 1" and "1_0": what is checked must be what it uses.
_SERVER_FIRST = re.compile(
    rb"r=[\x21-\x2b\x2d-\x7e]+,s=[A-Za-z0-9+/]+={0,2},i=(?P<iterations>[0-9]{1,9})"
    rb"(?:,[a-hj-ln-qt-zA-Z]=[\x21-\x2b\x2d-\x7e]+)*"
)


class SaslExchange(Protocol):
    """One login on one connection. Raises AuthenticationError for a message that no broker should send."""

    mechanism: str
    # What to check when a broker refuses the login.
    remedy: str

    def first(self) -> bytes:
        """What the client begins with."""

    def respond(self, challenge: bytes) -> bytes | None:
        """The response to a broker's challenge; None where the exchange is over."""


class MechanismExchange:
    """By a mechanism with kafka-python's interface."""

    def __init__(
        self, mechanism: str, driven: SaslMechanism, remedy: str = "check the user name and the password"
    ) -> None:
        self.mechanism = mechanism
        self.remedy = remedy
        self._driven = driven

    def __repr__(self) -> str:
        return f"MechanismExchange({self.mechanism})"

    def first(self) -> bytes:
        try:
            return bytes(self._driven.auth_bytes())
        except Exception as error:  # noqa: BLE001 - a UnicodeEncodeError holds the password that it is about
            problem = type(error).__name__
        raise AuthenticationError(f"SASL {self.mechanism}: the login cannot be encoded ({problem})")

    def respond(self, challenge: bytes) -> bytes | None:
        try:
            self._driven.receive(challenge)
            if not self._driven.is_done():
                return bytes(self._driven.auth_bytes())
            is_authenticated = bool(self._driven.is_authenticated())
        except Exception as error:  # noqa: BLE001 - KeyError, ValueError, binascii.Error ... of a wrong message
            problem = type(error).__name__
        else:
            if is_authenticated:
                return None
            problem = "not authenticated"
        # Raised outside of the handler: the cause's frames hold passwords.
        raise AuthenticationError(
            f"SASL {self.mechanism}: the broker's message is not one of this mechanism ({problem}); it does "
            "not know the password, or is no Kafka broker"
        )


class ScramExchange(MechanismExchange):
    """As kafka-python's, with bounds for the number of iterations."""

    def __init__(self, mechanism: str, driven: SaslMechanism) -> None:
        super().__init__(mechanism, driven)
        self._is_first = True

    def respond(self, challenge: bytes) -> bytes | None:
        if self._is_first:
            self._check_iterations(challenge)
            self._is_first = False
        return super().respond(challenge)

    def _check_iterations(self, challenge: bytes) -> None:
        match = _SERVER_FIRST.fullmatch(challenge)
        if match is None:
            raise AuthenticationError(
                f"SASL {self.mechanism}: the broker's message is not one of this mechanism (RFC 5802)"
            )
        iterations = int(match["iterations"])
        if iterations < _MIN_ITERATIONS:
            raise AuthenticationError(
                f"SASL {self.mechanism}: the broker asks for {iterations} iterations; fewer than "
                f"{_MIN_ITERATIONS} are not safe"
            )
        if iterations > _MAX_ITERATIONS:
            raise AuthenticationError(
                f"SASL {self.mechanism}: the broker asks for {iterations} iterations, and at most "
                f"{_MAX_ITERATIONS} are computed: set this user's password again with fewer (Kafka's maximum "
                "is 16384)"
            )


def exchange(settings: SaslSettings, host: str, iam: Callable[[str], SaslExchange] | None) -> SaslExchange:
    """A login at one broker. Blocks while a token, a ticket or AWS credentials are fetched.

    ``iam`` makes AWS's login for a host. Raises AuthenticationError where there are none.
    """
    if settings.tokens is not None:
        # It brings Python's HTTP client, which other logins need not load.
        from kafka_sink.security.token import token_source

        token = token_source(settings.tokens).get()
        return oauthbearer(token.text, settings.tokens.extensions)
    if iam is not None:
        return iam(host)
    if settings.kerberos is not None:
        return kerberos(settings.kerberos, host)
    assert settings.password is not None
    if settings.mechanism == "PLAIN":
        return plain(settings.username, settings.password)
    return scram(settings.mechanism, settings.username, settings.password)


def plain(username: str, password: Secret) -> SaslExchange:
    driven = SaslMechanismPlain(sasl_plain_username=username, sasl_plain_password=password.reveal())
    return MechanismExchange("PLAIN", driven)


def scram(mechanism: str, username: str, password: Secret) -> SaslExchange:
    """RFC 5802, without its preparation of strings, as in Java's client."""
    driven = SaslMechanismScram(
        # kafka-python leaves this to its callers.
        sasl_plain_username=username.replace("=", "=3D").replace(",", "=2C"),
        sasl_plain_password=password.reveal(),
        sasl_mechanism=mechanism,
    )
    return ScramExchange(mechanism, driven)


class _Bearer:
    """RFC 7628, with SASL extensions as names and values. kafka-python's logs what the broker responds."""

    def __init__(self, token: Secret, extensions: Iterable[tuple[str, str]]) -> None:
        self._token = token
        self._extensions = tuple(extensions)
        self._challenge: bytes | None = None

    def auth_bytes(self) -> bytes:
        if self._challenge:
            # The broker has refused the token, and says so once it has this.
            return b"\1"
        extensions = "".join(f"\1{name}={value}" for name, value in self._extensions)
        return f"n,,\1auth=Bearer {self._token.reveal()}{extensions}\1\1".encode()

    def receive(self, challenge: bytes) -> None:
        self._challenge = challenge

    def is_done(self) -> bool:
        return self._challenge == b""

    def is_authenticated(self) -> bool:
        return self._challenge == b""


def oauthbearer(token: Secret, extensions: Iterable[tuple[str, str]]) -> SaslExchange:
    """RFC 7628 with a token that was fetched before."""
    remedy = "check the token's issuer, audience and lifetime"
    return MechanismExchange("OAUTHBEARER", _Bearer(token, extensions), remedy)


def kerberos(settings: KerberosSettings, host: str) -> SaslExchange:
    """A login for one broker; blocks while a ticket is fetched. Raises AuthenticationError."""
    try:
        import gssapi
    except (ImportError, OSError):
        raise AuthenticationError(
            "SASL GSSAPI needs the package gssapi and the system's Kerberos library: pip install "
            "gssapi on driver and executors"
        ) from None
    from kafka.net.sasl.gssapi import SaslMechanismGSSAPI

    class Mechanism(SaslMechanismGSSAPI):  # type: ignore[misc]  # kafka-python has no annotations
        """With credentials of a keytab where one is named."""

        def __init__(self) -> None:
            self._is_done = self._is_authenticated = False
            self.auth_id = f"{settings.service_name}@{host}"
            name = gssapi.Name(self.auth_id, name_type=gssapi.NameType.hostbased_service)
            self.gssapi_name = name.canonicalize(gssapi.MechType.kerberos)
            self._client_ctx = gssapi.SecurityContext(
                name=self.gssapi_name, usage="initiate", creds=_kerberos_credentials(gssapi, settings)
            )
            self._next_token = self._client_ctx.step(None)

    try:
        remedy = "check the principal, and kafka.sasl.kerberos.service.name"
        return MechanismExchange("GSSAPI", Mechanism(), remedy)
    except gssapi.exceptions.GSSError as error:
        problem = printable(" ".join(str(error).split()))
    raise AuthenticationError(
        f"SASL GSSAPI: no ticket for {settings.service_name}@{host}: {problem}; kinit on every host, or "
        "name a keytab in kafka.sasl.jaas.config (useKeyTab=true keyTab=... principal=...)"
    )


def _kerberos_credentials(gssapi: Any, settings: KerberosSettings) -> Any:
    if not settings.keytab and not settings.principal:
        return None
    name = gssapi.Name(settings.principal, gssapi.NameType.kerberos_principal) if settings.principal else None
    # Tickets of a keytab stay in this process.
    store = {"client_keytab": settings.keytab, "ccache": "MEMORY:kafka-chunked"} if settings.keytab else None
    return gssapi.Credentials(name=name, usage="initiate", store=store)
