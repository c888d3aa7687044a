"""TLS as bytes in, bytes out, against Python's own server side: split at every byte, cut, and refused."""

from __future__ import annotations

import functools
import select
import socket
import ssl
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from kafka_sink.errors import AuthenticationError
from kafka_sink.network.tls_transport import TlsStream, TlsTransport
from kafka_sink.secret import Secret
from kafka_sink.security.settings import Store, TlsSettings
from kafka_sink.security.tls_context import make_context
from tests.support.effort import tries
from tests.support.network_harness import OPTIONS
from tests.support.security.certificates import Authority, Identity

HOST = "broker.test"
VERSIONS = {"TLSv1.2": ssl.TLSVersion.TLSv1_2, "TLSv1.3": ssl.TLSVersion.TLSv1_3}


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.mark.parametrize("host", ["a\0b", ".", ".b", "x" * 300])
def test_a_name_that_tls_cannot_check_ends_the_connection_and_nothing_else(host: str) -> None:
    with pytest.raises(ConnectionError, match="no host name"):
        TlsStream(make_context(TlsSettings()), host, "host:1")


class Server:
    """The broker's side, without a socket."""

    def __init__(
        self,
        identity: Identity,
        folder: Path,
        *,
        versions: tuple[str, ...] = ("TLSv1.2", "TLSv1.3"),
        clients: Authority | None = None,
        ciphers: str = "",
    ) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version, context.maximum_version = VERSIONS[versions[0]], VERSIONS[versions[-1]]
        context.load_cert_chain(identity.pem_file(folder / "server.pem"))
        if clients is not None:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=clients.pem.decode())
        if ciphers:
            context.set_ciphers(ciphers)
        self.context = context
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


def settings(authority: Authority, **changes: object) -> TlsSettings:
    trust = Store("kafka.ssl.truststore.certificates", "PEM", text=Secret(authority.pem.decode()))
    return TlsSettings(**{"trust": trust, **changes})  # type: ignore[arg-type]


def stream(given: TlsSettings, host: str = HOST) -> TlsStream:
    return TlsStream(make_context(given), host, f"{host}:9093")


def shake(client: TlsStream, server: Server, *, piece: int = 1 << 20, most: int = 1 << 30) -> None:
    """Runs both sides until neither has bytes to send; the server's come in pieces of ``most`` bytes."""
    given = 0
    client.handshake()
    while data := client.outgoing.read():
        reply = server.step(data)
        for at in range(0, len(reply), piece):
            part = reply[at : at + piece][: max(0, most - given)]
            given += len(part)
            client.incoming.write(memoryview(part))
            client.handshake()


def received(client: TlsStream) -> bytes:
    buffer = bytearray(1 << 16)
    data = b""
    while (count := client.read(memoryview(buffer))) is not None and count:
        data += buffer[:count]
    return data


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("piece", [1, 5, 1000, 1 << 20])
def test_a_handshake_and_data_however_they_are_split(
    authority: Authority, folder: Path, version: str, piece: int
) -> None:
    server = Server(authority.issue("s", HOST), folder, versions=(version,))
    client = stream(settings(authority))
    shake(client, server, piece=piece)
    assert client.established
    assert server.established
    client.write(b"question" * 5000)
    server.step(client.outgoing.read())
    assert (
        server.tls.read(1 << 16) + server.tls.read(1 << 16) + server.tls.read(1 << 16) == b"question" * 5000
    )
    server.tls.write(b"response" * 3000)
    data, reply = b"", server.step(b"")
    for at in range(0, len(reply), piece):
        client.incoming.write(memoryview(reply[at : at + piece]))
        data += received(client)
    assert data == b"response" * 3000
    assert not client.unread


@pytest.mark.parametrize("version", VERSIONS)
def test_cut_at_every_byte_a_handshake_is_a_lost_connection_that_may_be_tried_again(
    authority: Authority, folder: Path, version: str
) -> None:
    identity = authority.issue("s", HOST)
    given = settings(authority)
    whole, counted = Server(identity, folder, versions=(version,)), 0
    client = stream(given)
    client.handshake()
    while data := client.outgoing.read():
        reply = whole.step(data)
        counted += len(reply)
        client.incoming.write(memoryview(reply))
        client.handshake()
    for cut in range(0, counted, 7):
        client = stream(given)
        shake(client, Server(identity, folder, versions=(version,)), most=cut)
        if client.established:
            break  # what is left are session tickets
        client.incoming.write_eof()
        with pytest.raises(ConnectionResetError, match=r"broker\.test:9093 closed the connection in the TLS"):
            client.handshake()


