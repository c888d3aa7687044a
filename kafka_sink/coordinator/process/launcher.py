"""Finds the application's coordinator, or starts it.

Runs in Spark's planning workers, and in the driver's own Python. Any of them may come first, and workers end
when idle, so the coordinator is a process in a session of its own. If it cannot be started, the write is
planned without it.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from kafka_sink import libraries, spark_application
from kafka_sink.coordinator.process.placement import (
    Placement,
    is_enabled,
    placement,
    ui_history,
    ui_placement,
)
from kafka_sink.coordinator.process.rendezvous_directory import (
    RendezvousDirectory,
    RunningCoordinator,
    Starts,
    json_line,
    pause_s,
    write_all,
)
from kafka_sink.coordinator.process.terminal_progress import driver_terminal
from kafka_sink.coordinator.transport.address import UNAVAILABLE, Rendezvous, warn_of_no_coordinator
from kafka_sink.coordinator.transport.session import SECRET_BYTES
from kafka_sink.driver import driver_log, driver_process
from kafka_sink.driver.driver_conf import conf_of, shows_progress
from kafka_sink.driver.driver_process import DriverProcess
from kafka_sink.options import SinkOptions
from kafka_sink.secret import HiddenValues

_LOCK_MS = 2000.0
# A new process imports its modules before it reads; one that runs reads within milliseconds.
_NEW_READS_MS, _READS_MS = 5000.0, 1000.0
# A write whose tasks start before the live view serves would not be shown.
_LIVE_VIEW_MS = 5000.0
_BACKLOG = 4096
# After a failure, not every micro-batch tries again.
_AFTER_FAILURE_S = 10.0
# Spark's variables for one worker or session. The coordinator serves the whole application: some of them are
# secrets that it does not need, others name things that end before it.
_NOT_INHERITED = ("SPARK_", "PYSPARK_", "_PYSPARK_", "PYTHON_WORKER_", "PYTHON_DAEMON_")
# Kept, so that Popen does not complain about children that outlive it.
_started: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True, slots=True)
class LocatedCoordinator:
    """Where tasks find the coordinator. ``is_new``: it was started just now and may not respond yet.

    ``host``: its address for this process, which is on the same host.
    """

    rendezvous: Rendezvous
    host: str
    is_new: bool


# What the user reads where the live view is, once in an application.
_LIVE_VIEW = "live view"


def locate(options: SinkOptions, environ: Mapping[str, str] = os.environ) -> LocatedCoordinator | None:
    """The application's coordinator, which knows this job's cluster; None, after a warning, if there is none.

    Costs only file look-ups where the coordinator runs and knows the cluster. Raises ConfigurationError for
    an invalid setting of the administrator; problems with processes or files raise nothing.
    """
    local_dirs = spark_application.local_dirs(environ)
    if not local_dirs or not is_enabled(options, environ):
        return None
    try:
        return _find_or_start(options, local_dirs, environ)
    except (OSError, TimeoutError) as error:
        spark_application.remember(UNAVAILABLE)
        warn_of_no_coordinator(
            f"no coordinator could be started ({error}). Set coordinator.port or coordinator.bind.address "
            "where an address is in use or not this host's, or coordinator.enabled=false"
        )
        return None


def _find_or_start(
    options: SinkOptions, local_dirs: str, environ: Mapping[str, str]
) -> LocatedCoordinator | None:
    identity = options.identity_of_cluster()
    place = RendezvousDirectory.of(local_dirs)
    found = place.found()
    if found is not None and place.is_alive():
        key = found.key_of(identity)
        wants_view = ui_placement(options, environ) is not None and place.live_view(found) is None
        if place.has_cluster(found, key) and not wants_view:
            return _located(place, found, key, is_new=False)
    if spark_application.happened_within(UNAVAILABLE, _AFTER_FAILURE_S):
        return None
    driver = driver_process.find_driver_process()
    if driver is None:
        return None
    conf = conf_of(driver, environ)
    if not is_enabled(options, environ, conf):
        return None
    where = placement(options, environ, conf)
    view = ui_placement(options, environ, conf)
    history = ui_history(options, environ, conf) if view is not None else ""
    place = RendezvousDirectory.make(local_dirs)
    with place.lock(_LOCK_MS):
        found = place.found()
        is_new = found is None or not place.is_alive()
        if found is None or is_new:
            _count_start(place, time.time())
            before = found
            view = _former_port(view, place, before)
            found = _start(where, place, driver, environ, before, _bounds(options))
            if shows_progress(driver.arguments(), conf) and driver_terminal(driver.pid) is not None:
                place.note_progress(found)
        key = found.key_of(identity)
        if not place.has_cluster(found, key):
            place.add_cluster(found, key, options.of_cluster(), _NEW_READS_MS if is_new else _READS_MS)
        if view is not None and place.live_view(found) is None:
            _open_live_view(place, found, view, history)
    return _located(place, found, key, is_new=is_new)


def _located(
    place: RendezvousDirectory, found: RunningCoordinator, key: str, *, is_new: bool
) -> LocatedCoordinator:
    where = Placement(found.address, found.port)
    host = where.address if where.is_loopback else ""
    view = place.live_view(found)
    figures = (view is not None and "error" not in view) or place.shows_progress(found)
    rendezvous = Rendezvous(found.port, key, found.secret, host, figures)
    return LocatedCoordinator(rendezvous, where.local_host, is_new)


def _former_port(
    view: Placement | None, place: RendezvousDirectory, before: RunningCoordinator | None
) -> Placement | None:
    """The live view of a restarted coordinator keeps its port, so that open pages find it."""
    former = None if before is None or view is None else place.live_view(before)
    if view is None or former is None or view.port or not isinstance(former.get("port"), int):
        return view
    return Placement(view.address, former["port"])


def _open_live_view(
    place: RendezvousDirectory, found: RunningCoordinator, view: Placement, history: str
) -> None:
    """Open the live view, wait until it serves, and log where. Only under the lock."""
    place.open_live_view({"address": view.address, "port": view.port, "history": history}, _LIVE_VIEW_MS)
    until_s = time.monotonic() + _LIVE_VIEW_MS / 1000
    while (opened := place.live_view(found)) is None and time.monotonic() < until_s:
        time.sleep(0.01)
    if opened is None:
        driver_log.warn("kafka-chunked: the live view has not started in time; see the coordinator's log")
    elif "error" in opened:
        driver_log.warn(f"kafka-chunked: there is no live view: {opened['error']}")
    elif spark_application.first_time(f"{_LIVE_VIEW} {opened['url']}"):
        kept = f", and its history in {history}" if history else ""
        driver_log.report(f"kafka-chunked: the live view is at {opened['url']}{kept}")
        if not view.is_loopback:
            driver_log.warn(
                f"kafka-chunked: ui.bind.address={view.address}: everybody who can connect to the live view "
                "sees names of topics, brokers and hosts"
            )


def _count_start(place: RendezvousDirectory, now_s: float) -> None:
    """Raise TimeoutError where the process keeps ending and its last start is too recent."""
    starts = place.starts()
    # Wall clock, because processes share it. A time in the future means that the clock was set back.
    if 0 <= now_s - starts.last_s < pause_s(starts.count):
        log = place.folder / "log"
        raise TimeoutError(
            f"its process has ended {starts.count} times, see {log}; it is started again later"
        )
    place.note_starts(Starts(starts.count + 1, now_s))


def _start(
    where: Placement,
    place: RendezvousDirectory,
    driver: DriverProcess,
    environ: Mapping[str, str],
    before: RunningCoordinator | None,
    bounds: Mapping[str, int],
) -> RunningCoordinator:
    """Bind the port here, so that tasks can connect to it before the process serves.

    A process that replaces one that ended gets its port and secret, so that running tasks find it.
    """
    with _listen(where, before) as listening:
        found = RunningCoordinator(
            listening.getsockname()[1],
            before.secret if before is not None else secrets.token_bytes(SECRET_BYTES),
            secrets.token_hex(8),
            where.address,
        )
        place.publish(found)
        pipe = place.open_new_pipe()
        try:
            first = HiddenValues(
                secret=found.secret.hex(),
                token=found.token,
                driver=[driver.pid, driver.started],
                marker=str(place.folder / "found"),
                listening=listening.fileno(),
                bounds=bounds,
            )
            write_all(pipe, json_line(first), _READS_MS)
            _spawn(place, pipe, listening, environ)
        finally:
            os.close(pipe)
    return found


def _bounds(options: SinkOptions) -> dict[str, int]:
    return {
        "connections": options.coordinator_max_connections,
        "buffer_memory": options.coordinator_buffer_memory,
        "messages_per_s": options.coordinator_max_messages_per_second,
    }


def _listen(where: Placement, before: RunningCoordinator | None) -> socket.socket:
    if before is not None and not where.port and before.address == where.address:
        try:
            return _bound(where.address, before.port)
        except OSError:
            pass  # another process uses the port now
    return _bound(where.address, where.port)


def _bound(address: str, port: int) -> socket.socket:
    family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0][0]
    # The address of all interfaces covers IPv4, too.
    dual = address == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((address, port), family=family, dualstack_ipv6=dual, backlog=_BACKLOG)


def _spawn(
    place: RendezvousDirectory, pipe: int, listening: socket.socket, environ: Mapping[str, str]
) -> None:
    inherited = {name: value for name, value in environ.items() if not name.startswith(_NOT_INHERITED)}
    inherited["PYTHONPATH"] = libraries.path_for_child(sys.path)
    # `-m` would put the process's own folder first.
    inherited["PYTHONSAFEPATH"] = "1"
    flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
    log = os.open(place.folder / "log", flags, 0o600)
    try:
        process = subprocess.Popen(
            [os.path.abspath(sys.executable), "-m", "kafka_sink.coordinator"],
            stdin=pipe,
            stdout=log,
            stderr=log,
            cwd="/",
            env=inherited,
            pass_fds=(listening.fileno(),),
            start_new_session=True,
        )
    finally:
        os.close(log)
    _started.append(process)
    driver_process.leave_running(process)
