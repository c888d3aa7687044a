"""An HTTP server for tests: it responds as the test says, and keeps the requests."""

from __future__ import annotations

import ssl
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self


Response = tuple[int, dict[str, str], bytes]


class _Quiet(ThreadingHTTPServer):
    """Does not print the errors of clients that close their connections, as many tests let them do."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class Server:
    """Responds to each request with status, headers and body; keeps the requests. A context manager;
    ``context`` makes it HTTPS."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.respond: Callable[[BaseHTTPRequestHandler], Response] = lambda _: (200, {}, b"{}")
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.connections = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            # Otherwise the body of each response waits 40 ms until the client has acknowledged the headers.
            disable_nagle_algorithm = True

            def setup(self) -> None:
                outer.connections += 1
                super().setup()

            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                outer.requests.append((self.command, self.path, dict(self.headers), body))
                status, headers, content = outer.respond(self)
                self.send_response(status)
                for name, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_POST = do_CONNECT = _answer  # noqa: N815 - named by the library

            def log_message(self, *_: Any) -> None:
                """Log nothing: tests look at the requests."""

        self._server = _Quiet(("127.0.0.1", 0), Handler)
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = f"{'https' if context else 'http'}://127.0.0.1:{self._server.server_port}"
        # The server checks at this interval whether it was shut down.
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
