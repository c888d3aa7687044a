"""Non-blocking byte streams to a broker: what each can do, and the one in clear."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
from collections.abc import Sequence
from typing import Protocol

from kafka_sink.network.events import Buffer
from kafka_sink.network.settings import NetworkSettings

# What connect() says while it goes on; EWOULDBLOCK is a full backlog of a local address.
# l_onoff, l_linger: closing resets the connection.
_NO_LINGER = struct.pack("ii", 1, 0)
_UNDER_WAY = (0, errno.EINPROGRESS, errno.EWOULDBLOCK)

SocketAddress = tuple[socket.AddressFamily, tuple[object, ...]]


class Transport(Protocol):
    """A stream that never blocks. Any method but ``close`` raises OSError when the stream is broken.

    ``wants_write`` is the stream's own wish, besides that of the bytes waiting to be sent: a TLS handshake
    or key update may need the other direction. ``buffered`` is true while received bytes are held that no
    selector can see. What ``send`` has taken counts as written, though TLS may still hold it.
    """

    @property
    def wants_write(self) -> bool: ...

    @property
    def buffered(self) -> bool: ...

    def fileno(self) -> int:
        """For the selector."""

    def connected(self) -> None:
        """Call when the socket is first writable; raises OSError where the connect failed."""

    def handshake(self) -> bool:
        """Goes on with what comes before the first byte of Kafka; True once it is done.

        TLS raises AuthenticationError where a certificate is refused.
        """

    def flush(self) -> None:
        """Writes what was taken before and is still held."""

    def send(self, buffers: Sequence[Buffer]) -> int:
        """Writes as much as fits now of at most 1,024 buffers; returns bytes, 0 where none fits."""

    def receive_into(self, buffer: memoryview) -> int | None:
        """Bytes read, 0 at the end of the stream, None where none are there."""

    def close(self) -> None:
        """Ends the stream without waiting."""

    def abort(self) -> None:
        """Ends the stream and drops what has not reached the peer."""


class PlaintextTransport:
    """A TCP socket. The constructor starts to connect; raises OSError where the system refuses at once."""

    wants_write = False
    buffered = False

    def __init__(self, address: SocketAddress, settings: NetworkSettings) -> None:
        family, place = address
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._socket.setblocking(False)
            # Nagle's algorithm would hold the end of a request back until the last answer's ACK.
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # Before connecting: the window's scale is fixed by then.
            for option, size in (
                (socket.SO_SNDBUF, settings.send_buffer_bytes),
                (socket.SO_RCVBUF, settings.receive_buffer_bytes),
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
        """For the selector."""
        return self._socket.fileno()

    def connected(self) -> None:
        """Raises OSError where the connect failed."""
        code = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))

    def handshake(self) -> bool:
        """Nothing to do: TCP's own is over."""
        return True

    def flush(self) -> None:
        """Nothing is held."""

    def send(self, buffers: Sequence[Buffer]) -> int:
        """One scatter-gather write, without a joined copy."""
        try:
            return self._socket.sendmsg(buffers)
        except (BlockingIOError, InterruptedError):
            return 0

    def receive_into(self, buffer: memoryview) -> int | None:
        """One read."""
        try:
            return self._socket.recv_into(buffer)
        except (BlockingIOError, InterruptedError):
            return None

    def close(self) -> None:
        """Bytes that the system already holds are still sent; nothing waits for them."""
        self._socket.close()

    def abort(self) -> None:
        """Bytes that the system still holds are dropped, and the peer gets a reset."""
        with contextlib.suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self._socket.close()
