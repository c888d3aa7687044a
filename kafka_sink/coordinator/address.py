"""Where a planned write's tasks find the coordinator, folders that only this user can write to, and the
warning that the coordinator cannot be used.

Another user who could write to such a folder could lead tasks to processes of their own.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from kafka_sink import spark_application
from kafka_sink.driver import driver_log

if TYPE_CHECKING:
    from kafka_sink.cluster.topic_state import MetadataSnapshot

# All interfaces, of IPv4 and of IPv6.
ANY_ADDRESSES = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound to


@dataclass(frozen=True, slots=True)
class CoordinatorLocation:
    """Travels in the pickled writer.

    ``fingerprint``, ``name`` and ``token``: see transport. ``host`` is empty where tasks connect to
    ``spark.driver.host``, which tasks know and planning does not; it is set where the coordinator listens on
    a loopback address only. ``group``: a hash of the brokers' addresses and the principal. ``has_view``:
    tasks report what they do.
    """

    port: int
    fingerprint: bytes
    name: str = field(repr=False)
    token: bytes = field(repr=False)
    group: str = ""
    host: str = ""
    has_view: bool = False


@dataclass(frozen=True, slots=True)
class CoordinatorAddress:
    """A location with the driver's host, a name or an address without brackets."""

    host: str
    location: CoordinatorLocation


@dataclass(frozen=True, slots=True)
class PlannedCoordinator:
    """What planning gives a write's tasks: where the coordinator is, and the metadata of their topics.

    ``driver_address``: where the driver itself finds the coordinator.
    """

    location: CoordinatorLocation | None = None
    snapshot: MetadataSnapshot | None = None
    driver_address: CoordinatorAddress | None = None


def without_brackets(host: str) -> str:
    """Spark writes IPv6 addresses as ``[::1]``; sockets take ``::1``."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def make_private_folder(folder: Path) -> None:
    """Create the folder, private to this user, or check the one that exists.

    The parent is Spark's, so it is never created here. Raises OSError.
    """
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        check_private_folder(folder)


def check_private_folder(folder: Path) -> None:
    """Raise PermissionError if anybody but this user could have written to the folder."""
    # No symbolic link: its target may be another user's, and may change at any time.
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(errno.EPERM, "it is not a folder", str(folder))
    if found.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "it belongs to another user", str(folder))
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise PermissionError(errno.EPERM, "other users have access to it", str(folder))


# The marker that is renewed whenever the coordinator could not be started.
UNAVAILABLE = "kafka-chunked: no coordinator"

_warned_lock = threading.Lock()  # guards the set
_warned: set[str] = set()


def warn_of_no_coordinator(problem: str, about: str = "") -> None:
    """Warn once: for all workers that share a folder, or for each worker and ``about``."""
    key = f"no coordinator: {spark_application.folder() or about}"
    with _warned_lock:
        if key in _warned:
            return
        _warned.add(key)
    if spark_application.first_time(key):
        driver_log.warn(f"kafka-chunked: {problem}. Writes go on without it: each task asks Kafka by itself")


def warn_once(address: CoordinatorAddress, error: Exception) -> None:
    """Warn that this coordinator cannot be used: once on a host where workers share a folder."""
    where = f"{address.host}:{address.location.port}"
    warn_of_no_coordinator(
        f"the coordinator at {where} cannot be used ({error}); it is tried again. If tasks cannot reach the "
        "driver, set coordinator.port and coordinator.bind.address, or coordinator.enabled=false",
        # Planning and tasks may know its host by different names.
        about=f"port {address.location.port}",
    )
