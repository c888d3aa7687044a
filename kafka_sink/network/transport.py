"""The non-blocking byte stream to a broker without TLS, and look-ups of hosts.

``getaddrinfo`` blocks for as long as the system's resolver takes: 5 to 40 s without a name server, and all
partitions would wait for one broker's name. So each look-up has its own thread. It is a daemon, so one that
hangs ends with the process; its connection starts no second look-up meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from kafka_sink.network.wire import Buffer

if TYPE_CHECKING:
    from kafka_sink.options import SinkOptions

# l_onoff, l_linger: closing resets the connection.
_NO_LINGER = struct.pack("ii", 1, 0)
# Results of connect() while it is in progress. EWOULDBLOCK means a full backlog of a local address.
_UNDER_WAY = (0, errno.EINPROGRESS, errno.EWOULDBLOCK)

SocketAddress = tuple[socket.AddressFamily, tuple[object, ...]]
Resolver = Callable[[str, int, int], list[SocketAddress]]


class PlaintextTransport:
    """A TCP socket, as a stream that never blocks; TLS is one, too. The constructor starts to connect. It and
    any method but ``close`` raise OSError when the stream is broken.

    ``held_bytes``: bytes that the stream itself has to write: of a TLS handshake or key update, or what
    ``send`` accepted and TLS has encrypted. ``buffered``: it holds received bytes that no selector can see.
    """

    held_bytes = 0
    buffered = False

    def __init__(self, address: SocketAddress, options: SinkOptions) -> None:
        family, place = address
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setblocking(False)
            # Nagle's algorithm would delay the end of a request until the previous segment is acknowledged.
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Set before connecting, because the handshake fixes the window scale.
            for option, size in (
                (socket.SO_SNDBUF, options.send_buffer_bytes),
                (socket.SO_RCVBUF, options.receive_buffer_bytes),
            ):
                if size >= 0:
                    self._socket.setsockopt(socket.SOL_SOCKET, option, size)
            code = self._socket.connect_ex(place)
            if code not in _UNDER_WAY:
                raise OSError(code, os.strerror(code))
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def connected(self) -> None:
        """Call when the socket is first writable."""
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))

    def handshake(self) -> bool:
        """Continue the handshake that precedes Kafka's first byte; True once it is done, here at once: TCP's
        is over. TLS raises AuthenticationError if a certificate is rejected."""
        return True

    def flush(self) -> None:
        """Write bytes that ``send`` accepted and the stream still holds: here none."""

    def send(self, buffers: Sequence[Buffer]) -> int:
        """Write as much as fits now of at most 1,024 buffers, without copying them. Returns the number of
        bytes, possibly 0."""
        try:
            return self._socket.sendmsg(buffers)
        except (BlockingIOError, InterruptedError):
            return 0

    def receive_into(self, buffer: memoryview) -> int | None:
        """Number of bytes read, 0 at the end of the stream, None if nothing is available."""
        try:
            return self._socket.recv_into(buffer)
        except (BlockingIOError, InterruptedError):
            return None

    def close(self) -> None:
        self._socket.close()

    def abort(self) -> None:
        """End the stream and drop what has not reached the peer."""
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self._socket.close()


def resolve_host(host: str, port: int, flags: int) -> list[SocketAddress]:
    """A host's addresses, with getaddrinfo's flags. Raises OSError."""
    if "\0" in host:
        # Python passes on what comes before it: another host than the one that was named.
        raise OSError(f"{host!r} holds a zero byte")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError:
        if flags:  # no number, whatever else it is
            raise OSError("not numeric") from None
        raise
    return [(family, address) for family, _, _, _, address in found]


def start_lookup(
    host: str, port: int, canonical: bool, notify: Callable[[], None], resolve: Resolver = resolve_host
) -> Future[list[SocketAddress]]:
    """Start to resolve a name, which has one address or more; another thread calls ``notify`` at the end.

    The look-up of a numeric address is done on return. ``canonical`` resolves the host's canonical name
    instead (client.dns.lookup=resolve_canonical_bootstrap_servers_only).
    """
    lookup: Future[list[SocketAddress]] = Future()
    try:
        lookup.set_result(resolve(host, port, socket.AI_NUMERICHOST))
        return lookup
    except OSError:
        pass  # a name

    def run() -> None:
        try:
            found = resolve(_canonical_name(host, port) if canonical else host, port, 0)
            problem = "" if found else f"{host} has no address"
        except UnicodeError as error:  # a label that is empty or longer than 63 characters
            problem = f"{host!r} is not a host name: {error}"
        except Exception as error:  # noqa: BLE001 - otherwise the connection would never be tried again
            problem = f"cannot resolve {host}: {error}"
        if problem:
            lookup.set_exception(OSError(problem))
        else:
            lookup.set_result(found)
        notify()

    threading.Thread(target=run, name=f"kafka-chunked-dns-{host}", daemon=True).start()
    return lookup


def _canonical_name(host: str, port: int) -> str:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_CANONNAME)
    return next((name for _, _, _, name, _ in found if name), host)
