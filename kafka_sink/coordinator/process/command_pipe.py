"""The pipe by which planning tells the coordinator its settings and clusters: one JSON object per line."""

from __future__ import annotations

import json
import os
from typing import Any

from kafka_sink.secret import HiddenValues

_READ_BYTES = 64 * 1024
# Options may contain a bundle of certificates, which takes hundreds of kilobytes.
_MAX_LINE_BYTES = 16 * 1024 * 1024


class CommandPipe:
    """Reads lines from a descriptor, which must not block."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._held: list[bytes] = []
        self._held_bytes = 0
        # Whether the end was read. The coordinator's own pipe has none, as it can write there, too.
        self.is_closed = False

    def lines(self) -> list[dict[str, Any]]:
        """The complete lines. Skips invalid JSON, which a writer leaves behind when it dies within a line."""
        data = self._read()
        if b"\n" not in data:
            self._hold(data)
            return []
        *complete, partial = b"".join((*self._held, data)).split(b"\n")
        self._held, self._held_bytes = [], 0
        self._hold(partial)
        messages: list[dict[str, Any]] = []
        for line in filter(None, complete):
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if isinstance(message, dict):
                messages.append(HiddenValues(message))
        return messages

    def _read(self) -> bytes:
        pieces = []
        try:
            while data := os.read(self._handle, _READ_BYTES):
                pieces.append(data)
            self.is_closed = True
        except BlockingIOError:
            pass
        return b"".join(pieces)

    def _hold(self, data: bytes) -> None:
        """Keep a partial line. Of a line that is too long the start is dropped; its end is invalid JSON."""
        if self._held_bytes + len(data) > _MAX_LINE_BYTES:
            self._held, self._held_bytes = [], 0
        self._held.append(data)
        self._held_bytes += len(data)
