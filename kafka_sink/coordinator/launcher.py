"""Finds the application's coordinator, or starts it.

It runs in Spark's planning workers, and in the driver's own Python. Any of them may come first, and idle
workers end, so the coordinator is a process in a session of its own.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace

from kafka_sink import libraries, spark_application
from kafka_sink.cluster.topic_state import MetadataSnapshot
from kafka_sink.coordinator.address import UNAVAILABLE, PlannedCoordinator, warn_of_no_coordinator
from kafka_sink.coordinator.client import ask
from kafka_sink.coordinator.live.messages import OpenView, ViewOpened
from kafka_sink.coordinator.placement import Placement, is_enabled, placement, ui_placement
from kafka_sink.coordinator.rendezvous import LocationFolder, RunningCoordinator, serving
from kafka_sink.driver import driver_log, driver_process
from kafka_sink.driver.driver_conf import conf_of
from kafka_sink.driver.driver_process import HostProcess
from kafka_sink.errors import ProtocolError
from kafka_sink.options import SinkOptions

# The time to start the process, to open the live view, and to wait for the lock, whose holder does both.
# Tasks that start before the live view is open are not shown.
_START_MS, _LIVE_VIEW_MS, _LOCK_MS = 5000.0, 5000.0, 10_000.0
_POLL_S = 0.01
_BACKLOG = 4096
# After a failure, or if the process keeps ending, micro-batches do not try again before this time.
_AFTER_FAILURE_S = 10.0
# The only variables of the driver's environment that the coordinator gets: those that Python needs to start,
# and those that times and texts depend on. The others may contain cloud keys, passwords, and Spark's secret.
_INHERITED = frozenset({"PATH", "HOME", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LD_LIBRARY_PATH", "VIRTUAL_ENV"})
_INHERITED_PREFIXES = ("LC_", "PYTHON")
_NOT_INHERITED = ("PYTHON_WORKER_", "PYTHON_DAEMON_")
# The messages that the user reads once in an application.
_LIVE_VIEW, _RESTARTED = "live view", "the coordinator was started again"
# The processes are kept, so that Popen does not complain about children that outlive it.
_started: list[subprocess.Popen[bytes]] = []


def plan_coordinator(
    options: SinkOptions, snapshot: MetadataSnapshot | None = None, environ: Mapping[str, str] = os.environ
) -> PlannedCoordinator:
    """Find the application's coordinator, or start it. If that fails, warn and plan without it.

    If the coordinator runs, this costs only file look-ups. ``snapshot``: the topics' metadata that planning
    has learnt. Raises only ConfigurationError, for an administrator's invalid setting.
    """
    local_dirs = spark_application.local_dirs(environ)
    if not local_dirs or not is_enabled(options, environ):
        return PlannedCoordinator(snapshot=snapshot)
    try:
        running = _find_or_start(options, local_dirs, environ)
    except (OSError, ProtocolError) as error:
        spark_application.note(UNAVAILABLE)
        warn_of_no_coordinator(
            f"no coordinator could be started ({error}). coordinator.enabled=false avoids this warning"
        )
        running = None
    if running is None:
        return PlannedCoordinator(snapshot=snapshot)
    group = running.group_of(options.identity_of_cluster())
    address = replace(running.address, group=group, has_view=bool(running.view_url))
    host = running.bound_to if Placement(running.bound_to, address.port).is_loopback else ""
    return PlannedCoordinator(replace(address, host=host), snapshot)


def _find_or_start(
    options: SinkOptions, local_dirs: str, environ: Mapping[str, str]
) -> RunningCoordinator | None:
    running = serving(LocationFolder.of(local_dirs))
    if running is not None and _has_view(running, ui_placement(options, environ)):
        return running
    if spark_application.happened_within(UNAVAILABLE, _AFTER_FAILURE_S):
        return None
    driver = driver_process.find_driver_process()
    if driver is None:
        warn_of_no_coordinator("no coordinator was started, because /proc does not show the driver's process")
        return None
    conf = conf_of(driver, environ)
    if not is_enabled(options, environ, conf):
        return None
    where = placement(options, environ, conf)
    view = ui_placement(options, environ, conf)
    place = LocationFolder.make(local_dirs)
    with place.lock(_LOCK_MS):
        running, before = serving(place), place.found()
        if running is None:
            running = _start(where, place, driver, environ)
            if before is not None:
                spark_application.note(UNAVAILABLE)
                if spark_application.first_time(_RESTARTED):
                    log = place.folder / "log"
                    driver_log.warn(f"kafka-chunked: the coordinator had ended and was restarted; see {log}")
                if view is not None and not view.port:
                    # After a restart the live view keeps its port, so that open pages reconnect.
                    view = Placement(view.address, before.view_port)
        if view is not None and not _has_view(running, view):
            running = _open_view(place, running, view)
    return running


def _has_view(running: RunningCoordinator, wanted: Placement | None) -> bool:
    # A place that failed is not tried again, because each micro-batch would warn.
    return wanted is None or bool(running.view_url) or (wanted.address, wanted.port) in running.failed_views


def _open_view(place: LocationFolder, running: RunningCoordinator, view: Placement) -> RunningCoordinator:
    """Open the live view, wait until it serves, and log its address. The caller holds the lock."""
    opened = ask(running.of_driver, OpenView(view.address, view.port), ViewOpened, _LIVE_VIEW_MS)
    failed = ((view.address, view.port),) if opened.error else ()
    failed_views = running.failed_views + failed
    running = replace(running, view_url=opened.url, view_port=opened.port, failed_views=failed_views)
    place.publish(running)
    if opened.error:
        driver_log.warn(f"kafka-chunked: the live view could not be opened: {opened.error}")
    elif spark_application.first_time(f"{_LIVE_VIEW} {opened.url}"):
        driver_log.report(f"kafka-chunked: the live view is at {opened.url}")
        if not view.is_loopback:
            driver_log.warn(
                f"kafka-chunked: ui.bind.address={view.address}: everyone who can connect to the live view "
                "sees the names of topics, brokers and hosts"
            )
    return running


def _start(
    where: Placement, place: LocationFolder, driver: HostProcess, environ: Mapping[str, str]
) -> RunningCoordinator:
    """Bind the port in this process, which can report an error, and wait until the coordinator serves.

    The caller holds the lock. Raises OSError, of which TimeoutError is one.
    """
    try:
        listening = where.listen(_BACKLOG)
    except OSError as error:
        raise OSError(
            f"it cannot listen on {where.address}, port {where.port or 'any'}: {error.strerror or error}. If "
            "the port is in use, set coordinator.port; if this host does not have the address, set "
            "coordinator.bind.address"
        ) from None
    place.withdraw()
    with listening:
        process = _spawn(place, driver, where.address, listening.fileno(), environ)
    until = time.monotonic() + _START_MS / 1000
    try:
        while (running := place.found()) is None:
            if process.poll() is not None:
                raise OSError(f"its process has ended; see {place.folder / 'log'}")
            if time.monotonic() >= until:
                raise TimeoutError(f"its process did not start to serve within {_START_MS / 1000:.0f} s")
            time.sleep(_POLL_S)
    except BaseException:
        # Also if Ctrl-C ends planning: a process that serves later would compete with the next one.
        process.kill()
        raise
    return running


def _spawn(
    place: LocationFolder,
    driver: HostProcess,
    address: str,
    listening: int,
    environ: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    """The arguments contain no secrets: the process creates its own key and token."""
    settings = {
        "folder": str(place.parent),
        "driver": [driver.pid, driver.started],
        "address": address,
        "listening": listening,
    }
    inherited = {
        name: value
        for name, value in environ.items()
        if name in _INHERITED
        or (name.startswith(_INHERITED_PREFIXES) and not name.startswith(_NOT_INHERITED))
    }
    inherited["PYTHONPATH"] = libraries.path_for_child(sys.path)
    flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
    log = os.open(place.folder / "log", flags, 0o600)
    module = "kafka_sink.coordinator.server_process"
    try:
        process = subprocess.Popen(
            [*libraries.module_command(module), json.dumps(settings)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd="/",
            env=inherited,
            pass_fds=(listening,),
            start_new_session=True,
        )
    except OSError as error:
        raise OSError(f"its process cannot be started: {error.strerror or error}") from None
    finally:
        os.close(log)
    _started.append(process)
    # Python otherwise warns, when it ends, about a child that outlives it.
    atexit.register(setattr, process, "returncode", 0)
    return process
