"""Scatter-gather: what comes out of the buffers is what went in, wherever the socket stops."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kafka_sink.network.broker_protocol import MAX_BUFFERS_PER_SEND, SendBuffer


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


def test_written_buffers_are_let_go_of() -> None:
    chunk = bytearray(100)
    outgoing = SendBuffer()
    outgoing.add([memoryview(chunk), b"tail"])
    outgoing.advance(99)
    outgoing.next_buffers()
    outgoing.advance(1)
    assert outgoing.next_buffers()
    chunk.clear()  # raises BufferError while a view of it exists


def test_a_stream_that_never_drains_does_not_grow() -> None:
    outgoing = SendBuffer()
    outgoing.add([b"ab"])
    for _ in range(20_000):
        outgoing.add([b"ab"])
        outgoing.advance(2)
    assert len(outgoing._buffers) < 10_000
