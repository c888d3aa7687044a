"""TLS as bytes in, bytes out, against Python's own server side: split at every byte, cut, and refused."""

from __future__ import annotations

import re
import select
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kafka_sink.errors import AuthenticationError
from kafka_sink.network.tls_transport import TlsStream, TlsTransport
from kafka_sink.secret import Secret
from kafka_sink.security.settings import Store, TlsSettings
from kafka_sink.security.stores import ClientKey
from kafka_sink.security.tls_context import load_key, make_context
from tests.support.effort import tries
from tests.support.security.certificates import Authority

HOST = "broker.test"
AUTHORITY = Authority()
OTHER_TRUST = Store(
    "kafka.ssl.truststore.certificates", "PEM", text=Secret(Authority("Somebody else").pem.decode())
)
VERSIONS = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}


@pytest.mark.parametrize("host", ["a\0b", ".", ".b", "x" * 300])
def test_a_name_that_tls_cannot_check_ends_the_connection_and_nothing_else(host: str) -> None:
    with pytest.raises(ConnectionError, match="not a host name"):
        TlsStream(make_context(TlsSettings()), host, "host:1")


class Server:
    """The broker's side, without a socket, with a certificate for ``hosts``."""

    def __init__(
        self,
        *hosts: str,
        versions: tuple[str, ...] = ("TLSv1.2", "TLSv1.3"),
        clients: Authority | None = None,
        ciphers: str = "",
        **days: int,
    ) -> None:
        self.context = context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version, context.maximum_version = VERSIONS[versions[0]], VERSIONS[versions[-1]]
        self.identity = AUTHORITY.issue("s", *(hosts or (HOST,)), **days)
        key = ClientKey(Secret(self.identity.key_pem().decode()), self.identity.chain_pem)
        load_key(context, key, "a broker's")
        if clients is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=clients.pem.decode())
        if ciphers:
            context.set_ciphers(ciphers)
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_side=True)
        self.established = False
        self.failure: ssl.SSLError | None = None

    def step(self, data: bytes) -> bytes:
        self.incoming.write(data)
        if not self.established and self.failure is None:
            try:
                self.tls.do_handshake()
                self.established = True
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError as error:
                self.failure = error
        return self.outgoing.read()


def settings(**changes: object) -> TlsSettings:
    trust = Store("kafka.ssl.truststore.certificates", "PEM", text=Secret(AUTHORITY.pem.decode()))
    return TlsSettings(**{"trust": trust, **changes})  # type: ignore[arg-type]


def stream(given: TlsSettings, host: str = HOST) -> TlsStream:
    return TlsStream(make_context(given), host, f"{host}:9093")


def shake(client: TlsStream, server: Server, *, piece: int = 1 << 20, most: int = 1 << 30) -> int:
    """Runs both sides until neither has bytes to send; the server's come in pieces of ``most`` bytes
    together. Returns how many it had."""
    given = 0
    client.handshake()
    while data := client.outgoing.read():
        reply = server.step(data)
        for at in range(0, len(reply), piece):
            part = reply[at : at + piece]
            client.incoming.write(memoryview(part[: max(0, most - given)]))
            given += len(part)
            client.handshake()
    return given


def received(client: TlsStream) -> bytes:
    buffer = bytearray(1 << 16)
    data = b""
    while (count := client.read(memoryview(buffer))) is not None and count:
        data += buffer[:count]
    return data


@pytest.mark.parametrize("version", VERSIONS)
def test_a_handshake_and_data_however_they_are_split(version: str) -> None:
    for piece in (1, 5, 1000, 1 << 20):
        server = Server(versions=(version,))
        client = stream(settings())
        shake(client, server, piece=piece)
        assert client.established
        assert server.established
        client.write(b"question" * 5000)
        server.step(client.outgoing.read())
        assert b"".join(server.tls.read(1 << 16) for _ in range(3)) == b"question" * 5000
        server.tls.write(b"response" * 3000)
        data, reply = b"", server.step(b"")
        for at in range(0, len(reply), piece):
            client.incoming.write(memoryview(reply[at : at + piece]))
            data += received(client)
        assert data == b"response" * 3000
        assert not client.unread


@pytest.mark.parametrize("version", VERSIONS)
def test_cut_at_every_byte_a_handshake_is_a_lost_connection_that_may_be_tried_again(version: str) -> None:
    given = settings()
    total = shake(stream(given), Server(versions=(version,)))
    # Each seventh byte: a handshake costs milliseconds.
    for cut in range(0, total, 7):
        client = stream(given)
        shake(client, Server(versions=(version,)), most=cut)
        if client.established:
            break  # what is left are session tickets
        client.incoming.write_eof()
        with pytest.raises(ConnectionResetError, match=r"broker\.test:9093 closed the connection in the TLS"):
            client.handshake()


