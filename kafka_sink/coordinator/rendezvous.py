"""The folder in which planning finds the coordinator: in the application's SPARK_LOCAL_DIRS, mode 0700.

It contains:

    found     the coordinator's process, its address with its token, and the live view's address (mode 0600,
              replaced atomically); the coordinator writes it when it serves
    log       the coordinator's log
    lock      held by planning while it starts a coordinator or changes ``found``

A folder that others can write to is not trusted: they could lead tasks to a process of their own.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from kafka_sink import spark_application
from kafka_sink.coordinator.address import CoordinatorAddress
from kafka_sink.driver.driver_process import HostProcess
from kafka_sink.libraries import foreign
from kafka_sink.secret import HiddenBytes

FOLDER = "kafka-chunked-coordinator"
_LOCK_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class RunningCoordinator:
    """A coordinator that serves, or has served.

    ``address``: the address for tasks on its host. ``driver_token``: the token that the driver uses in place
    of the tasks' token. ``bound_to``: the address that it listens on. ``view_url``: the live view's URL.
    ``view_port``: its port. ``failed_views``: the addresses and ports at which it could not be opened.
    """

    address: CoordinatorAddress
    driver_token: bytes = field(repr=False)
    process: HostProcess
    bound_to: str
    view_url: str = ""
    view_port: int = 0
    failed_views: tuple[tuple[str, int], ...] = ()

    @property
    def of_driver(self) -> CoordinatorAddress:
        return replace(self.address, token=self.driver_token, has_view=bool(self.view_url))

    def group_of(self, options: Mapping[str, str]) -> str:
        """The key of the group of tasks with these options.

        It is keyed with the token: options contain passwords, which could be guessed from a plain hash.
        """
        text = json.dumps(sorted(options.items()))
        return hmac.digest(self.address.token, text.encode(), "sha256").hex()[:32]


class LocationFolder:
    """A folder in one of Spark's local folders. All methods raise OSError if the folder is gone."""

    def __init__(self, parent: str) -> None:
        self.parent = Path(parent)
        self.folder = self.parent / FOLDER
        self._found = self.folder / "found"

    @classmethod
    def of(cls, local_dirs: str) -> LocationFolder:
        """The existing folder in SPARK_LOCAL_DIRS, else one in the first of these folders."""
        places = [cls(parent) for parent in local_dirs.split(",")]
        return next((place for place in places if os.path.lexists(place.folder)), places[0])

    @classmethod
    def make(cls, local_dirs: str) -> LocationFolder:
        """The existing folder, else a new one in the first writable one.

        Raises OSError if none is writable.
        """
        place = cls.of(local_dirs)
        problem: OSError | None = None
        for parent in dict.fromkeys((str(place.parent), *local_dirs.split(","))):
            place = cls(parent)
            try:
                # Its parent is Spark's, so it is not created.
                place.folder.mkdir(mode=0o700)
            except FileExistsError:
                # A folder that others can write to is an attack, or a mistake that the user should see.
                _check_private(place.folder)
            except OSError as error:
                problem = error
                continue
            return place
        raise problem or FileNotFoundError(errno.ENOENT, "no folder is writable", local_dirs)

    @contextmanager
    def lock(self, timeout_ms: float) -> Iterator[None]:
        """Hold the lock within the block. Raises TimeoutError."""
        handle = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        until = time.monotonic() + timeout_ms / 1000
        try:
            while True:
                with suppress(BlockingIOError):
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                if time.monotonic() >= until:
                    raise TimeoutError(f"{self.folder}/lock is held by another process")
                time.sleep(_LOCK_POLL_S)
            yield
        finally:
            os.close(handle)

    def found(self) -> RunningCoordinator | None:
        """The coordinator that served last, which may have ended since.

        Raises PermissionError if others could have written this.
        """
        _check_private(self.folder)
        return read_found(self._found)

    def withdraw(self) -> None:
        """Remove the address of a coordinator that has ended. If it still runs, it notices that, and ends."""
        self._found.unlink(missing_ok=True)

    def publish(self, found: RunningCoordinator) -> None:
        """Write the coordinator's address for planning. The coordinator calls it when it serves, and
        planning, which then holds the lock, when something changes."""
        content = HiddenBytes(msgspec.json.encode(found))
        fresh = self._found.with_name(f"found.{os.getpid()}")
        with open(os.open(fresh, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(content)
        os.replace(fresh, self._found)


def serving(place: LocationFolder) -> RunningCoordinator | None:
    """The coordinator that serves in this folder. Raises OSError."""
    published = place.found() if os.path.lexists(place.folder) else None
    return published if published is not None and published.process.is_alive() else None


def address_for_driver() -> CoordinatorAddress | None:
    """The coordinator's address for the driver's processes, or None if no coordinator serves.

    It is looked up each time, because it contains the driver's token, and a plan travels to executors.
    """
    local_dirs = spark_application.local_dirs()
    with suppress(OSError):
        running = serving(LocationFolder.of(local_dirs)) if local_dirs else None
        return None if running is None else running.of_driver
    return None


def _check_private(folder: Path) -> None:
    """Raise PermissionError if anybody but this user could have written to the folder."""
    if problem := foreign(folder.lstat(), is_folder=True):
        raise PermissionError(errno.EPERM, problem, str(folder))


def read_found(path: Path) -> RunningCoordinator | None:
    """The coordinator that the file describes, or None if there is no valid file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunningCoordinator)
    except (OSError, msgspec.MsgspecError, ValueError):
        return None
