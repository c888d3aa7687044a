"""The protocol core without sockets: right responses in any pieces, and an error for every wrong one."""

from __future__ import annotations

import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kafka_sink.errors import BrokerVersionError, ProtocolError
from kafka_sink.network import requests
from kafka_sink.network.apis import APIS
from kafka_sink.network.broker_protocol import (
    MAX_BUFFERS_PER_SEND,
    BrokerProtocol,
    CompletedRequest,
    ConnectionState,
    Request,
    SendBuffer,
)
from kafka_sink.network.produce import ProduceResponse
from tests.support.fake_broker import API_VERSIONS, INIT_PRODUCER_ID, METADATA, PRODUCE, REQUESTS
from tests.support.fake_replies import OK, Reply, claimed_length, trailing, wrong_correlation_id
from tests.support.fake_state import VERSIONS, FakeState, framed
from tests.support.footprint import held_bytes
from tests.support.network_harness import batch, metadata_request, produce_request, request


class Peer:
    """A connection and the broker's mind behind it; frames pass by hand."""

    def __init__(self, versions: dict[int, tuple[int, int]] | None = None) -> None:
        self.connection = BrokerProtocol("test", "b1:9092 (id 1)", 30_000)
        self.state = FakeState([9092], {**VERSIONS, **(versions or {})}, 10**6)
        self.state.create_topic("t", 2)
        self._read = bytearray()
        self.names: dict[Request, object] = {}

    def submit(self, request: Request, now_ms: float, name: object) -> None:
        self.names[request] = name
        self.connection.submit(request, now_ms)

    def sent(self) -> list[bytes]:
        """Frames that the connection has written since the last call; all are."""
        outgoing = self.connection.send_buffer
        while outgoing.next_buffers():
            data = b"".join(outgoing.next_buffers())
            self._read += data
            outgoing.advance(len(data))
        frames = []
        while self._read:
            size = int.from_bytes(self._read[:4], "big")
            frames.append(bytes(self._read[4 : 4 + size]))
            del self._read[: 4 + size]
        return frames

    def answer(self, frame: bytes, reply: Reply = OK) -> bytes:
        """The broker's response to a request, as a frame."""
        api_key, version = int.from_bytes(frame[:2], "big"), int.from_bytes(frame[2:4], "big")
        if version > self.state.versions[api_key][1]:
            response = self.state.api_versions(0, None, Reply(error=35))
        else:
            request = REQUESTS[api_key].decode(frame, version=version, header=True)
            response = self.state.answer(0, api_key, version, request, reply)
        whole = framed(response, int.from_bytes(frame[4:8], "big"))
        return whole if reply.mangle is None else reply.mangle(whole)

    def responses(self) -> list[CompletedRequest]:
        """All that are complete."""
        found = []
        while (answered := self.connection.next_response(0.0)) is not None:
            found.append(answered)
        return found

    def ready(self) -> Peer:
        """After negotiation."""
        self.connection.start(0.0)
        while self.connection.phase is not ConnectionState.READY:
            for frame in self.sent():
                self.connection.receive(self.answer(frame))
            assert self.responses() == []
        return self


def three_requests(peer: Peer, reply: Reply = OK) -> list[bytes]:
    """One of each API in flight; returns the broker's responses."""
    peer.submit(metadata_request("t"), 5.0, 1)
    peer.submit(produce_request(batch(3)), 6.0, 2)
    body = [requests.encode_init_producer_id(4, -1, -1)]
    peer.submit(request(INIT_PRODUCER_ID, 4, body), 7.0, 3)
    return [peer.answer(frame, reply) for frame in peer.sent()]


def check_three(peer: Peer, responses: list[CompletedRequest]) -> None:
    """In order, decoded."""
    assert [peer.names[a.request] for a in responses] == [1, 2, 3]
    assert [type(a.response) for a in responses] == [
        requests.MetadataResponse,
        ProduceResponse,
        requests.ProducerIdResponse,
    ]
    assert [a.request.sent_ms for a in responses] == [5.0, 6.0, 7.0]
    assert responses[1].response.partitions[0].base_offset == 0


