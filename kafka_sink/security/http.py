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
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
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
        body: bytes | None,
        *,
        timeout_s: float,
        max_bytes: int,
    ) -> tuple[int, bytes]:
        """Return the status and the body. Raises OSError (also for TLS and timeouts), HTTPException and
        ValueError. Their texts may repeat headers, so show them through ``printable`` only."""
        connection = self._connection = self._connection or self._new_connection(timeout_s)
        exchange: Future[tuple[int, bytes, bool]] = Future()

        def run() -> None:
            try:
                if connection.sock is None:
                    connection.connect()
                    if connection is not self._connection:
                        raise TimeoutError
                # Only the wait below ends an exchange, because its error has the option that sets the bound.
                connection.sock.settimeout(None)
                connection.request(method, self._path + path or "/", body, dict(headers))
                with connection.getresponse() as response:
                    content = response.read(max_bytes + 1)
                exchange.set_result((response.status, content, response.will_close))
            except BaseException as error:  # noqa: BLE001 - raised again below
                connection.close()
                # The frames hold the request, with its credentials.
                exchange.set_exception(error.with_traceback(None))

        # Nothing else limits the time of a name lookup. And the socket's own timeout starts again with each
        # byte, while http.client reads any number of '100 Continue'.
        threading.Thread(target=run, name="kafka-chunked-http", daemon=True).start()
        if not wait([exchange], timeout_s).done:
            self._connection = None
            # SSLSocket.shutdown would drop the TLS state while the thread reads from it. The socket may not
            # exist yet, or already be closed.
            with suppress(OSError, TypeError):
                socket.socket.shutdown(connection.sock, socket.SHUT_RDWR)
            raise TimeoutError(f"no response within {timeout_s:.0f} s; {self._bound} sets this bound")
        try:
            status, content, is_last = exchange.result()
            if len(content) > max_bytes:
                raise OSError(f"the response has more than {max_bytes} bytes")
        except BaseException:
            self.close()
            raise
        if is_last:
            self.close()
        return status, content

    def _new_connection(self, timeout_s: float) -> http.client.HTTPConnection:
        timeout_s = min(timeout_s, self._connect_timeout_s)
        if not self._secure:
            return http.client.HTTPConnection(self.host, self._port, timeout=timeout_s)
        context = self._context()
        return http.client.HTTPSConnection(self.host, self._port, timeout=timeout_s, context=context)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
