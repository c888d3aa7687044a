"""A registry behind TLS and a login, as production has them: a proxy in front of the real one."""

from __future__ import annotations

import base64
import ssl
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType

from tests.support.security.certificates import Authority

USER, PASSWORD = "schema-user", "schema-secret"


class RegistryGate:
    """Within a ``with`` block; ``url`` is https, ``ca`` the file that trusts it."""

    def __init__(self, registry: str, folder: Path) -> None:
        authority = Authority()
        self.ca = authority.pem_file(folder / "ca.pem")
        files = authority.issue("registry", "127.0.0.1").pem_file(folder / "gate.pem")
        self._registry = registry
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(files)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.requests = 0

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> RegistryGate:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        gate = self
        expected = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self._pass_on()

            def do_GET(self) -> None:
                self._pass_on()

            def _pass_on(self) -> None:
                gate.requests += 1
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.headers.get("Authorization") != expected:
                    self._answer(401, b'{"error_code": 40101, "message": "Unauthorized"}')
                    return
                request = urllib.request.Request(
                    gate._registry + self.path, body or None, method=self.command
                )
                request.add_header("Content-Type", self.headers.get("Content-Type", "application/json"))
                try:
                    with urllib.request.urlopen(request, timeout=60) as response:
                        self._answer(response.status, response.read())
                except urllib.error.HTTPError as error:
                    self._answer(error.code, error.read())

            def _answer(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        return Handler