def test_bytes_damaged_on_the_way_are_no_reason_to_give_up(authority: Authority, folder: Path) -> None:
    server = Server(authority.issue("s", HOST), folder)
    client = stream(settings(authority))
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


def test_each_refusal_of_the_brokers_certificate_says_what_to_change(
    authority: Authority, folder: Path
) -> None:
    named = Server(authority.issue("s", "other.test", "10.0.0.1"), folder)
    text = refusal(stream(settings(authority)), named)
    assert "is not for broker.test" in text
    assert "advertised.listeners" in text
    by_address = Server(authority.issue("s", HOST), folder)
    assert "is not for 10.0.0.2" in refusal(stream(settings(authority), "10.0.0.2"), by_address)
    old = Server(authority.issue("s", HOST, starts_in_days=-9, ends_in_days=-1), folder)
    assert "has expired" in refusal(stream(settings(authority)), old)
    early = Server(authority.issue("s", HOST, starts_in_days=2), folder)
    assert "not yet valid" in refusal(stream(settings(authority)), early)
    other = Server(Authority("Somebody else").issue("s", HOST), folder)
    assert "kafka.ssl.truststore.location" in refusal(stream(settings(authority)), other)
    assert "not of a trusted authority" in refusal(
        stream(settings(authority, trust=None)), Server(authority.issue("s", HOST), folder)
    )


def test_an_address_and_a_name_in_the_certificate_are_enough(authority: Authority, folder: Path) -> None:
    identity = authority.issue("s", HOST, "10.0.0.1", "::1", "*.wild.test")
    for host in (HOST, "10.0.0.1", "::1", "a.wild.test", f"{HOST}."):
        shake(client := stream(settings(authority), host), Server(identity, folder))
        assert client.established, host


def test_the_check_of_names_can_be_switched_off_and_nothing_else_with_it(
    authority: Authority, folder: Path
) -> None:
    given = settings(authority, check_host=False)
    shake(client := stream(given), Server(authority.issue("s", "other.test"), folder))
    assert client.established
    other = Server(Authority("Somebody else").issue("s", HOST), folder)
    assert "not of a trusted authority" in refusal(stream(given), other)


def test_a_brokers_own_certificate_in_the_truststore_is_enough(authority: Authority, folder: Path) -> None:
    identity = authority.issue("s", HOST)
    own = Secret(
        identity.chain_pem.decode().split("-----END CERTIFICATE-----")[0] + "-----END CERTIFICATE-----\n"
    )
    trust = Store("kafka.ssl.truststore.certificates", "PEM", text=own)
    shake(client := stream(TlsSettings(trust=trust)), Server(identity, folder))
    assert client.established


@pytest.mark.parametrize(("ours", "theirs"), [("TLSv1.2", "TLSv1.3"), ("TLSv1.3", "TLSv1.2")])
def test_no_version_in_common_is_no_connection(
    authority: Authority, folder: Path, ours: str, theirs: str
) -> None:
    server = Server(authority.issue("s", HOST), folder, versions=(theirs,))
    assert "kafka.ssl.enabled.protocols" in refusal(stream(settings(authority, protocols=(ours,))), server)


