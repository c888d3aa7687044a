"""The bytes that wait for a socket: a queue of buffers, which are never joined."""

from __future__ import annotations

from collections.abc import Sequence

from kafka_sink.network.events import Buffer

# IOV_MAX on Linux and macOS: one sendmsg takes no more buffers.
MAX_BUFFERS_PER_SEND = 1024
_TRIM_AT = 4096


class SendBuffer:
    """A stream of buffers and the position up to which it is written, which may be inside a buffer.

    ``queued_bytes`` and ``written_bytes`` count from the stream's beginning. Work per buffer is one slice
    entry and one step of an index, whatever the number of sends.
    """

    def __init__(self) -> None:
        self.queued_bytes = 0
        self.written_bytes = 0
        self._buffers: list[Buffer] = []
        self._index = 0
        self._offset = 0

    def add(self, buffers: Sequence[Buffer]) -> None:
        """Queues more buffers."""
        if self._index == len(self._buffers) or self._index >= _TRIM_AT:
            del self._buffers[: self._index]
            self._index = 0
        self._buffers += buffers
        self.queued_bytes += sum(map(len, buffers))

    @property
    def pending(self) -> bool:
        """Whether anything is left."""
        return self.written_bytes < self.queued_bytes

    def next_buffers(self) -> list[Buffer]:
        """The buffers for the next sendmsg."""
        part = self._buffers[self._index : self._index + MAX_BUFFERS_PER_SEND]
        if self._offset:
            part[0] = memoryview(part[0])[self._offset :]
        return part

    def advance(self, sent: int) -> None:
        """``sent`` more bytes have been written."""
        self.written_bytes += sent
        left = sent + self._offset
        index = self._index
        buffers = self._buffers
        while index < len(buffers) and left >= len(buffers[index]):
            left -= len(buffers[index])
            # The chunk goes back to the pool after the response, so no view of it may remain here.
            buffers[index] = b""
            index += 1
        self._index = index
        self._offset = left
