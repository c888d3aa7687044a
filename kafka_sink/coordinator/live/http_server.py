"""A small HTTP server for pages that are computed on demand: GET and HEAD, one request for each connection.

Its clients cost bounded memory and time, even if they misbehave: it limits the number of connections, the
requests in a second, the size of a request, and the times to send the request and to read the response. If
all connections are in use, it closes the one that has been open longest.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field

_log = logging.getLogger(__name__)
# The header must match as a whole: a browser sends `[::1].evil.example` for a site of that name.
_HOST = re.compile(r"host:\s*(?:\[(?P<address>[0-9a-f:.]+)\]|(?P<name>[^\[\]:\s]+))(?::[0-9]{1,5})?\s*")


@dataclass(frozen=True, slots=True)
class Response:
    """A response. ``body`` is the whole content."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: str = "200 OK"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class HttpBounds:
    """``request_s``: the time to receive a request. ``response_s``: the time to send the response."""

    connections: int = 32
    accepts_per_s: float = 100.0
    request_bytes: int = 8192
    request_s: float = 5.0
    response_s: float = 10.0


Page = Callable[[], Awaitable[Response]]

_SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class HttpServer:
    """Serves ``pages``, by path, on the running loop. ``hosts``: the names that clients may use for it.

    A request with another name in its Host header gets no page: it may come from a foreign site whose name
    resolves to this address (DNS rebinding). IP addresses are accepted, because they are not names.
    """

    def __init__(
        self,
        listening: socket.socket,
        pages: Mapping[str, Page],
        hosts: Collection[str],
        bounds: HttpBounds | None = None,
    ) -> None:
        self._listening = listening
        self._pages = pages
        self._hosts = {host.lower() for host in hosts}
        self._bounds = bounds or HttpBounds()
        # Connections in the order in which they were accepted.
        self._open: dict[asyncio.Task[None], socket.socket] = {}
        self._loop = asyncio.get_running_loop()
        listening.setblocking(False)
        self._await_connection()

    def close(self) -> None:
        """End all connections."""
        self._loop.remove_reader(self._listening)
        self._listening.close()
        for task in self._open:
            task.cancel()

    def _await_connection(self) -> None:
        if self._listening.fileno() >= 0:
            self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        """Accept a connection. ``sock_accept``, when cancelled, would lose a connection just accepted."""
        self._loop.remove_reader(self._listening)
        pause_s = 1.0 / self._bounds.accepts_per_s
        try:
            sock, _ = self._listening.accept()
        except BlockingIOError:  # its client has left
            pass
        except OSError as error:
            _log.warning("The live view could not accept a connection: %s", error)
            pause_s = 1.0
        else:
            while len(self._open) >= self._bounds.connections:
                oldest = next(iter(self._open))
                ended = self._open.pop(oldest)
                # The loop also serves tasks, and the next one may get this descriptor's number. So the loop
                # must forget it at once, before the cancelled connection does so.
                self._loop.remove_reader(ended)
                self._loop.remove_writer(ended)
                ended.close()
                oldest.cancel()
            task = self._loop.create_task(self._serve(sock))
            self._open[task] = sock
            task.add_done_callback(self._forget)
        # The connections of a flood wait in the backlog, and then at their sender.
        self._loop.call_later(pause_s, self._await_connection)

    def _forget(self, task: asyncio.Task[None]) -> None:
        sock = self._open.pop(task, None)
        if sock is not None:
            sock.close()

    async def _serve(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        try:
            head = await asyncio.wait_for(self._read(sock), self._bounds.request_s)
            content = encode(head, await asyncio.wait_for(self._respond(head), self._bounds.response_s))
            await asyncio.wait_for(self._loop.sock_sendall(sock, content), self._bounds.response_s)
            sock.shutdown(socket.SHUT_WR)
            # Unread bytes would turn the close into a reset, and the client might miss the response.
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._loop.sock_recv(sock, self._bounds.request_bytes), 1.0)
        except (OSError, asyncio.TimeoutError, ValueError) as error:
            _log.debug("A connection to the live view ended: %r", error)

    async def _read(self, sock: socket.socket) -> bytes:
        """The request up to its empty line, or as much of it as the bound allows."""
        held = b""
        while b"\r\n\r\n" not in held and len(held) <= self._bounds.request_bytes:
            data = await self._loop.sock_recv(sock, self._bounds.request_bytes)
            if not data:
                raise ConnectionError("it closed the connection within a request")
            held += data
        return held

    async def _respond(self, head: bytes) -> Response:
        if len(head) > self._bounds.request_bytes:
            return _refusal("431 Request Header Fields Too Large")
        line, *lines = head.decode("latin-1").split("\r\n")
        method, _, target = line.partition(" ")
        target, _, version = target.rpartition(" ")
        if not version.startswith("HTTP/1."):
            return _refusal("400 Bad Request")
        if method not in ("GET", "HEAD"):
            return _refusal("405 Method Not Allowed", Allow="GET, HEAD")
        if not self._accepts_host(lines):
            return _refusal("403 Forbidden", "open the live view by its IP address or this host's name")
        page = self._pages.get(target.partition("?")[0])
        if page is None:
            return _refusal("404 Not Found")
        try:
            return await page()
        except Exception:  # noqa: BLE001 - a bug in a page must not end the server, nor go unnoticed
            _log.exception("The live view could not create a page")
            return _refusal("500 Internal Server Error", "see the coordinator's log")

    def _accepts_host(self, lines: Iterable[str]) -> bool:
        """Whether the Host header in these lines contains an IP address or one of ``hosts``."""
        header = next((line for line in map(str.lower, lines) if line.startswith("host:")), "")
        host = _HOST.fullmatch(header)
        if host is None or host["name"] in self._hosts:
            return host is not None
        try:
            ipaddress.ip_address(host["address"] or host["name"])
        except ValueError:
            return False
        return True


def _refusal(status: str, text: str = "", **headers: str) -> Response:
    return Response(f"{status}{': ' if text else ''}{text}\n".encode(), status=status, headers=headers)


def encode(head: bytes, response: Response) -> bytes:
    """The bytes of a response. A HEAD request gets its headers only."""
    headers = {
        "Content-Type": response.content_type,
        "Content-Length": str(len(response.body)),
        "Connection": "close",
        **_SECURITY_HEADERS,
        **response.headers,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    body = b"" if head.startswith(b"HEAD ") else response.body
    return f"HTTP/1.1 {response.status}\r\n{lines}\r\n".encode("latin-1") + body