def test_bytes_damaged_on_the_way_are_no_reason_to_give_up() -> None:
    server = Server()
    client = stream(settings())
    shake(client, server)
    received(client)
    server.tls.write(b"response")
    damaged = bytearray(server.step(b""))
    damaged[-1] ^= 1
    client.incoming.write(memoryview(bytes(damaged)))
    with pytest.raises(ConnectionError, match="TLS with"):
        client.read(memoryview(bytearray(100)))


def refusal(client: TlsStream, server: Server) -> str:
    with pytest.raises(AuthenticationError) as caught:
        shake(client, server)
    return str(caught.value)


# Certificate for which hosts and days, by whom; whom the client trusts, connecting where; what it says.
REFUSALS: list[tuple[tuple[str, ...], dict[str, Any], dict[str, Any], str, str]] = [
    (("other.test", "10.0.0.1"), {}, {}, HOST, r"is not for broker\.test.*advertised\.listeners"),
    ((HOST,), {}, {}, "10.0.0.2", r"is not for 10\.0\.0\.2"),
    ((HOST,), {"starts_in_days": -9, "ends_in_days": -1}, {}, HOST, "has expired"),
    ((HOST,), {"starts_in_days": 2}, {}, HOST, "not yet valid"),
    (
        (HOST,),
        {},
        {"trust": OTHER_TRUST},
        HOST,
        r"not signed by a trusted .*kafka\.ssl\.truststore\.location",
    ),
    ((HOST,), {}, {"trust": OTHER_TRUST, "check_host": False}, HOST, "not signed by a trusted authority"),
    ((HOST,), {}, {"trust": None}, HOST, "not signed by a trusted authority"),
]


def test_each_refusal_of_the_brokers_certificate_says_what_to_change() -> None:
    for hosts, days, changes, host, said in REFUSALS:
        server = Server(*hosts, **days)
        assert re.search(said, refusal(stream(settings(**changes), host), server)), said


def test_an_address_or_a_name_in_the_certificate_is_enough_or_the_certificate_itself() -> None:
    for host in (HOST, "10.0.0.1", "::1", "a.wild.test", f"{HOST}."):
        shake(client := stream(settings(), host), Server(HOST, "10.0.0.1", "::1", "*.wild.test"))
        assert client.established, host
    # Or no name at all.
    shake(client := stream(settings(check_host=False)), Server("other.test"))
    assert client.established
    server = Server()
    own = Secret(server.identity.certificate.public_bytes(Encoding.PEM).decode())
    trust = Store("kafka.ssl.truststore.certificates", "PEM", text=own)
    shake(client := stream(TlsSettings(trust=trust)), server)
    assert client.established


def test_no_version_in_common_or_no_tls_is_no_connection() -> None:
    for ours, theirs in (VERSIONS, reversed(VERSIONS)):
        client = stream(settings(protocols=(ours,)))
        assert "kafka.ssl.enabled.protocols" in refusal(client, Server(versions=(theirs,)))
    client = stream(settings())
    client.handshake()
    client.incoming.write(memoryview(b"HTTP/1.1 400 Bad Request\r\n\r\n"))
    with pytest.raises(AuthenticationError, match="does not speak TLS"):
        client.handshake()


def test_cipher_suites_are_those_that_were_named() -> None:
    older = settings(cipher_suites=("TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",))
    shake(stream(older), server := Server())
    assert server.tls.cipher() == ("ECDHE-ECDSA-AES256-GCM-SHA384", "TLSv1.2", 256)
    other = Server(ciphers="ECDHE-ECDSA-CHACHA20-POLY1305", versions=("TLSv1.2",))
    assert "cipher suite" in refusal(stream(older), other)
    newer = ("TLS_CHACHA20_POLY1305_SHA256",)
    picky = TlsStream(make_context(settings(cipher_suites=newer)), HOST, f"{HOST}:9093", newer)
    assert "TLS_AES_256_GCM_SHA384, which kafka.ssl.cipher.suites does not enable" in refusal(picky, Server())


