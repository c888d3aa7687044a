"""An HTTP server of a test: it responds what the test says, and keeps the requests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server:
    """Responds to each request with status, headers and body; keeps the requests."""

    def __init__(self) -> None:
        self.respond: Callable[[BaseHTTPRequestHandler], tuple[int, dict[str, str], bytes]] = lambda _: (
            200,
            {},
            b"{}",
        )
        self.requests: list[tuple[str, str, dict[str, str], bytes]] = []
        self.connections = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

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
                """Nothing: tests look at the requests."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def served() -> Iterator[Server]:
    running = Server()
    try:
        yield running
    finally:
        running.close()
