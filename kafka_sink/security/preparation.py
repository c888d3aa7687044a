"""What a connection needs before it is made, found off the sender's thread: TLS context and SASL exchange.

Files are read, tokens and tickets fetched: each may take seconds. A thread that hangs is a daemon and ends
with the process, and its connection asks for no second one meanwhile.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from kafka_sink.errors import AuthenticationError, KafkaSinkError
from kafka_sink.security.settings import SecuritySettings

# What a protocol needs is imported when it is used: most clusters need none of it.
if TYPE_CHECKING:
    import ssl

    from kafka_sink.security.aws import IamLogin
    from kafka_sink.security.sasl import SaslExchange
    from kafka_sink.security.tls_context import TlsContexts


class Preparation:
    """Under way until ``done``, which is set last, after ``error`` or the other two."""

    def __init__(self) -> None:
        self.done = False
        self.error: Exception | None = None
        self.context: ssl.SSLContext | None = None
        self.exchange: SaslExchange | None = None


class Security:
    """The security of one set of options: made once, asked for each connection."""

    def __init__(self, settings: SecuritySettings) -> None:
        self.settings = settings
        self._contexts: TlsContexts | None = None
        self._iam: IamLogin | None = None
        if settings.tls is not None:
            from kafka_sink.security.tls_context import TlsContexts

            self._contexts = TlsContexts(settings.tls)
        if settings.sasl is not None and settings.sasl.iam is not None:
            from kafka_sink.security.aws import IamLogin

            self._iam = IamLogin(settings.sasl.iam)

    @property
    def needs_preparation(self) -> bool:
        """False where connections are in clear and without a login."""
        return self.settings.tls is not None or self.settings.sasl is not None

    def check(self) -> None:
        """Read all files once, but for those of tokens. Raises ConfigurationError."""
        if self._contexts is not None:
            self._contexts.current()
        tokens = None if self.settings.sasl is None else self.settings.sasl.tokens
        if tokens is not None and tokens.assertion is not None:
            from kafka_sink.security.token import assertion_of

            assertion_of(tokens.assertion, time.time())

    def begin(self, host: str, notify: Callable[[], None]) -> Preparation:
        """Start to prepare a connection to this host; ``notify`` is called, on another thread, when it is
        done."""
        preparation = Preparation()
        arguments = (preparation, host, notify)
        threading.Thread(
            target=self._run, args=arguments, name=f"kafka-chunked-login-{host}", daemon=True
        ).start()
        return preparation

    def _run(self, preparation: Preparation, host: str, notify: Callable[[], None]) -> None:
        try:
            if self._contexts is not None:
                preparation.context = self._contexts.current()
            if self.settings.sasl is not None:
                from kafka_sink.security import sasl

                iam = None if self._iam is None else self._iam.exchange
                preparation.exchange = sasl.exchange(self.settings.sasl, host, iam)
        except KafkaSinkError as error:
            # Executors have files, packages and roles of their own, which the driver cannot check.
            preparation.error = AuthenticationError(f"{error} (on host {socket.gethostname()})")
        except OSError as error:
            # Its frames know what was sent to whom.
            preparation.error = error.with_traceback(None)
        except Exception as error:  # noqa: BLE001 - otherwise the cause of a missing connection would be lost
            preparation.error = AuthenticationError(
                f"preparing the login failed with {type(error).__name__} (on host {socket.gethostname()})"
            )
        finally:
            preparation.done = True
            notify()
