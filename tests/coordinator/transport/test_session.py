"""The wire: frames, challenge, tags. No sockets."""

from __future__ import annotations

import asyncio
import json
import os
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_sink.coordinator.transport import session
from kafka_sink.coordinator.transport.peer_connection import PeerConnection
from kafka_sink.coordinator.transport.session import FrameReader, Session
from kafka_sink.errors import ProtocolError

SECRET = b"s" * 32


def one_frame(data: bytes) -> bytes:
    reader = FrameReader(session.MAX_FRAME_BYTES)
    reader.feed(data)
    frame = reader.next_frame()
    assert frame is not None
    assert reader.next_frame() is None
    return frame


def established(secret: bytes = SECRET) -> tuple[Session, Session]:
    client, server = Session(secret, "client"), Session(SECRET, "server")
    proof = client.reply_to_greeting(one_frame(server.greeting()))
    client.verify_proof(one_frame(server.reply_to_proof(one_frame(proof))))
    return client, server


def test_after_the_challenge_both_ends_understand_each_other() -> None:
    client, server = established()
    for number in range(3):
        assert server.decode(one_frame(client.encode({"n": number}))) == {"n": number}
        assert client.decode(one_frame(server.encode({"m": "é"}))) == {"m": "é"}


def test_a_client_with_another_secret_is_refused_by_the_server() -> None:
    with pytest.raises(ProtocolError, match="does not know the secret"):
        established(b"t" * 32)


def test_a_server_with_another_secret_is_refused_by_the_client() -> None:
    client, impostor = Session(SECRET, "client"), Session(b"t" * 32, "server")
    client.reply_to_greeting(one_frame(impostor.greeting()))
    with pytest.raises(ProtocolError, match="does not know the secret"):
        client.verify_proof(json.dumps({"proof": "00" * 32}).encode())


def test_a_proof_cannot_be_sent_back_to_where_it_came_from() -> None:
    client, server = Session(SECRET, "client"), Session(SECRET, "server")
    proof = one_frame(client.reply_to_greeting(one_frame(server.greeting())))
    with pytest.raises(ProtocolError, match="does not know the secret"):
        client.verify_proof(proof)


def test_frames_cannot_be_repeated_reordered_changed_or_returned() -> None:
    client, server = established()
    first, second = one_frame(client.encode({"n": 1})), one_frame(client.encode({"n": 2}))
    with pytest.raises(ProtocolError):
        server.decode(second)
    assert server.decode(first) == {"n": 1}
    with pytest.raises(ProtocolError):
        server.decode(first)
    with pytest.raises(ProtocolError):
        server.decode(bytes([second[0] ^ 1]) + second[1:])
    # Back to where it came from, with the number that is awaited there.
    with pytest.raises(ProtocolError):
        client.decode(first)
    assert server.decode(second) == {"n": 2}


@pytest.mark.parametrize(
    "payload", [b"[]", b"\xff\xfe", b"{", b"[" * 100_000, b'{"nonce": 5}', b'{"nonce":"zz"}']
)
def test_garbage_instead_of_a_proof_is_refused(payload: bytes) -> None:
    server = Session(SECRET, "server")
    with pytest.raises(ProtocolError):
        server.reply_to_proof(payload)


def test_a_frame_too_large_is_refused_before_it_has_come() -> None:
    reader = FrameReader(512)
    reader.feed((513).to_bytes(4, "big"))
    with pytest.raises(ProtocolError, match="513"):
        reader.next_frame()


def test_a_message_too_large_is_not_sent_and_harms_nothing() -> None:
    client, server = established()
    with pytest.raises(ProtocolError, match="larger than"):
        client.encode({"x": "x" * session.MAX_FRAME_BYTES})
    assert server.decode(one_frame(client.encode({"n": 1}))) == {"n": 1}


def test_nothing_is_said_before_the_challenge_is_over() -> None:
    with pytest.raises(ProtocolError, match="challenge"):
        Session(SECRET, "client").encode({})


