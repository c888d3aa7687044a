"""What the live view has shown, in a file that outlives the application: ``python -m kafka_sink.view FILE``.

Lines of JSON, each with one of these: ``snapshot``, what the page's figures were, about once a minute;
``sample``, an entry of the charts, every ten seconds; ``event``. A file that is full becomes FILE.1, in place
of the one before.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kafka_sink.coordinator.figures.application_figures import ApplicationFigures

_log = logging.getLogger(__name__)
FORMER = ".1"
# Bytes of a file: an application has two at most. And how many applications a folder keeps.
_MAX_BYTES, _MAX_FILES = 16 << 20, 20
_SAMPLE_S, _SNAPSHOT_S = 10.0, 60.0
# At least so long after the last: a write ends, or something happens.
_EARLY_S = 15.0
_MAX_TASKS = 20
# Lines that wait for a slow disk, and how long the end waits for them.
_MAX_WAITING, _CLOSE_S = 1000, 2.0
# The group may read it, as with the delivery report.
_MODE = 0o640


class History:
    """Records ``figures``. ``record`` and ``close`` belong to the coordinator's loop; a thread writes."""

    def __init__(self, figures: ApplicationFigures, folder: Path) -> None:
        self._figures = figures
        self._events = 0
        # Reports and ended writes that the last snapshot has.
        self._shown = (0, 0)
        self._sampled_s = self._taken_s = 0.0
        self._lines: queue.Queue[bytes | None] = queue.Queue(_MAX_WAITING)
        started = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        self.path = folder / f"kafka-chunked-{started}-{os.getpid()}.jsonl"
        _forget_oldest(folder)
        self._thread = threading.Thread(target=self._write, name="kafka-chunked-history", daemon=True)
        self._thread.start()

    def record(self, now_ms: float, wall_s: float) -> None:
        """Once a second: what has happened since."""
        figures = self._figures
        events = figures.events_since(self._events)
        self._events += len(events)
        for event in events:
            self._put({"event": event})
        sample = figures.last_sample
        if sample is not None and wall_s - self._sampled_s >= _SAMPLE_S:
            self._sampled_s = wall_s
            self._put({"sample": sample})
        ended = figures.writes_ended > self._shown[1]
        changed = figures.reports > self._shown[0] or ended
        pause_s = _EARLY_S if ended or events else _SNAPSHOT_S
        if (changed or events) and wall_s - self._taken_s >= pause_s:
            self._take(now_ms, wall_s)

    def _take(self, now_ms: float, wall_s: float) -> None:
        self._taken_s = wall_s
        self._shown = (self._figures.reports, self._figures.writes_ended)
        content = self._figures.snapshot(now_ms)
        left_out = {"history": [], "events": [], "spark_ui": None, "tasks": content["tasks"][:_MAX_TASKS]}
        self._put({"snapshot": {**content, **left_out}})

    def close(self, now_ms: float, wall_s: float) -> None:
        """Record the last moment."""
        if self._figures.reports:
            self._taken_s = wall_s
            self.record(now_ms, wall_s)
            self._take(now_ms, wall_s)
        self._put(None)
        self._thread.join(_CLOSE_S)

    def _put(self, line: Mapping[str, Any] | None) -> None:
        content = None if line is None else json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            self._lines.put_nowait(content)
        except queue.Full:
            _log.debug("a line of the history is dropped, as the disk is slow")

    def _write(self) -> None:
        try:
            while (line := self._lines.get()) is not None:
                append(self.path, line)
        except OSError as error:
            _log.warning("The history %s ends: %s", self.path, error)


def append(path: Path, line: bytes) -> None:
    """Raises OSError."""
    with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _MODE), "ab") as file:
        file.write(line)
        size = file.tell()
    if size >= _MAX_BYTES:
        os.replace(path, path.with_name(path.name + FORMER))


def files_in(folder: Path) -> list[Path]:
    """Histories, the newest first, without the former halves."""
    found = {path.with_name(path.name.removesuffix(FORMER)) for path in folder.glob("kafka-chunked-*.jsonl*")}
    return sorted(found, key=lambda path: path.name, reverse=True)


def _forget_oldest(folder: Path) -> None:
    for path in files_in(folder)[_MAX_FILES - 1 :]:
        for one in (path, path.with_name(path.name + FORMER)):
            with suppress(OSError):  # another user's
                one.unlink(missing_ok=True)
