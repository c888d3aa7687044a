"""The driver's side: finds the application's coordinator, or starts it.

Runs in Spark's planning workers, of which any may come first, and which end when idle: so the coordinator is
a process in a session of its own. Where it cannot be had the write is planned without it.
"""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from kafka_sink import application_marks, driver_log
from kafka_sink.coordinator import driver_process
from kafka_sink.coordinator.address import Rendezvous
from kafka_sink.coordinator.driver_process import DriverProcess
from kafka_sink.coordinator.meeting_place import Found, MeetingPlace, line, write_all
from kafka_sink.coordinator.messages import SECRET_BYTES
from kafka_sink.options import SinkOptions

_LOCK_MS = 2000.0
_BACKLOG = 1024
_ANY = ("", "0.0.0.0", "::")
# A secret of Spark's that a child of its worker has no use for.
_NOT_INHERITED = ("PYTHON_WORKER_FACTORY_SECRET", "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE")
# Kept, so that Popen does not complain about children that outlive it.
_started: list[subprocess.Popen[bytes]] = []


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where tasks meet the coordinator. ``is_new``: it was started just now and may not answer yet.

    ``host``: where it is from this process, which is on the same host.
    """

    rendezvous: Rendezvous
    host: str
    is_new: bool


def meet(options: SinkOptions, environ: Mapping[str, str] = os.environ) -> Meeting | None:
    """The application's coordinator, told of this job's cluster; None, with one warning, where it cannot be.

    Costs file look-ups where it runs and knows the cluster. Never raises for what is wrong with processes or
    files.
    """
    local_dirs = environ.get("SPARK_LOCAL_DIRS", "")
    if not options.coordinator_enabled or not local_dirs:
        return None
    try:
        return _meet(options, MeetingPlace(local_dirs), environ)
    except (OSError, TimeoutError) as error:
        if application_marks.first_time(f"no coordinator: {error}"):
            driver_log.warn(
                f"kafka-chunked: no coordinator could be started ({error}); each task asks by itself. "
                "Set coordinator.port or coordinator.bind.address where an address is in use or not this "
                "host's, or coordinator.enabled=false"
            )
        return None


def _meet(options: SinkOptions, place: MeetingPlace, environ: Mapping[str, str]) -> Meeting | None:
    cluster = options.of_cluster()
    address = options.coordinator_bind_address or environ.get("SPARK_LOCAL_IP", "")
    host = address if address not in _ANY else "localhost"
    found = place.found()
    if found is not None and place.lives():
        key = found.key_of(cluster)
        if place.knows(found, key):
            return Meeting(Rendezvous(found.port, key, found.secret), host, is_new=False)
    place.make()
    with place.lock(_LOCK_MS):
        found = place.found()
        is_new = found is None or not place.lives()
        if found is None or is_new:
            driver = driver_process.find()
            if driver is None:
                return None
            found = _start(address, options.coordinator_port, place, driver, environ)
        key = found.key_of(cluster)
        if not place.knows(found, key):
            place.tell(found, key, cluster)
    return Meeting(Rendezvous(found.port, key, found.secret), host, is_new)


def _start(
    address: str, port: int, place: MeetingPlace, driver: DriverProcess, environ: Mapping[str, str]
) -> Found:
    """The port is bound here, so that it is known, and tasks can connect to it, before the process serves."""
    with _listen(address, port) as listening:
        found = Found(listening.getsockname()[1], secrets.token_bytes(SECRET_BYTES), secrets.token_hex(8))
        place.publish(found)
        pipe = place.open_new_pipe()
        try:
            first = {
                "secret": found.secret.hex(),
                "token": found.token,
                "driver": [driver.pid, driver.started],
                "marker": str(place.folder / "found"),
                "listening": listening.fileno(),
            }
            write_all(pipe, line(first))
            _spawn(place, pipe, listening, environ)
        finally:
            os.close(pipe)
    return found


def _listen(address: str, port: int) -> socket.socket:
    if address:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        return socket.create_server((address, port), family=family, backlog=_BACKLOG)
    if socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=_BACKLOG
            )
        except OSError:
            pass  # compiled in, and switched off on this host
    return socket.create_server(("", port), backlog=_BACKLOG)


def _spawn(place: MeetingPlace, pipe: int, listening: socket.socket, environ: Mapping[str, str]) -> None:
    inherited = {name: value for name, value in environ.items() if name not in _NOT_INHERITED}
    # Where this worker found the package, in archives that Spark shipped, too.
    inherited["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC
    log = os.open(place.folder / "log", flags, 0o600)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "kafka_sink.coordinator"],
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