@given(st.lists(st.dictionaries(st.text(), st.integers()), max_size=5), st.integers(1, 40))
def test_frames_come_out_the_same_however_the_bytes_are_cut(sent: list[dict[str, int]], size: int) -> None:
    client, server = established()
    stream = b"".join(client.encode(message) for message in sent)
    reader, received = FrameReader(session.MAX_FRAME_BYTES), []
    for start in range(0, len(stream), size):
        reader.feed(stream[start : start + size])
        while (frame := reader.next_frame()) is not None:
            received.append(server.decode(frame))
    assert received == sent
    assert reader.held == 0


def test_the_secret_is_in_no_repr() -> None:
    assert "sss" not in repr(Session(SECRET, "client"))


def test_nobody_reads_what_is_said_after_the_challenge() -> None:
    """Catches: frames had a tag and travelled in clear: names of topics, brokers' addresses, figures."""
    client, server = established()
    text = "a-topic-of-ours"
    frames = [client.encode({"topic": text}), server.encode({"topic": text})]
    frames += [b"".join(server.encode_in_pieces(b'{"a":1}', text.encode() * 40_000, 1024))]
    assert not any(text.encode() in frame or b"topic" in frame for frame in frames)
    # The same message has another frame each time.
    assert client.encode({"topic": text})[4:] != frames[0][4:]


@given(st.integers(0, 3000), st.integers(0, 3000), st.integers(1, 1000))
def test_a_frame_in_pieces_is_the_frame_as_a_whole(start: int, end: int, piece: int) -> None:
    client, server = established()
    parts = b"s" * start, b"e" * end
    pieces = list(server.encode_in_pieces(*parts, piece))
    assert all(len(one) <= 2 * piece + session.OVERHEAD_BYTES for one in pieces)
    assert len(b"".join(pieces)) == start + end + session.OVERHEAD_BYTES
    data = b"".join(pieces)
    assert client.payload(data[4:]) == parts[0] + parts[1]
    assert client.payload(server.encode_payload(b"next")[4:]) == b"next"


def test_a_forked_process_does_not_go_on_under_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two frames under one key and number would give both away."""
    client, _ = established()
    pid = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: pid + 1)
    with pytest.raises(ProtocolError, match="forked"):
        client.encode({})


class _Transport(asyncio.Transport):
    """Takes one piece, and then nothing until it is told to."""

    def __init__(self, peer: PeerConnection) -> None:
        super().__init__()
        self.peer = peer
        self.written: list[bytes] = []
        self.takes_all = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))
        if not self.takes_all:
            self.peer.pause_writing()


class _Nobody:
    def on_opened(self, peer: PeerConnection) -> None: ...
    def on_bytes(self, peer: PeerConnection, data: bytes) -> None: ...
    def on_writable(self, peer: PeerConnection) -> None: ...
    def on_closed(self, peer: PeerConnection) -> None: ...


def test_what_many_peers_have_not_read_yet_is_encrypted_for_none_of_them() -> None:
    """So a body that thousands get is in memory once, however slowly they read."""
    shared = b"x" * 3_000_000 + b"}"
    peers = []
    for number in range(20):
        client, server = established()
        peer = PeerConnection(number, "10.0.0.1", server, _Nobody(), 0.0)
        transport = _Transport(peer)
        peer.connection_made(transport)
        peers.append((client, peer, transport))
    tracemalloc.start()
    try:
        for number, (_, peer, _) in enumerate(peers):
            peer.enqueue(b'{"n":%d,' % number, shared)
            peer.enqueue(b'{"small":1}', b"")
            peer.flush(1 << 20)
            assert peer.is_behind is False  # the peer reads no more
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held < 20 * 2 * 65_536 + 1_000_000
    for number, (client, peer, transport) in enumerate(peers):
        assert peer.unread > 2_900_000
        assert peer.held < 1_000
        transport.takes_all = True
        peer.resume_writing()
        while peer.is_behind:
            peer.flush(256 * 1024)
        assert (peer.unread, peer.held) == (0, 0)
        assert peer.taken == sum(map(len, transport.written))
        assert all(len(one) <= 2 * 65_536 for one in transport.written)
        reader = FrameReader(session.MAX_FRAME_BYTES)
        reader.feed(b"".join(transport.written))
        large, small = reader.next_frame(), reader.next_frame()
        assert large is not None
        assert client.payload(large) == b'{"n":%d,' % number + shared
        assert small is not None
        assert client.decode(small) == {"small": 1}