def test_versions_are_asked_for_first_and_kept() -> None:
    peer = Peer()
    with pytest.raises(ValueError, match="not ready"):
        peer.connection.submit(metadata_request("t"), 0.0)
    assert not peer.connection.send_buffer.next_buffers()
    assert not peer.connection.in_flight
    peer.connection.start(0.0)
    assert peer.connection.take_in_flight() == [], "negotiation is not reported as lost"
    peer = Peer().ready()
    assert peer.connection.api_versions == VERSIONS
    assert not peer.connection.in_flight


# Behind the error code: version 0's form (None), nothing, no versions, version 3's form, that with its range,
# nonsense.
VERSION_0 = (None, b"", bytes(4), b"\1" + bytes(5), b"\2\0\x12\0\0\0\2" + bytes(6), b"\xff" * 9)


@pytest.mark.parametrize("behind", VERSION_0)
def test_the_error_code_is_enough_to_ask_again_in_version_0(behind: bytes | None) -> None:
    """Catches: a broker that others wrote, which has not version 0's form for what it does not know."""
    peer = Peer({API_VERSIONS: (0, 0)})
    peer.connection.start(0.0)
    (first,) = peer.sent()
    assert first[2:4] == (4).to_bytes(2, "big")
    answer = b"" if behind is None else first[4:8] + b"\0\x23" + behind
    peer.connection.receive(len(answer).to_bytes(4, "big") + answer if answer else peer.answer(first))
    assert peer.responses() == []
    (second,) = peer.sent()
    assert second[2:4] == (0).to_bytes(2, "big")
    peer.connection.receive(peer.answer(second))
    assert peer.responses() == []
    assert peer.connection.phase is ConnectionState.READY


def test_versions_with_an_error_in_version_0_end_the_connection() -> None:
    for code in (35, 41, -1):
        peer = Peer({API_VERSIONS: (0, 0)})
        peer.connection.start(0.0)
        peer.connection.receive(peer.answer(peer.sent()[0]))
        assert peer.responses() == []
        peer.connection.receive(peer.answer(peer.sent()[0], Reply(error=code)))
        with pytest.raises(ProtocolError, match=rf"b1:9092 .*\(error {code}\)"):
            peer.responses()


def test_a_broker_without_produce_is_named_as_a_controller() -> None:
    peer = Peer()
    del peer.state.versions[PRODUCE]  # type: ignore[attr-defined]  # a dict here
    peer.connection.start(0.0)
    peer.connection.receive(peer.answer(peer.sent()[0]))
    with pytest.raises(BrokerVersionError, match=r"b1:9092 .*controller"):
        peer.responses()


@example(cuts=[1])
@example(cuts=[1 << 20])
@given(cuts=st.lists(st.integers(1, 60), min_size=1, max_size=30))
def test_responses_in_any_pieces(cuts: list[int]) -> None:
    peer = Peer().ready()
    data = memoryview(b"".join(three_requests(peer)))
    found = []
    at = turn = 0
    while at < len(data):
        step = cuts[turn % len(cuts)]
        peer.connection.receive(data[at : at + step])
        found += peer.responses()
        at, turn = at + step, turn + 1
    check_three(peer, found)
    assert not peer.connection.in_flight


# -- wrong responses --------------------------------------------------------------------------------


def refused_at(peer: Peer, count: int, reply: Reply, problem: str) -> None:
    """The first bytes of the response to a Metadata request are enough for an error."""
    peer.connection.submit(metadata_request("t"), 0.0)
    peer.connection.receive(peer.answer(peer.sent()[0], reply)[:count])
    with pytest.raises(ProtocolError, match=problem):
        peer.responses()


TOO_LONG = APIS[METADATA].largest_response(1_000, 0, 0)


