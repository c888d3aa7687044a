"""HTTP requests that carry a login: to token endpoints, and to a schema registry.

They are bounded in time and size. Redirections are not followed and proxies of the environment are not used,
as the login would go along. Nothing is asked for compressed, so what is read is as long as what was sent.
"""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import ssl


class HttpClient:
    """One connection, kept between requests until ``close``. Not thread-safe.

    ``url``: http:// or https:// with a path to which those of requests are added. ``bound``: the option that
    sets ``timeout_s`` of requests, for messages.
    """

    def __init__(
        self, url: str, context: Callable[[], ssl.SSLContext], connect_timeout_s: float, bound: str
    ) -> None:
        parts = urlsplit(url)
        self._secure = parts.scheme.lower() == "https"
        self.host = parts.hostname or ""
        self._port = parts.port or (443 if self._secure else 80)
        self._path = parts.path + (f"?{parts.query}" if parts.query else "")
        # Without the query, which may hold what is not for logs.
        self.shown = f"{self.host}:{self._port}{parts.path}"
        self._context = context
        self._connect_timeout_s = connect_timeout_s
        self._bound = bound
        self._connection: http.client.HTTPConnection | None = None

    def request(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        body: str | None,
        *,
        timeout_s: float,
        max_bytes: int,
    ) -> tuple[int, bytes]:
        """Status and body. Raises OSError (TLS and time-outs, too), HTTPException and ValueError, whose texts
        may repeat headers: show them by ``printable`` only."""
        try:
            connection = self._connection or self._connected(timeout_s)
            # The deadline alone ends an exchange, as only its error names the option.
            connection.sock.settimeout(None)
            with _deadline(connection.sock, timeout_s, self._bound):
                connection.request(method, self._path + path or "/", body, dict(headers))
                response = connection.getresponse()
                content = response.read(max_bytes + 1)
        except BaseException:
            self.close()
            raise
        if len(content) > max_bytes:
            self.close()
            raise OSError(f"a response of more than {max_bytes} bytes")
        if response.will_close:
            self.close()
        return response.status, content

    def _connected(self, timeout_s: float) -> http.client.HTTPConnection:
        timeout_s = min(timeout_s, self._connect_timeout_s)
        if self._secure:
            self._connection = http.client.HTTPSConnection(
                self.host, self._port, timeout=timeout_s, context=self._context()
            )
        else:
            self._connection = http.client.HTTPConnection(self.host, self._port, timeout=timeout_s)
        self._connection.connect()
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


@contextmanager
def _deadline(sock: socket.socket, seconds: float, bound: str) -> Iterator[None]:
    """Ends an exchange on a socket. The socket's own timeout starts again with each byte, and http.client
    reads any number of '100 Continue'. Raises TimeoutError at its end where it was exceeded."""
    exceeded = threading.Event()

    def cut() -> None:
        exceeded.set()
        # Not SSLSocket's, which takes the TLS state away from the thread that reads. It may be closed by now.
        with suppress(OSError):
            socket.socket.shutdown(sock, socket.SHUT_RDWR)

    timer = threading.Timer(seconds, cut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if exceeded.is_set():
            raise TimeoutError(f"no response within {seconds:.0f} s; {bound} sets this bound") from None
