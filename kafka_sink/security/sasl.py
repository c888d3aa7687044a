"""SASL exchanges, and the steps of each mechanism except AWS_MSK_IAM.

An exchange takes and returns bytes. It gets everything that it needs when it is made, and never blocks later.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import operator
import os
import re
import secrets
from collections.abc import Callable, Generator, Iterable
from typing import Any

from kafka_sink.errors import AuthenticationError
from kafka_sink.printable import printable
from kafka_sink.secret import Secret
from kafka_sink.security.settings import KerberosSettings

# The minimum of RFC 5802, which Java's client also enforces. With fewer iterations, passwords could soon be
# guessed from the proof that a forged broker would receive.
_MIN_ITERATIONS = 4096
# The sender thread computes the iterations; this many take some 60 ms. Kafka allows at most 16,384 (KIP-554).
_MAX_ITERATIONS = 131_072
# The server's first message. The pattern is as strict as Java's, because Python's int() accepts " 1" and
# "1_0".
_SERVER_FIRST = re.compile(
    rb"r=(?P<nonce>[\x21-\x2b\x2d-\x7e]+),s=(?P<salt>[A-Za-z0-9+/]+={0,2}),i=(?P<iterations>[0-9]{1,9})"
    rb"(?:,[a-hj-ln-qt-zA-Z]=[\x21-\x2b\x2d-\x7e]+)*"
)
# The GSSAPI layer without integrity or confidentiality.
_NO_LAYER = 1


# Yields the client's messages, receives the broker's, and returns when the login has succeeded.
SaslSteps = Generator[bytes, bytes, None]


class SaslExchange:
    """One login on one connection, made of the steps of a mechanism.

    The steps may raise any error for an invalid message; the methods turn it into an AuthenticationError.
    ``remedy`` says what to check if a broker refuses the login.
    """

    def __init__(
        self, mechanism: str, steps: SaslSteps, remedy: str = "check the user name and the password"
    ) -> None:
        self.mechanism = mechanism
        self.remedy = remedy
        self._steps = steps
        self._is_over = False

    def __repr__(self) -> str:
        return f"SaslExchange({self.mechanism})"

    def first(self) -> bytes:
        """Return the client's first message."""
        try:
            return next(self._steps)
        except Exception as error:  # noqa: BLE001 - a UnicodeEncodeError contains the password that it is about
            problem = type(error).__name__
        raise AuthenticationError(f"SASL {self.mechanism}: the login cannot be encoded ({problem})")

    def respond(self, challenge: bytes) -> bytes | None:
        """Return the response to a broker's challenge, or None if the exchange has ended."""
        problem = "the login has ended"
        # A generator that has failed or returned raises StopIteration at its next use, as if the login had
        # succeeded.
        if not self._is_over:
            self._is_over = True
            try:
                following = self._steps.send(challenge)
            except StopIteration:
                return None
            except AuthenticationError:
                raise
            except Exception as error:  # noqa: BLE001 - binascii.Error, IndexError ... of a wrong message
                problem = type(error).__name__
            else:
                self._is_over = False
                return following
        # This is raised outside of the handler, because the cause's frames hold passwords.
        raise AuthenticationError(
            f"SASL {self.mechanism}: the broker's message is invalid for this mechanism ({problem}): it does "
            "not know the password, or it is not a Kafka broker"
        )


def plain(username: str, password: Secret) -> SaslSteps:
    """The steps of PLAIN (RFC 4616)."""
    challenge = yield f"{username}\0{username}\0{password.reveal()}".encode()
    _require_silence(challenge)


def _require_silence(challenge: bytes) -> None:
    """Raise ValueError for a message at the end of a mechanism whose brokers end with an empty one."""
    if challenge:
        raise ValueError


def scram(
    mechanism: str, username: str, password: Secret, new_nonce: Callable[[], str] = secrets.token_hex
) -> SaslSteps:
    """The steps of SCRAM (RFC 5802). Strings are not prepared (SASLprep), as in Java's client."""
    nonce = new_nonce().encode()
    algorithm = mechanism.removeprefix("SCRAM-").replace("-", "").lower()

    def mac(key: bytes, message: bytes) -> bytes:
        return hmac.digest(key, message, algorithm)

    bare = b"n=" + username.replace("=", "=3D").replace(",", "=2C").encode() + b",r=" + nonce
    challenge = yield b"n,," + bare
    server_nonce, salt, iterations = _server_first(mechanism, challenge)
    if not server_nonce.startswith(nonce):
        raise ValueError
    salted = hashlib.pbkdf2_hmac(algorithm, password.reveal().encode(), salt, iterations)
    final = b"c=biws,r=" + server_nonce
    signed = b",".join((bare, challenge, final))
    key = mac(salted, b"Client Key")
    proof = map(operator.xor, key, mac(hashlib.new(algorithm, key).digest(), signed))
    challenge = yield final + b",p=" + base64.b64encode(bytes(proof))
    # Only a peer that knows the password or its stored key can compute this.
    expected = b"v=" + base64.b64encode(mac(mac(salted, b"Server Key"), signed))
    if not hmac.compare_digest(challenge.partition(b",")[0], expected):
        raise ValueError