def test_a_wrong_head_is_told_before_the_rest_arrives() -> None:
    for delta in (1, -1, 2**30):
        problem = r"b1:9092 .* sent correlation id .* but 1 was expected"
        refused_at(Peer().ready(), 8, wrong_correlation_id(delta), problem)
    for length in (-1, -(2**31), 0, 3, 2**31 - 1, TOO_LONG):
        refused_at(Peer().ready(), 4, claimed_length(length), rf"a response of {length} bytes")


def test_impossible_first_response_is_reported_as_tls() -> None:
    """More than ApiVersions has, and a TLS alert."""
    too_long = APIS[API_VERSIONS].largest_response(1_000, 0, 0).to_bytes(4, "big")
    for begin in (too_long, bytes.fromhex("15030300020246")):
        peer = Peer()
        peer.connection.start(0.0)
        peer.sent()
        peer.connection.receive(begin)
        with pytest.raises(ProtocolError, match="expects TLS"):
            peer.responses()


def test_an_http_server_is_named_as_one() -> None:
    """Catches: "sent a response of 1213486160 bytes", which are the letters HTTP."""
    peer = Peer()
    peer.connection.start(0.0)
    peer.sent()
    peer.connection.receive(b"HTTP/1.1 400 Bad Request\r\n")
    with pytest.raises(ProtocolError, match="is an HTTP server, and not a Kafka broker"):
        peer.responses()


def test_bytes_that_nobody_asked_for() -> None:
    begun = Peer().ready()
    begun.connection.submit(metadata_request("t"), 0.0)
    begun.connection.receive(begun.answer(begun.sent()[0]))
    begun.responses()
    # A request of which a part is written asks for nothing yet.
    begun.connection.submit(metadata_request("t"), 0.0)
    begun.connection.send_buffer.advance(10)
    for peer, junk in ((begun, bytes(8)), *((Peer().ready(), junk) for junk in (b"\0", b"HTTP/1.1 400\r\n"))):
        peer.connection.receive(junk)
        with pytest.raises(ProtocolError, match="bytes without a request"):
            peer.responses()


