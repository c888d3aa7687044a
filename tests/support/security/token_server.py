"""A token endpoint (RFC 6749) of a test: responses what the test says, keeps the requests."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any


class TokenServer:
    """A context manager. ``response`` gives status and body of each request; ``context`` makes it HTTPS."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.response: Callable[[], tuple[int, bytes]] = lambda: (200, b"{}")
        self.headers: dict[str, str] = {}
        self.requests: list[tuple[str, dict[str, str], str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                outer.requests.append((self.path, dict(self.headers), body))
                status, response = outer.response()
                self.send_response(status)
                for name, value in outer.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(response)

            def log_message(self, *_: Any) -> None:
                """Nothing: tests look at the requests."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if context is not None:
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        scheme = "http" if context is None else "https"
        self.url = f"{scheme}://127.0.0.1:{self._server.server_port}/oauth/token?a=b"
        # It looks that often whether it was shut down.
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def __enter__(self) -> TokenServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def gives(self, token: Callable[[], str], lifetime_s: int = 60) -> None:
        """From now on each request gets a token."""

        def response() -> tuple[int, bytes]:
            return 200, json.dumps({"access_token": token(), "expires_in": lifetime_s}).encode()

        self.response = response
