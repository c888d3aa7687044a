"""The non-blocking byte stream to a broker without TLS, and lookups of hosts.

``getaddrinfo`` blocks for as long as the system's resolver takes, which is 5 to 40 s without a name server,
and all partitions would wait for one broker's name. So each lookup has its own thread. The thread is a
daemon, so a lookup that hangs ends with the process. Meanwhile its connection starts no second lookup.
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

from kafka_sink.network.wire import Buffer

# l_onoff and l_linger: closing the socket resets the connection.
_NO_LINGER = struct.pack("ii", 1, 0)
# Results of connect() while it is in progress. EWOULDBLOCK means that the backlog of a local address is full.
_UNDER_WAY = (0, errno.EINPROGRESS, errno.EWOULDBLOCK)

SocketAddress = tuple[socket.AddressFamily, tuple[object, ...]]


class PlaintextTransport:
    """A TCP socket as a stream that never blocks; the TLS stream is a subclass.

    The constructor starts to connect. It and all methods but ``close`` raise OSError for a broken stream.
    ``held_bytes`` are bytes that ``send`` accepted, or that belong to TLS itself, and that are not written
    yet. ``buffered`` means that it contains received bytes that a selector cannot see.
    """

    held_bytes = 0
    buffered = False

    def __init__(self, address: SocketAddress) -> None:
        family, place = address
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setblocking(False)
            # With Nagle's algorithm, a request's end would wait for the previous acknowledgement.
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            code = self._socket.connect_ex(place)
            if code not in _UNDER_WAY:
                raise OSError(code, os.strerror(code))
        except BaseException:
            self._socket.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def on_connected(self) -> None:
        """Called when the socket is writable for the first time."""
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))

    def handshake(self) -> bool:
        """Continue the handshake before Kafka's first byte. True when it is complete: here at once. TLS
        raises AuthenticationError if a certificate is rejected."""
        return True

    def flush(self) -> None:
        """Write bytes that ``send`` has accepted and the stream still holds. Here there are none."""

    def send(self, buffers: Sequence[Buffer]) -> int:
        """Write as much as fits of at most 1,024 buffers, without a copy. Returns the number of bytes."""
        try:
            return self._socket.sendmsg(buffers)
        except (BlockingIOError, InterruptedError):
            return 0

    def receive_into(self, buffer: memoryview) -> int | None:
        """Read bytes. Returns their number, 0 at the end of the stream, or None if nothing is available."""
        try:
            return self._socket.recv_into(buffer)
        except (BlockingIOError, InterruptedError):
            return None

    def close(self) -> None:
        self._socket.close()

    def abort(self) -> None:
        """End the stream, and drop the bytes that have not reached the peer."""
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self._socket.close()


def resolve_host(host: str, port: int, flags: int) -> list[SocketAddress]:
    """The addresses of a host, with getaddrinfo's flags. Raises OSError."""
    if "\0" in host:
        # Python would only pass on the text before the zero byte, and thus resolve a different host.
        raise OSError(f"{host!r} contains a zero byte")
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError:
        if flags:  # no number, whatever else it is
            raise OSError("not numeric") from None
        raise
    return [(family, address) for family, _, _, _, address in addresses]


def start_lookup(host: str, port: int, notify: Callable[[], None]) -> Future[list[SocketAddress]]:
    """Start to resolve a name, unless it is numeric. At the end another thread calls ``notify``."""
    lookup: Future[list[SocketAddress]] = Future()
    try:
        lookup.set_result(resolve_host(host, port, socket.AI_NUMERICHOST))
        return lookup
    except OSError:
        pass  # a name

    def run() -> None:
        try:
            addresses = resolve_host(host, port, 0)
            problem = "" if addresses else f"{host} has no address"
        except UnicodeError as error:  # a label that is empty or longer than 63 characters
            problem = f"{host!r} is not a host name: {error}"
        except Exception as error:  # noqa: BLE001 - otherwise the connection would never be tried again
            problem = f"cannot resolve {host}: {error}"
        if problem:
            lookup.set_exception(OSError(problem))
        else:
            lookup.set_result(addresses)
        notify()

    threading.Thread(target=run, name=f"kafka-chunked-dns-{host}", daemon=True).start()
    return lookup