def test_a_response_with_trailing_bytes_is_used_with_one_warning_an_api(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Catches: a task that dies because a broker that others wrote appends bytes which do no harm."""
    peer = Peer()
    peer.connection.start(0.0)
    peer.connection.receive(peer.answer(peer.sent()[0], trailing(b"xyz")))
    assert peer.responses() == []
    assert peer.connection.phase is ConnectionState.READY
    for round in range(2):
        peer.connection.receive(b"".join(three_requests(peer, trailing(b"xyz"))))
        found = peer.responses()
        assert len(found) == 3
        if not round:
            check_three(peer, found)
    texts = [record.message for record in caplog.records]
    apis = ["ApiVersions v4", "Metadata v12", "Produce v12", "InitProducerId v4"]
    assert [text.partition(";")[0] for text in texts] == [
        f"b1:9092 (id 1): a response to {api} has 3 bytes too many" for api in apis
    ]


def test_good_responses_before_a_bad_one_count_and_the_bad_one_stays_in_flight() -> None:
    peer = Peer().ready()
    peer.submit(metadata_request("t"), 0.0, "good")
    peer.submit(produce_request(batch(1)), 0.0, "bad")
    peer.submit(metadata_request("t"), 0.0, "after")
    first, second, third = peer.sent()
    mangled = bytearray(peer.answer(second))
    mangled[-1] ^= 0xFF  # its tagged fields
    peer.connection.receive(peer.answer(first) + bytes(mangled) + peer.answer(third))
    answered = peer.connection.next_response(0.0)
    assert answered is not None
    assert peer.names[answered.request] == "good"
    with pytest.raises(ProtocolError, match="Produce v12"):
        peer.connection.next_response(0.0)
    lost = peer.connection.take_in_flight()
    assert [(peer.names[entry], possibly) for entry, possibly in lost] == [("bad", True), ("after", True)]


def test_requests_without_a_response_are_done_when_written_and_do_not_disturb_the_order() -> None:
    peer = Peer().ready()
    peer.submit(produce_request(batch(1), acks=0), 3.0, 1)
    peer.submit(metadata_request("t"), 4.0, 2)
    assert [peer.names[one] for one in peer.connection.in_flight] == [1, 2]
    for part in (0, 20):
        peer.connection.send_buffer.advance(part)
        assert peer.connection.take_written() == []
    peer = Peer().ready()
    for number in range(4):
        without = produce_request(batch(1), acks=0) if number % 2 else None
        peer.submit(without or metadata_request("t"), 0.0, number)
    frames = peer.sent()
    for number in (0, 2):
        peer.connection.receive(peer.answer(frames[number]))
        assert [peer.names[a.request] for a in peer.responses()] == [number]
    assert [peer.names[entry] for entry in peer.connection.take_written()] == [1, 3]
    assert not peer.connection.in_flight


def test_requests_lost_with_a_connection_tell_whether_bytes_of_them_were_written() -> None:
    peer = Peer().ready()
    peer.submit(metadata_request("t"), 0.0, "sent")
    peer.sent()
    peer.submit(produce_request(batch(1)), 0.0, "begun")
    peer.submit(produce_request(batch(1), acks=0), 0.0, "unsent")
    peer.connection.send_buffer.advance(1)
    lost = [(peer.names[entry], possibly) for entry, possibly in peer.connection.take_in_flight()]
    assert lost == [("sent", True), ("begun", True), ("unsent", False)]
    assert peer.connection.take_in_flight() == []


def test_throttling_is_the_clients_from_version_6_on() -> None:
    """And never negative."""
    for version, ms, expected in ((5, 700, 0), (6, 700, 700), (12, 700, 700), (12, -5, 0)):
        peer = Peer().ready()
        peer.connection.submit(produce_request(batch(1), version=version), 0.0)
        peer.connection.receive(peer.answer(peer.sent()[0], Reply(throttle_ms=ms)))
        assert [a.throttle_ms for a in peer.responses()] == [expected]


# -- scatter-gather: what comes out of the buffers is what went in, wherever the socket stops ----------


@given(
    groups=st.lists(st.lists(st.binary(max_size=12), max_size=8), max_size=8),
    cuts=st.lists(st.integers(1, 30), min_size=1, max_size=40),
)
def test_partial_sends_lose_and_repeat_nothing(groups: list[list[bytes]], cuts: list[int]) -> None:
    outgoing = SendBuffer()
    written = bytearray()
    turn = 0

    def send() -> None:
        nonlocal turn
        data = b"".join(outgoing.next_buffers())
        sent = min(cuts[turn % len(cuts)], len(data))
        turn += 1
        written.extend(data[:sent])
        outgoing.advance(sent)

    for group in groups:
        outgoing.add([memoryview(part) for part in group])
        if outgoing.next_buffers():
            send()
    while outgoing.next_buffers():
        send()
    assert bytes(written) == b"".join(part for group in groups for part in group)
    assert outgoing.written_bytes == outgoing.queued_bytes == len(written)


def test_no_send_has_more_buffers_than_the_system_takes() -> None:
    outgoing = SendBuffer()
    parts = [bytes([i % 256]) for i in range(5000)]
    outgoing.add(parts)
    written = bytearray()
    while outgoing.next_buffers():
        buffers = outgoing.next_buffers()
        assert len(buffers) <= MAX_BUFFERS_PER_SEND
        written += b"".join(buffers)
        outgoing.advance(sum(map(len, buffers)))
    assert bytes(written) == b"".join(parts)


def test_written_buffers_are_let_go_of_also_by_a_stream_that_never_drains() -> None:
    chunk, outgoing = bytearray(100), SendBuffer()
    outgoing.add([memoryview(chunk), b"tail"])
    outgoing.advance(99)
    outgoing.next_buffers()
    outgoing.advance(1)
    assert outgoing.next_buffers()
    chunk.clear()  # raises BufferError while a view of it exists
    for _ in range(20_000):
        outgoing.add([b"ab"])
        outgoing.advance(2)
    assert held_bytes(outgoing) < 10_000 * sys.getsizeof(b"ab")
