"""Learns from Spark's web UI that the job of a write has ended.

Spark's driver is the first to know that a job was cancelled or has failed. The executors' JVMs tell their
Python workers up to four seconds later, and the call of ``abort`` waits for a new Python process. Spark's
monitoring REST API lists the running jobs; the coordinator asks it while tasks write. Without the UI, or
where it may not be read, tasks learn of the end as before.

Most micro-batches end before the first check, and the driver reports that. So streams cost no request.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

_log = logging.getLogger(__name__)
# Spark's UI answers within milliseconds.
_INTERVAL_S = 0.3
# At the first request Spark loads its REST server, which takes a busy driver many seconds.
_TIMEOUT_S = 60.0
# After an error, or without a UI, the next check comes later.
_PAUSE_S = 10.0
# A stage whose job is not listed for so long is not watched any more.
_UNSEEN_MS = 60_000.0
# Stages watched at once.
MAX_STAGES = 10_000
_MAX_BYTES = 16 * 1024 * 1024
_API = "/api/v1/applications"


@dataclass(slots=True)
class _Stage:
    write: str
    since_ms: float
    was_running: bool = False


def running_stages(address: tuple[str, int]) -> set[int]:
    """The stages of running jobs, as Spark's monitoring REST API at this address and port lists them for the
    one application that it knows.

    Raises OSError, HTTPException, ValueError, LookupError or TypeError where the UI does not say it.
    """
    with closing(http.client.HTTPConnection(*address, timeout=_TIMEOUT_S)) as connection:
        (application,) = _get(connection, _API)
        running = _get(connection, f"{_API}/{application['id']}/jobs?status=running")
    return {int(stage) for job in running for stage in job["stageIds"]}


def _get(connection: http.client.HTTPConnection, path: str) -> Any:
    connection.request("GET", path, headers={"Accept": "application/json"})
    response = connection.getresponse()
    body = response.read(_MAX_BYTES)
    if response.status != http.client.OK:
        raise LookupError(f"status {response.status}")
    return json.loads(body)


class SparkJobs:
    """Which watched stages have lost their job. A job has ended once it was listed as running and is not any
    more: Spark keeps running jobs in the list, whatever else it removes. A job that was never listed says
    nothing.

    Once started, a daemon thread asks the UI that ``find`` finds (see ``find_ui``), and only while stages are
    watched; by ``call`` it has ``on_ended`` called with each whose job has ended. Any thread calls the
    methods.
    """

    def __init__(
        self,
        find: Callable[[], tuple[str, int] | None],
        clock_ms: Callable[[], float],
        *,
        interval_s: float = _INTERVAL_S,
    ) -> None:
        self.call: Callable[..., object] = lambda act, stage: act(stage)
        self.on_ended: Callable[[int], None] = lambda _: None
        self._find = find
        self._clock_ms = clock_ms
        self._interval_s = interval_s
        self._changed = threading.Condition()  # guards the next two
        self.stages: OrderedDict[int, _Stage] = OrderedDict()
        self._is_closing = False

    def start(self) -> None:
        threading.Thread(target=self._run, name="kafka-chunked-jobs", daemon=True).start()

    def watch(self, stage: int, write: str) -> None:
        """Tasks of this stage write."""
        with self._changed:
            self.stages.setdefault(stage, _Stage(write, self._clock_ms()))
            if len(self.stages) > MAX_STAGES:
                self.stages.popitem(last=False)
            self._changed.notify()

    def unwatch(self, write: str) -> None:
        """The write is over, and its tasks know."""
        with self._changed:
            for stage in [stage for stage, one in self.stages.items() if one.write == write]:
                del self.stages[stage]

    def observe(self, running: Collection[int]) -> list[int]:
        """The running jobs have these stages. Returns the watched stages whose job has ended."""
        ended = []
        with self._changed:
            unseen_ms = self._clock_ms() - _UNSEEN_MS
            for stage, one in list(self.stages.items()):
                if stage in running:
                    one.was_running = True
                elif one.was_running or one.since_ms < unseen_ms:
                    del self.stages[stage]
                    if one.was_running:
                        ended.append(stage)
        return ended

    def close(self) -> None:
        """Ask the thread to end."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()

    def _run(self) -> None:
        ui, pause_s = None, self._interval_s
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or self.stages)
                if self._changed.wait_for(lambda: self._is_closing, pause_s):
                    break
                oldest = next(iter(self.stages.values()), None)
            pause_s = self._interval_s
            if oldest is None or self._clock_ms() - oldest.since_ms < self._interval_s * 1000:
                continue
            try:
                ui = ui or self._find()
                if ui is None:
                    raise LookupError("the driver has no UI")
                running = running_stages(ui)
            except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
                _log.debug("Spark's UI does not list the running jobs: %r", error)
                ui, pause_s = None, _PAUSE_S
                continue
            for stage in self.observe(running):
                self.call(self.on_ended, stage)


# Spark tries the next ports where one is taken: spark.port.maxRetries.
_TRIED_PORTS = 17
_LISTENING = "0A"


def find_ui(driver: int, first_port: int) -> tuple[str, int] | None:
    """The UI's address and port. ``driver``: its process. ``first_port``: see placement. None without a UI.

    No other port of the driver is tried: Spark logs an error for HTTP at its other ports.
    """
    ports = range(first_port, first_port + _TRIED_PORTS) if first_port else ()
    found = [one for one in _listening(driver) if one[1] in ports]
    return min(found, key=lambda one: one[1], default=None)


def _listening(pid: int) -> Iterator[tuple[str, int]]:
    inodes = set()
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                inodes.add(os.readlink(entry.path))
    for table in ("tcp", "tcp6"):
        with suppress(OSError), open(f"/proc/{pid}/net/{table}", encoding="ascii") as file:
            for fields in map(str.split, file):
                if len(fields) > 9 and fields[3] == _LISTENING and f"socket:[{fields[9]}]" in inodes:
                    yield listening_address(fields[1])


def listening_address(text: str) -> tuple[str, int]:
    """An address and port of /proc/net/tcp or tcp6; the loopback address for all interfaces."""
    packed, _, port = text.partition(":")
    # The kernel writes words of 32 bits in the byte order of the host, which is little-endian wherever
    # PyArrow runs.
    words = [packed[at : at + 8] for at in range(0, len(packed), 8)]
    address = ipaddress.ip_address(b"".join(bytes.fromhex(word)[::-1] for word in words))
    address = getattr(address, "ipv4_mapped", None) or address
    # Not a name: a driver that listens on IPv4 only leaves ::1, to which names lead first, to anybody.
    # Java's sockets for all IPv6 interfaces take IPv4, too, and nobody else can have that port then.
    return "127.0.0.1" if address.is_unspecified else str(address), int(port, 16)