def test_cipher_suites_are_those_that_were_named(authority: Authority, folder: Path) -> None:
    older = ("TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",)
    shake(
        stream(settings(authority, cipher_suites=older)), server := Server(authority.issue("s", HOST), folder)
    )
    assert server.tls.cipher() == ("ECDHE-ECDSA-AES256-GCM-SHA384", "TLSv1.2", 256)
    other = Server(
        authority.issue("s", HOST), folder, ciphers="ECDHE-ECDSA-CHACHA20-POLY1305", versions=("TLSv1.2",)
    )
    assert "cipher suite" in refusal(stream(settings(authority, cipher_suites=older)), other)
    context = make_context(settings(authority, cipher_suites=("TLS_CHACHA20_POLY1305_SHA256",)))
    picky = TlsStream(context, HOST, f"{HOST}:9093", ("TLS_CHACHA20_POLY1305_SHA256",))
    assert "TLS_AES_256_GCM_SHA384, which kafka.ssl.cipher.suites does not enable" in refusal(
        picky, Server(authority.issue("s", HOST), folder)
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_a_client_certificate_is_sent_where_it_is_wanted_and_missed_with_its_option(
    authority: Authority, folder: Path, version: str
) -> None:
    identity = authority.issue("s", HOST)

    def server(clients: Authority = authority) -> Server:
        return Server(identity, folder, versions=(version,), clients=clients)

    key = Store("kafka.ssl.keystore.location", "PEM", str(authority.issue("c").pem_file(folder / "c.pem")))
    asking = server()
    shake(client := stream(settings(authority, key=key)), asking)
    assert asking.established
    for one, chosen in (
        (server(), settings(authority)),
        (server(Authority("Other")), settings(authority, key=key)),
    ):
        client = stream(chosen)
        with pytest.raises((AuthenticationError, ConnectionError)) as caught:
            _until_refused(client, one)
        assert "certificate" in str(caught.value), caught.value
        assert "kafka.ssl.keystore" in str(caught.value)


def _until_refused(client: TlsStream, server: Server) -> None:
    shake(client, server)
    client.read(memoryview(bytearray(100)))  # TLS 1.3 says so only now


def test_a_server_without_tls_is_named_in_the_error(authority: Authority) -> None:
    client = stream(settings(authority))
    client.handshake()
    client.incoming.write(memoryview(b"HTTP/1.1 400 Bad Request\r\n\r\n"))
    with pytest.raises(AuthenticationError, match="does not speak TLS"):
        client.handshake()


def test_the_brokers_name_is_sent_and_addresses_are_not(authority: Authority, folder: Path) -> None:
    for host, expected in ((HOST, HOST), ("10.0.0.1", None)):
        server = Server(authority.issue("s", HOST, "10.0.0.1"), folder)
        asked: list[str | None] = []
        server.context.sni_callback = lambda _, name, __, asked=asked: asked.append(name)
        server.tls = server.context.wrap_bio(server.incoming, server.outgoing, server_side=True)
        shake(client := stream(settings(authority), host), server)
        assert client.established
        assert asked == [expected]


@given(st.integers(0, 1200), st.binary(min_size=1, max_size=40), st.sampled_from(["put in", "put over"]))
@hypothesis_settings(
    max_examples=tries(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_bytes_in_a_handshake_or_after_it_are_errors_of_the_connection(
    authority: Authority, folder: Path, at: int, junk: bytes, how: str
) -> None:
    client = stream(settings(authority))
    server = Server(_known_identity(authority), folder)
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


@functools.cache
def _known_identity(authority: Authority) -> Identity:
    return authority.issue("s", HOST)


# -- over sockets -----------------------------------------------------------------------------------


def test_a_slow_reader_gets_everything_and_nothing_blocks(authority: Authority, folder: Path) -> None:
    server = Server(authority.issue("s", "127.0.0.1"), folder)
    given = settings(authority)
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
                assert transport.wants_write
                select.select([], [transport], [], 10)
        while transport.wants_write:
            select.select([], [transport], [], 10)
            transport.flush()
        buffer = memoryview(bytearray(100))
        while (count := transport.receive_into(buffer)) is None:
            select.select([transport], [], [], 10)
        assert bytes(buffer[:count]) == b"done"
        transport.close()
        thread.join()
    assert sum(got) == total


def test_a_flood_of_tls_messages_without_data_ends_the_connection(authority: Authority) -> None:
    """Catches: key updates without end, which kept the sender's thread. Python's ssl cannot send any."""

    class Flooded(TlsTransport):
        def _receive(self) -> int:
            return 16_384

    given = settings(authority)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = (socket.AF_INET, listener.getsockname())
        transport = Flooded(address, OPTIONS, make_context(given), HOST, "broker.test:9093 (id 1)")
        with pytest.raises(ConnectionError, match=r"broker.test:9093.*without any data"):
            transport.receive_into(memoryview(bytearray(100)))
        transport.abort()


def _transport(listener: socket.socket, given: TlsSettings) -> TlsTransport:
    address = (socket.AF_INET, listener.getsockname())
    transport = TlsTransport(
        address, OPTIONS, make_context(given), "127.0.0.1", "127.0.0.1", given.cipher_suites
    )
    select.select([], [transport], [], 10)
    transport.connected()
    while not transport.handshake():
        select.select([transport], [], [], 10)
    return transport
