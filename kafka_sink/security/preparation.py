"""Prepares connections off the sender thread: their TLS context and their SASL exchange."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeAlias

from kafka_sink.errors import AuthenticationError, KafkaSinkError
from kafka_sink.security.sasl import SaslExchange, SaslSteps, kerberos, oauthbearer, plain, scram
from kafka_sink.security.settings import SaslSettings, SecuritySettings
from kafka_sink.security.tls_context import TlsContexts

# The TLS context and the SASL exchange of a connection; None if the settings need none.
Prepared: TypeAlias = tuple[ssl.SSLContext | None, SaslExchange | None]


class Security:
    """The security of one set of options. It prepares every connection that uses them.

    Reading files and fetching tokens or tickets may take seconds, so each preparation has a thread of its own
    instead of the sender thread. Such a thread is a daemon, so it cannot keep the process alive if it hangs.
    Its connection then starts no second preparation.
    """

    def __init__(self, settings: SecuritySettings) -> None:
        self.settings = settings
        self._contexts = None if settings.tls is None else TlsContexts(settings.tls)
        # Starts the login with a host. All logins share the credentials that are looked up.
        self._iam_steps: Callable[[str], SaslSteps] | None = None
        if settings.sasl is not None and settings.sasl.iam is not None:
            from kafka_sink.security.aws import IamLogin

            self._iam_steps = IamLogin(settings.sasl.iam).steps

    def check(self) -> None:
        """Read all files once, except those of tokens. Raises ConfigurationError."""
        if self._contexts is not None:
            self._contexts.current()
        tokens = None if self.settings.sasl is None else self.settings.sasl.tokens
        if tokens is not None and tokens.assertion is not None:
            from kafka_sink.security.token import assertion_of

            assertion_of(tokens.assertion, time.time())

    def begin(self, host: str, notify: Callable[[], None]) -> Future[Prepared]:
        """Start to prepare a connection to this host. ``notify`` is called on another thread when the
        preparation has ended."""
        preparation: Future[Prepared] = Future()

        def run() -> None:
            try:
                preparation.set_result(self._prepared(host))
            except BaseException as error:  # noqa: BLE001 - otherwise the connection would never be tried again
                preparation.set_exception(_shown(error))
            notify()

        threading.Thread(target=run, name=f"kafka-chunked-login-{host}", daemon=True).start()
        return preparation

    def _prepared(self, host: str) -> Prepared:
        context = None if self._contexts is None else self._contexts.current()
        return context, None if self.settings.sasl is None else self._exchange(self.settings.sasl, host)

    def _exchange(self, settings: SaslSettings, host: str) -> SaslExchange:
        """Return a login with one broker. Blocks while a token, a ticket or AWS credentials are fetched, and
        raises AuthenticationError if there are none."""
        mechanism = settings.mechanism
        if settings.tokens is not None:
            from kafka_sink.security.token import token_source

            steps = oauthbearer(token_source(settings.tokens).get().text, settings.tokens.extensions)
            return SaslExchange(mechanism, steps, "check the token's issuer, audience and lifetime")
        if self._iam_steps is not None:
            remedy = "check that the role may kafka-cluster:Connect to this cluster"
            return SaslExchange(mechanism, self._iam_steps(host), remedy)
        if settings.kerberos is not None:
            remedy = "check the principal, and kafka.sasl.kerberos.service.name"
            return SaslExchange(mechanism, kerberos(settings.kerberos, host), remedy)
        assert settings.password is not None
        if mechanism == "PLAIN":
            return SaslExchange(mechanism, plain(settings.username, settings.password))
        return SaslExchange(mechanism, scram(mechanism, settings.username, settings.password))


def _shown(error: BaseException) -> Exception:
    """Return the error without secrets and with the host's name. Executors have their own files, packages and
    roles, which the driver cannot check."""
    where = f"(on host {socket.gethostname()})"
    if isinstance(error, KafkaSinkError):
        return AuthenticationError(f"{error} {where}")
    if isinstance(error, OSError):
        # The frames of its traceback hold the request with its credentials.
        return error.with_traceback(None)
    return AuthenticationError(f"preparing the login failed with {type(error).__name__} {where}")
