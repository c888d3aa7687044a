"""HTTP requests that carry credentials: to token endpoints and to a schema registry.

Requests are bounded in time and size. Redirections are not followed and the environment's proxies are not
used, because the credentials would go along. Compressed responses are not requested, so a response is as long
as what the server sent.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit


class HttpClient:
    """One connection, which stays open between requests until ``close``. Not thread-safe.

    ``url`` is an http:// or https:// URL. The path of a request is appended to its path. ``bound`` is the
    option that sets the requests' ``timeout_s``, for error messages.
    """

    def __init__(
        self, url: str, context: Callable[[], ssl.SSLContext], connect_timeout_s: float, bound: str
    ) -> None:
        parts = urlsplit(url)
        self._secure = parts.scheme.lower() == "https"
        self.host = parts.hostname or ""
        self._port = parts.port or (443 if self._secure else 80)
        self._path = parts.path + (f"?{parts.query}" if parts.query else "")
        # Logs contain the URL without its query, which may hold secrets.
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
        """Return the status and the body. Raises OSError (also for TLS and timeouts), HTTPException and
        ValueError. Their texts may repeat headers, so show them through ``printable`` only."""
        try:
            connection = self._connection or self._connected(timeout_s)
            # Only `_deadline` ends an exchange, because its error contains the option that sets the bound.
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
            raise OSError(f"the response has more than {max_bytes} bytes")
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
    """End the exchange on a socket after this many seconds, and raise TimeoutError if that was necessary. The
    socket's own timeout starts again with each byte, and http.client reads any number of '100 Continue'."""
    exceeded = threading.Event()

    def cut() -> None:
        exceeded.set()
        # SSLSocket.shutdown would drop the TLS state while the other thread reads from it. The socket may
        # already be closed.
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