@pytest.mark.parametrize("version", VERSIONS)
def test_a_client_certificate_is_sent_where_it_is_wanted_and_missed_with_its_option(
    tmp_path: Path, version: str
) -> None:
    def server(clients: Authority = AUTHORITY) -> Server:
        return Server(versions=(version,), clients=clients)

    key = Store("kafka.ssl.keystore.location", "PEM", str(AUTHORITY.issue("c").pem_file(tmp_path / "c.pem")))
    shake(stream(settings(key=key)), asking := server())
    assert asking.established
    for one, chosen in (
        (server(), settings()),
        (server(Authority("Other")), settings(key=key)),
    ):
        client = stream(chosen)
        with pytest.raises((AuthenticationError, ConnectionError)) as caught:
            _until_refused(client, one)
        assert "certificate" in str(caught.value), caught.value
        assert "kafka.ssl.keystore" in str(caught.value)


def _until_refused(client: TlsStream, server: Server) -> None:
    shake(client, server)
    client.read(memoryview(bytearray(100)))  # TLS 1.3 says so only now


def test_the_brokers_name_is_sent_and_addresses_are_not() -> None:
    for host, expected in ((HOST, HOST), ("10.0.0.1", None)):
        server = Server(HOST, "10.0.0.1")
        asked: list[str | None] = []
        server.context.sni_callback = lambda _, name, __, asked=asked: asked.append(name)
        server.tls = server.context.wrap_bio(server.incoming, server.outgoing, server_side=True)
        shake(client := stream(settings(), host), server)
        assert client.established
        assert asked == [expected]


@given(st.integers(0, 1200), st.binary(min_size=1, max_size=40), st.sampled_from(["put in", "put over"]))
@hypothesis_settings(max_examples=tries(60), deadline=None)
def test_any_bytes_in_a_handshake_or_after_it_are_errors_of_the_connection(
    at: int, junk: bytes, how: str
) -> None:
    client = stream(settings())
    server = Server()
    failure: Exception | None = None
    try:
        client.handshake()
        while data := client.outgoing.read():
            reply = server.step(data)
            end = at + (len(junk) if how == "put over" else 0)
            client.incoming.write(memoryview(reply[:at] + junk + reply[end:]))
            client.handshake()
        if client.established:
            client.read(memoryview(bytearray(1000)))
    except (AuthenticationError, ConnectionError) as error:
        failure = error
    assert failure is None or "broker.test:9093" in str(failure)


# -- over sockets -----------------------------------------------------------------------------------


def test_a_slow_reader_gets_everything_and_nothing_blocks() -> None:
    server = Server("127.0.0.1")
    given = settings()
    total = 8 * 1024 * 1024
    with socket.create_server(("127.0.0.1", 0)) as listener:
        got: list[int] = []

        def serve() -> None:
            with server.context.wrap_socket(listener.accept()[0], server_side=True) as peer:
                while sum(got) < total and (data := peer.recv(1 << 20)):
                    got.append(len(data))
                peer.sendall(b"done")

        thread = threading.Thread(target=serve)
        thread.start()
        transport = _transport(listener, given)
        chunk = memoryview(bytes(16_384))
        small = memoryview(b"x" * 61)
        left = total
        while left:
            buffers = [small[:left], chunk[:left], small[:left], chunk[:left]]
            sent = transport.send(buffers[: 4 if left > 100_000 else 1])
            left -= sent
            if not sent:
                assert transport.held_bytes
                select.select([], [transport], [], 10)
        while transport.held_bytes:
            select.select([], [transport], [], 10)
            transport.flush()
        buffer = memoryview(bytearray(100))
        while (count := transport.receive_into(buffer)) is None:
            select.select([transport], [], [], 10)
        assert bytes(buffer[:count]) == b"done"
        transport.close()
        thread.join()
    assert sum(got) == total


def test_a_flood_of_tls_messages_without_data_ends_the_connection() -> None:
    """Catches: key updates without end, which kept the sender's thread. Python's ssl cannot send any."""

    class Flooded(TlsTransport):
        def _receive(self) -> int:
            return 16_384

    given = settings()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = (socket.AF_INET, listener.getsockname())
        transport = Flooded(address, make_context(given), HOST, "broker.test:9093 (id 1)")
        with pytest.raises(ConnectionError, match=r"broker.test:9093.*without any data"):
            transport.receive_into(memoryview(bytearray(100)))
        transport.abort()


def _transport(listener: socket.socket, given: TlsSettings) -> TlsTransport:
    address = (socket.AF_INET, listener.getsockname())
    transport = TlsTransport(address, make_context(given), "127.0.0.1", "127.0.0.1", given.cipher_suites)
    select.select([], [transport], [], 10)
    transport.on_connected()
    while not transport.handshake():
        select.select([transport], [], [], 10)
    return transport
