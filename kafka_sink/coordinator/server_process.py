"""The coordinator's process. It serves tasks until the driver or the application's folder is gone.

The launcher starts ``python -m kafka_sink.coordinator.server_process`` with settings that contain no secret.
The process has no credential of Kafka and connects to no broker.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

from kafka_sink.clock import monotonic_ms
from kafka_sink.coordinator.breaker_service import BreakerService
from kafka_sink.coordinator.live.application import ApplicationMetrics, ReportService
from kafka_sink.coordinator.live.view import ViewService
from kafka_sink.coordinator.metadata_service import MetadataService
from kafka_sink.coordinator.placement import Placement
from kafka_sink.coordinator.rates import RateService
from kafka_sink.coordinator.rendezvous import LocationFolder, RunningCoordinator, read_found, serving
from kafka_sink.coordinator.schema import MemoryBudget
from kafka_sink.coordinator.server import CoordinatorServer, Services
from kafka_sink.coordinator.transport import ServerBounds, new_identity
from kafka_sink.coordinator.writes import WriteService
from kafka_sink.driver.driver_process import HostProcess

_log = logging.getLogger(__name__)
# How often the process checks that its driver and its folder exist.
_CHECK_S = 1.0
# Open files other than connections, such as logs and modules. If few files are allowed, half of them.
_OTHER_FILES = 1000


class ServerProcess:
    """Runs the server with all its services. ``settings``: see the launcher."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._place = LocationFolder(settings["folder"])
        self._driver = HostProcess(int(settings["driver"][0]), str(settings["driver"][1]))
        self._identity = new_identity()
        self._metrics = ApplicationMetrics()

    def run(self) -> None:
        collect_garbage_seldom()
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        listening = socket.socket(fileno=int(self._settings["listening"]))
        server = CoordinatorServer(self._identity, self.services(), monotonic_ms, bounds_of_process())
        self._metrics.coordinator = server.state
        server.start(listening)
        where = Placement(self._settings["address"], listening.getsockname()[1])
        address = self._identity.address(where.local_host, where.port)
        process = HostProcess.running(os.getpid())
        # The launcher has read /proc before.
        assert process is not None
        running = RunningCoordinator(address, self._identity.driver_token, process, where.address)
        # If planning was killed while this process started, the next one may have found another coordinator.
        if serving(self._place) is None:
            self._place.publish(running)
        while self._driver.is_alive() and self._is_current():
            self._metrics.sample(monotonic_ms())
            await asyncio.sleep(_CHECK_S)
        server.close()
        listening.close()

    def services(self) -> Services:
        metrics = self._metrics
        return {
            MetadataService: partial(MetadataService, budget=MemoryBudget()),
            BreakerService: partial(BreakerService, budget=MemoryBudget(96 * 1024 * 1024)),
            RateService: RateService,
            WriteService: partial(WriteService, on_failed=metrics.on_attempt_failed),
            ReportService: partial(ReportService, metrics=metrics),
            ViewService: partial(ViewService, metrics=metrics),
        }

    def _is_current(self) -> bool:
        """Whether the application's folder exists, and no other coordinator has been started in it."""
        published = read_found(self._place.folder / "found")
        return published is not None and published.address.token == self._identity.token


def bounds_of_process(limits: Any = resource) -> ServerBounds:
    """The server's bounds. Each connection is an open file, and the system limits their number."""
    bounds = ServerBounds()
    soft, hard = limits.getrlimit(resource.RLIMIT_NOFILE)
    wanted = bounds.connections + bounds.unauthenticated + _OTHER_FILES
    files = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < files:
        try:
            limits.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        except (OSError, ValueError):
            files = soft  # the system's own limit is lower
    if files >= wanted:
        return bounds
    left = max(2, files - _OTHER_FILES, files // 2)
    bounds = ServerBounds(connections=left - left // 6, unauthenticated=max(1, left // 6))
    _log.warning(
        "The coordinator serves at most %d tasks, because its process may open only %d files. For more "
        "tasks, raise the driver's limit (ulimit -n)",
        *(bounds.connections, files),
    )
    return bounds


def collect_garbage_seldom() -> None:
    """Make full collections rare: each one stops the loop while it visits the objects of all tasks.

    Reference counts free most objects that tasks leave behind. The remaining cycles, such as those of
    exceptions, are mostly young. Young objects are visited a few at a time: each may refer to many others.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100, 5, 10_000)


def main(arguments: list[str]) -> None:
    """Serve. Then end the process without waiting for its daemon threads, which hold nothing."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Ctrl-C in the driver's terminal interrupts a job, but not the application.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ServerProcess(json.loads(arguments[0])).run()
    except BaseException:  # noqa: BLE001 - the log is where it is found
        _log.exception("the coordinator failed")
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
