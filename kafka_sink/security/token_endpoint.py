"""Tokens by OAuth 2.0 client credentials (RFC 6749, 4.4; KIP-768)."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import ssl
import threading
import time
from typing import Any
from urllib.parse import quote_plus, urlencode, urlsplit

from kafka_sink.errors import AuthenticationError
from kafka_sink.printable import printable
from kafka_sink.secret import HIDDEN, Secret
from kafka_sink.security.openssl_names import explain
from kafka_sink.security.settings import TokenSettings
from kafka_sink.security.tls_context import TlsContexts
from kafka_sink.security.token import Token, TokenUnavailableError, from_text

_MAX_BYTES = 1024 * 1024
# Status codes of RFC 6749 and of proxies after which no retry can help.
_REFUSALS = (400, 401, 403, 404, 405)
# A hundred years. NaN and infinity are numbers to Python's JSON; NaN is not below anything.
_MAX_LIFETIME_S = 100 * 365 * 86_400


class _Deadline:
    """Ends an exchange on a socket. The socket's own timeout starts again with each byte, and http.client
    reads any number of '100 Continue'. Raises TimeoutError at its end where it was exceeded."""

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self._sock = sock
        self._seconds = seconds
        self._exceeded = threading.Event()
        self._timer = threading.Timer(seconds, self._cut)
        self._timer.daemon = True

    def __enter__(self) -> None:
        self._timer.start()

    def _cut(self) -> None:
        self._exceeded.set()
        try:
            # Not SSLSocket's, which takes the TLS state away from the thread that reads.
            socket.socket.shutdown(self._sock, socket.SHUT_RDWR)
        except OSError:
            pass  # it is closed already

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()
        if self._exceeded.is_set():
            raise TimeoutError(
                f"no response within {self._seconds:.0f} s; kafka.sasl.login.read.timeout.ms sets this bound"
            ) from None


class TokenEndpoint:
    """Asks with a connection of its own each time: it happens once in a token's life.

    Redirections are not followed, as the secret would go along, nor are proxies of the environment used.
    """

    def __init__(self, settings: TokenSettings) -> None:
        self._settings = settings
        self._contexts = TlsContexts(settings.tls)
        parts = urlsplit(settings.url)
        self._secure = parts.scheme.lower() == "https"
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._secure else 80)
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._shown = f"{self._host}:{self._port}{parts.path}"

    def fetch(self) -> Token:
        """Raise AuthenticationError where the endpoint refuses, TokenUnavailableError else."""
        try:
            status, body = self._ask()
        except ssl.SSLError as error:
            problem: Exception = AuthenticationError(
                f"OAUTHBEARER: TLS with the token endpoint {self._shown} failed: {explain(error, self._host)}"
            )
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = str(error) or type(error).__name__
            problem = TokenUnavailableError(
                f"the token endpoint {self._shown} cannot be reached: {printable(reason)}"
            )
        else:
            return self._read(status, body)
        raise problem

    def _ask(self) -> tuple[int, bytes]:
        settings = self._settings
        if self._secure:
            context = self._contexts.current()
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                self._host, self._port, timeout=settings.connect_timeout_s, context=context
            )
        else:
            connection = http.client.HTTPConnection(
                self._host, self._port, timeout=settings.connect_timeout_s
            )
        try:
            connection.connect()
            connection.sock.settimeout(settings.read_timeout_s)
            form = {"grant_type": "client_credentials"}
            if settings.scope:
                form["scope"] = settings.scope
            headers = {
                "Accept": "application/json",
                "Cache-Control": "no-cache",
                "Content-Type": "application/x-www-form-urlencoded",
                "Authorization": f"Basic {self._credentials()}",
            }
            with _Deadline(connection.sock, settings.read_timeout_s):
                connection.request("POST", self._path, urlencode(form), headers)
                response = connection.getresponse()
                return response.status, response.read(_MAX_BYTES)
        finally:
            connection.close()

    def _credentials(self) -> str:
        settings = self._settings
        secret = settings.client_secret or Secret("")
        pair = (settings.client_id, secret.reveal())
        if settings.urlencode:
            pair = (quote_plus(pair[0]), quote_plus(pair[1]))
        return base64.b64encode(":".join(pair).encode()).decode("ascii")

    def _read(self, status: int, body: bytes) -> Token:
        response = _json(body)
        if status != 200:
            words = [str(response[name]) for name in ("error", "error_description") if response.get(name)]
            text = f"the token endpoint {self._shown} responded {status}"
            text += f" ({self._clean(': '.join(words))})" if words else ""
            if status in _REFUSALS:
                raise AuthenticationError(
                    f"OAUTHBEARER: {text}: check client id, client secret, scope and URL"
                )
            raise TokenUnavailableError(text)
        token = response.get("access_token")
        if not isinstance(token, str):
            raise AuthenticationError(f"OAUTHBEARER: the token endpoint {self._shown} gave no access_token")
        found = from_text(token)
        lifetime = response.get("expires_in")
        if found.expires_at_s is not None or not isinstance(lifetime, int | float):
            return found
        if not abs(lifetime) < _MAX_LIFETIME_S:
            return found
        return Token(found.text, time.time() + float(lifetime))

    def _clean(self, text: str) -> str:
        """What the endpoint says, without the secret that it may repeat and without forged lines of a log."""
        secret = self._settings.client_secret
        if secret:
            text = text.replace(secret.reveal(), HIDDEN)
        return printable(text)


def _json(body: bytes) -> dict[str, Any]:
    try:
        response = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return response if isinstance(response, dict) else {}