def _server_first(mechanism: str, challenge: bytes) -> tuple[bytes, bytes, int]:
    """Return the nonce, the salt and the number of iterations. Raises AuthenticationError."""
    match = _SERVER_FIRST.fullmatch(challenge)
    if match is None:
        raise AuthenticationError(
            f"SASL {mechanism}: the broker's message is invalid for this mechanism (RFC 5802)"
        )
    iterations = int(match["iterations"])
    if iterations < _MIN_ITERATIONS:
        raise AuthenticationError(
            f"SASL {mechanism}: the broker asks for {iterations} iterations; fewer than {_MIN_ITERATIONS} "
            "are not safe"
        )
    if iterations > _MAX_ITERATIONS:
        raise AuthenticationError(
            f"SASL {mechanism}: the broker asks for {iterations} iterations, more than the maximum of "
            f"{_MAX_ITERATIONS}: set this user's password again with fewer (Kafka's maximum is 16384)"
        )
    return match["nonce"], base64.b64decode(match["salt"]), iterations


def oauthbearer(token: Secret, extensions: Iterable[tuple[str, str]]) -> SaslSteps:
    """The steps of OAUTHBEARER (RFC 7628) with a token that has been fetched, and SASL extensions as names
    and values."""
    named = "".join(f"\1{name}={value}" for name, value in extensions)
    challenge = yield f"n,,\1auth=Bearer {token.reveal()}{named}\1\1".encode()
    while challenge:
        # The broker has refused the token. It sends its final error after this message.
        challenge = yield b"\1"


def kerberos(settings: KerberosSettings, host: str) -> SaslSteps:
    """Return the steps of GSSAPI with one broker. Blocks while a ticket is fetched. Raises
    AuthenticationError."""
    try:
        # The library is optional.
        import gssapi
    except (ImportError, OSError):
        raise AuthenticationError(
            "SASL GSSAPI needs the package gssapi and the system's Kerberos library: pip install "
            "gssapi on driver and executors"
        ) from None
    target = f"{settings.service_name}@{host}"
    try:
        name = gssapi.Name(target, name_type=gssapi.NameType.hostbased_service)
        context = gssapi.SecurityContext(
            name=name.canonicalize(gssapi.MechType.kerberos),
            usage="initiate",
            creds=kerberos_credentials(gssapi, settings),
        )
        return _gssapi(context, context.step(None), target)
    except gssapi.exceptions.GSSError as error:
        problem = printable(" ".join(str(error).split()))
    raise AuthenticationError(
        f"SASL GSSAPI: no ticket for {target}: {problem}; run kinit on every host, or "
        "set a keytab in kafka.sasl.jaas.config (useKeyTab=true keyTab=... principal=...)"
    )


def _gssapi(context: Any, token: bytes | None, target: str) -> SaslSteps:
    """The steps of GSSAPI (RFC 4752). ``token`` is the context's first message."""
    while not context.complete:
        challenge = yield token or b""
        token = context.step(challenge)
    challenge = yield token or b""
    # The broker sends the layers that it offers, and the largest message, which is repeated. Kafka has no
    # layers.
    offered = context.unwrap(challenge).message
    chosen = bytes([offered[0] & _NO_LAYER]) + offered[1:] + target.encode()
    challenge = yield context.wrap(chosen, False).message
    _require_silence(challenge)


def kerberos_credentials(gssapi: Any, settings: KerberosSettings) -> Any:
    """Return the credentials of the configured keytab or principal, or None for the user's default."""
    if not settings.keytab and not settings.principal:
        return None
    name = gssapi.Name(settings.principal, gssapi.NameType.kerberos_principal) if settings.principal else None
    store = None
    if settings.keytab:
        store = {"client_keytab": settings.keytab, "ccache": _ticket_cache(settings)}
    return gssapi.Credentials(name=name, usage="initiate", store=store)


def _ticket_cache(settings: KerberosSettings) -> str:
    """The cache for the tickets of one keytab and principal, in this process's memory.

    A worker runs tasks of several jobs. If they shared a cache, the second job would find the first job's
    ticket and log in as its user. If the keytab's file is replaced, the new file gets a cache of its own.
    """
    file: tuple[int, ...] = ()
    with contextlib.suppress(OSError):
        status = os.stat(settings.keytab.removeprefix("FILE:"))
        file = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    login = repr((settings.keytab, settings.principal, file))
    return f"MEMORY:kafka-chunked-{hashlib.sha256(login.encode(errors='surrogatepass')).hexdigest()}"
