"""TLS over a non-blocking socket. ``TlsStream`` is the record layer without I/O: bytes in, bytes out."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from kafka_sink.errors import AuthenticationError
from kafka_sink.network.transport import PlaintextTransport, SocketAddress
from kafka_sink.network.wire import Buffer
from kafka_sink.security.tls_context import TLS13_SUITES, explain, is_final, split_suites

# A TLS record contains up to 16 KiB. Smaller buffers are joined, as each record has a cost.
_RECORD_BYTES = 16 * 1024
# The maximum number of encrypted bytes that wait for the socket. More would only take memory a second time.
_MAX_HELD_BYTES = 256 * 1024
# Much more than a record of 16 KiB. A flood of TLS messages would keep the sender busy.
_MAX_WITHOUT_DATA = 1024 * 1024
_READ_BYTES = 128 * 1024


class TlsStream:
    """The TLS of one connection, without its socket.

    ``incoming`` takes the peer's bytes, and ``outgoing`` has the bytes for the peer. Raises
    AuthenticationError if a retry cannot help, and ConnectionError if it may help.

    ``host`` is used for the certificate check and for SNI. ``suites`` are OpenSSL's names of the enabled
    cipher suites; if empty, all suites that the context allows are enabled.
    """

    def __init__(self, context: ssl.SSLContext, host: str, address: str, suites: Sequence[str] = ()) -> None:
        self.incoming = ssl.MemoryBIO()
        self.outgoing = ssl.MemoryBIO()
        self._host = host
        self._address = address
        self._suites = suites
        # OpenSSL treats a final dot as part of the name, but certificates do not contain it.
        name = host.rstrip(".")
        try:
            self._tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname=name)
        except (ValueError, TypeError) as error:
            # A zero byte causes a TypeError. Names of brokers come from the network.
            raise ConnectionError(f"{host!r} is not a host name that TLS can check: {error}") from None
        self.established = False

    @property
    def unread(self) -> bool:
        """Whether the stream contains bytes from the peer that ``read`` has not returned yet."""
        return self.incoming.pending > 0 or (self.established and self._tls.pending() > 0)

    def handshake(self) -> bool:
        if self.established:
            return True
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            raise ConnectionResetError(
                f"{self._address} closed the connection in the TLS handshake; unless it is restarting, it "
                "is not a TLS listener (kafka.security.protocol) or needs a client certificate "
                "(kafka.ssl.keystore.location)"
            ) from None
        except ssl.SSLError as error:
            raise self._failure(error, "TLS handshake with") from None
        used = self._tls.cipher()
        if self._suites and (used is None or used[0] not in self._suites):
            raise AuthenticationError(
                f"TLS handshake with {self._address} failed: the broker chose the cipher suite "
                f"{used[0] if used else 'none'}, which kafka.ssl.cipher.suites does not enable"
            )
        self.established = True
        return True

    def _failure(self, error: ssl.SSLError, step: str) -> Exception:
        text = f"{step} {self._address} failed: {explain(error, self._host)}"
        return AuthenticationError(text) if is_final(error) else ConnectionError(text)

    def write(self, data: Buffer) -> None:
        try:
            self._tls.write(data)
        except ssl.SSLError as error:
            raise self._failure(error, "TLS with") from None

    def read(self, buffer: memoryview) -> int | None:
        """Decrypt. Returns the number of bytes, 0 at the end, or None without a whole record."""
        try:
            # If it is given a buffer, it returns the number of bytes.
            count: Any = self._tls.read(len(buffer), buffer)
            return int(count)
        except ssl.SSLWantReadError:
            return None
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
            return 0
        except ssl.SSLError as error:
            # With TLS 1.3, a broker rejects the client's certificate only after the handshake.
            raise self._failure(error, "TLS with") from None

    def close(self) -> None:
        """Send close_notify, without waiting for the peer's."""
        # It raises if the peer has not sent its own yet, or the handshake is not over.
        with suppress(ssl.SSLError, ValueError, OSError):
            self._tls.unwrap()


class TlsTransport(PlaintextTransport):
    """A TLS connection to a broker. Raises AuthenticationError in addition to OSError. ``abort`` also drops
    encrypted bytes, because the peer cannot use incomplete records."""

    def __init__(
        self,
        address: SocketAddress,
        context: ssl.SSLContext,
        host: str,
        name: str,
        suites: Sequence[str] = (),
    ) -> None:
        self._stream = TlsStream(context, host, name, _to_check(suites) if suites else ())
        super().__init__(address)
        self._held = memoryview(b"")
        self._scratch = memoryview(bytearray(_READ_BYTES))
        self.buffered = False
        self._name = name
        # The bytes received since the last decrypted byte: incomplete records, session tickets, key updates.
        self._without_data = 0

    @property
    def held_bytes(self) -> int:  # type: ignore[override]
        return len(self._held) + self._stream.outgoing.pending

    def handshake(self) -> bool:
        if self._stream.established:
            self.flush()
            return True
        self._receive()
        try:
            done = self._stream.handshake()
        except AuthenticationError:
            with suppress(OSError):  # the peer may be gone
                self.flush()
            raise
        self.flush()
        return done

    def _receive(self) -> int | None:
        """Read from the socket. Returns the number of bytes, 0 at the end, or None."""
        count = super().receive_into(self._scratch)
        if count == 0:
            self._stream.incoming.write_eof()
        elif count is not None:
            self._stream.incoming.write(self._scratch[:count])
        return count

    def flush(self) -> None:
        while self.held_bytes:
            if not self._held:
                self._held = memoryview(self._stream.outgoing.read())
            sent = super().send([self._held])
            if sent == 0:
                return
            self._held = self._held[sent:]

    def send(self, buffers: Sequence[Buffer]) -> int:
        """Encrypt as much as may wait for the socket. Accepted bytes count as written."""
        taken = 0
        self.flush()
        for piece in _records(buffers):
            if self.held_bytes >= _MAX_HELD_BYTES:
                break
            self._stream.write(piece)
            taken += len(piece)
        self.flush()
        return taken

    def receive_into(self, buffer: memoryview) -> int | None:
        while (count := self._stream.read(buffer)) is None:
            received = self._receive()
            if received is None:
                self.buffered = False
                return None
            self._without_data += received
            if self._without_data > _MAX_WITHOUT_DATA:
                raise ConnectionError(
                    f"{self._name} sent {self._without_data} bytes of TLS messages without any data"
                )
        self._without_data = 0
        # A TLS message, such as a key update, may require a reply.
        self.flush()
        self.buffered = self._stream.unread
        return count

    def close(self) -> None:
        self._stream.close()
        with suppress(OSError):
            self.flush()
        super().close()


def _to_check(names: Sequence[str]) -> Sequence[str]:
    """The suites to check after the handshake, because Python cannot disable suites of TLS 1.3."""
    older, newer = split_suites(names)
    return () if set(newer) == set(TLS13_SUITES) else [*older, *newer]


def _records(buffers: Sequence[Buffer]) -> list[Buffer]:
    """Join small buffers up to the size of a record. OpenSSL splits large ones itself."""
    pieces: list[Buffer] = []
    small: list[Buffer] = []
    size = 0
    for buffer in filter(len, buffers):
        if size + len(buffer) > _RECORD_BYTES and small:
            pieces.append(b"".join(small))
            small, size = [], 0
        if len(buffer) >= _RECORD_BYTES:
            pieces.append(buffer)
        else:
            small.append(buffer)
            size += len(buffer)
    if small:
        pieces.append(b"".join(small))
    return pieces
