"""A token endpoint (RFC 6749) for tests: it responds as the test says, and keeps the requests."""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable

from tests.support.http_server import Server


class TokenServer(Server):
    """``response`` gives status and body of each request, next to ``headers``."""

    def __init__(self, context: ssl.SSLContext | None = None) -> None:
        self.response: Callable[[], tuple[int, bytes]] = lambda: (200, b"{}")
        self.headers: dict[str, str] = {}
        super().__init__(context)
        self.url += "/oauth/token?a=b"
        self.respond = self._respond

    def _respond(self, _: object) -> tuple[int, dict[str, str], bytes]:
        status, body = self.response()
        return status, self.headers, body

    def responds(self, status: int, body: bytes) -> None:
        """Respond to each request in this way from now on."""
        self.response = lambda: (status, body)

    def gives(self, token: Callable[[], str], lifetime_s: int = 60) -> None:
        """Respond to each request with a token from now on."""

        def response() -> tuple[int, bytes]:
            return 200, json.dumps({"access_token": token(), "expires_in": lifetime_s}).encode()

        self.response = response
