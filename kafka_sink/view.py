"""``python -m kafka_sink.view FILE``: opens the live view of an application that has ended."""

from __future__ import annotations

import argparse
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kafka_sink.coordinator.figures.history import FORMER, files_in
from kafka_sink.coordinator.figures.http_server import HttpServer, Page, Response
from kafka_sink.coordinator.figures.live_view import as_json, page

_DESCRIPTION = """\
Opens the page of the live view as it was, from the file that ui.history.path keeps, or from the newest in a
folder of such files. A slider selects the moment. It serves the page on this host until Ctrl-C.
"""
# Points of a chart, and events, that a browser gets.
_MAX_SAMPLES, _MAX_EVENTS = 1000, 500


class Recorded:
    """A history in memory. Raises ValueError for a file that is none, OSError where it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.snapshots: list[dict[str, Any]] = []
        self.samples: list[list[float | None]] = []
        self.events: list[dict[str, Any]] = []
        kept: dict[str, list[Any]] = {
            "snapshot": self.snapshots,
            "sample": self.samples,
            "event": self.events,
        }
        for line in _lines(path):
            for kind, content in line.items():
                if kind in kept:
                    kept[kind].append(content)
        if not self.snapshots:
            raise ValueError(f"{path} holds no history of a live view")

    def last(self) -> dict[str, Any]:
        """What the page reads first."""
        times = [one["time"] for one in self.snapshots]
        step = len(self.samples) // _MAX_SAMPLES + 1
        others = [*(one["time"] for one in self.events), *(one[0] or times[0] for one in self.samples)]
        begin = min([times[0], *others])
        return {
            **self.snapshots[-1],
            "history": self.samples[::step],
            "events": self.events[: -_MAX_EVENTS - 1 : -1],
            "recorded": {"times": times, "span": [begin, times[-1]]},
        }


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    # A file that has just become the former one has no successor yet.
    both = [one for one in (path.with_name(path.name + FORMER), path) if one.exists()]
    for one in both or [path]:
        with open(one, encoding="utf-8", errors="replace") as file:
            for line in file:
                try:
                    found = json.loads(line)
                except ValueError:
                    continue  # a writer that died in mid-line
                if isinstance(found, dict):
                    yield found


def fixed(made: Callable[[], Response]) -> Page:
    """A page that is made without waiting."""

    async def respond() -> Response:
        return made()

    return respond


def pages_of(recorded: Recorded) -> dict[str, Page]:
    """The page, its first figures, and those of each moment."""
    moments = {
        f"/figures/{number}.json": fixed(partial(as_json, one))
        for number, one in enumerate(recorded.snapshots)
    }
    return {"/": fixed(page), "/figures.json": fixed(lambda: as_json(recorded.last())), **moments}


def main(arguments: Sequence[str] | None = None, until: threading.Event | None = None) -> int:
    """Return 0 after Ctrl-C, or once ``until`` is set; 1, with a line that says why, where nothing can be
    shown."""
    parser = argparse.ArgumentParser(prog="python -m kafka_sink.view", description=_DESCRIPTION)
    parser.add_argument("file", type=Path, help="a file that ui.history.path keeps, or its folder")
    parser.add_argument("--port", type=int, default=0, help="default: any free one")
    parser.add_argument("--bind-address", default="127.0.0.1", help="there is no login; default: 127.0.0.1")
    args = parser.parse_args(arguments)
    path: Path = args.file
    try:
        if path.is_dir():
            found = files_in(path)
            if not found:
                raise ValueError(f"{path} holds no history of a live view")
            path = found[0]
        recorded = Recorded(path)
        listening = socket.create_server((args.bind_address, args.port))
    except (OSError, ValueError) as error:
        print(f"kafka_sink.view: {error}", file=sys.stderr)
        return 1
    port = listening.getsockname()[1]
    server = HttpServer(listening, pages_of(recorded), {"localhost", args.bind_address, socket.gethostname()})
    server.start()
    print(f"{path} is at http://{args.bind_address}:{port}/ until Ctrl-C", flush=True)
    try:
        (until or threading.Event()).wait()
    except KeyboardInterrupt:
        pass
    server.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
