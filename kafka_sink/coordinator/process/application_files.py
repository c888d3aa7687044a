"""What planning and the coordinator share: files in the application's folder, restarts, and a pipe."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from kafka_sink.secret import HiddenValues

# How often the coordinator looks for its driver and its folder.
WATCH_S = 1.0
# A process that has lived this long does not count as one that keeps ending.
LONG_LIFE_S = 600.0
# One that ended is started again at once; one that keeps ending, after ever longer pauses.
_PAUSE_S, _MAX_PAUSE_S = 10.0, 600.0


def known_cluster_marker(folder: Path, token: str, key: str) -> Path:
    """This file exists while the coordinator with this token serves the cluster.

    Planning writes it; the coordinator deletes it when it forgets the cluster.
    """
    return folder / f"said-{token}-{key}"


def ui_marker(folder: Path, token: str) -> Path:
    """Written by the coordinator with this token when it serves the live view, or could not: JSON with
    ``url``, ``address`` and ``port``, or ``error``."""
    return folder / f"ui-{token}"


def console_marker(folder: Path, token: str) -> Path:
    """This file exists where the coordinator with this token shows progress in the driver's terminal."""
    return folder / f"console-{token}"


def starts_file(folder: Path) -> Path:
    """The file that counts how often a coordinator was started."""
    return folder / "starts"


def is_current(marker: Path, token: str) -> bool:
    """Whether the application's folder exists, and no other coordinator has been started in it."""
    try:
        return bool(json.loads(marker.read_bytes())["token"] == token)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def pause_s(starts: int) -> float:
    """How long to wait after the last start, when ``starts`` processes in a row ended early."""
    return 0.0 if starts < 2 else min(_PAUSE_S * math.pow(2, min(starts, 30) - 2), _MAX_PAUSE_S)


# The pipe by which planning tells the coordinator its settings and clusters: one JSON object per line.


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
