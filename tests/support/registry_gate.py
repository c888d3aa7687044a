"""A registry behind TLS and a login, as production has them: a proxy in front of the real one."""

from __future__ import annotations

import base64
import ssl
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from tests.support.http_server import Server
from tests.support.security.certificates import Authority

USER, PASSWORD = "schema-user", "schema-secret"
_LOGIN = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


class RegistryGate(Server):
    """``url`` is https, ``ca`` the file that trusts it."""

    def __init__(self, registry: str, folder: Path) -> None:
        authority = Authority()
        self.ca = authority.pem_file(folder / "ca.pem")
        self._registry = registry
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(authority.issue("registry", "127.0.0.1").pem_file(folder / "gate.pem"))
        super().__init__(context)
        self.respond = self._pass_on

    def _pass_on(self, handler: BaseHTTPRequestHandler) -> tuple[int, dict[str, str], bytes]:
        method, path, headers, body = self.requests[-1]
        kind = {"Content-Type": headers.get("Content-Type", "application/json")}
        if headers.get("Authorization") != _LOGIN:
            return 401, kind, b'{"error_code": 40101, "message": "Unauthorized"}'
        request = urllib.request.Request(self._registry + path, body or None, kind, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, kind, response.read()
        except urllib.error.HTTPError as error:
            return error.code, kind, error.read()
