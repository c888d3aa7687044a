"""The folder where planning workers find the coordinator: in the application's SPARK_LOCAL_DIRS, mode 0700.

``found`` names port, secret and process (0600, replaced whole); ``pipe`` is the coordinator's stdin, through
which further clusters with their credentials reach it; whether somebody reads it tells whether it lives. The
files ``said-...`` are of this coordinator's clusters, ``lock`` is held while any of this changes. Whoever
else could write there could send tasks, and what they say, to a coordinator of their own: then nothing in it
is believed.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import json
import os
import select
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kafka_sink.coordinator.wire.application_files import known_cluster_marker, starts_file

FOLDER = "kafka-chunked-coordinator"
_LOCK_POLL_S = 0.005
_FILE_MS = 1000.0


@dataclass(frozen=True, slots=True)
class RunningCoordinator:
    """A coordinator that was started; ``token`` tells it from others that were, ``address`` is what it
    listens on."""

    port: int
    secret: bytes = field(repr=False)
    token: str
    address: str

    def key_of(self, options: Mapping[str, str]) -> str:
        """The key of a cluster with these options. They hold passwords, which a plain hash would give away
        to whoever tries enough of them."""
        text = json.dumps(sorted(options.items()))
        return hmac.digest(self.secret, text.encode(), "sha256").hex()[:32]


@dataclass(frozen=True, slots=True)
class Starts:
    """How often a coordinator was started without a long life since, and when last (seconds, wall clock)."""

    count: int = 0
    last_s: float = 0.0


class RendezvousDirectory:
    """In one of Spark's local folders. All methods raise OSError where the folder is gone."""

    def __init__(self, parent: str) -> None:
        self.parent = Path(parent)
        self.folder = self.parent / FOLDER
        self.pipe = self.folder / "pipe"
        self._found = self.folder / "found"
        self._starts = starts_file(self.folder)

    @classmethod
    def of(cls, local_dirs: str) -> RendezvousDirectory:
        """Where a coordinator was started in any of SPARK_LOCAL_DIRS; else in the first of them."""
        places = [cls(parent) for parent in local_dirs.split(",")]
        return next((place for place in places if os.path.lexists(place.folder)), places[0])

    @classmethod
    def make(cls, local_dirs: str) -> RendezvousDirectory:
        """The one that is there already, else a new one in the first of the folders that can be written to.
        Raises OSError where none can."""
        place = cls.of(local_dirs)
        problem: OSError | None = None
        for parent in dict.fromkeys((str(place.parent), *local_dirs.split(","))):
            place = cls(parent)
            try:
                place._make()
            except PermissionError as error:
                # One that others could write to is an attack, or a mistake to be seen, and no full disk.
                if os.path.lexists(place.folder):
                    raise
                problem = error
            except OSError as error:
                problem = error
            else:
                return place
        raise problem or FileNotFoundError(errno.ENOENT, "no folder", local_dirs)

    def _make(self) -> None:
        """The folder, for nobody but this user. Never its parent: that is Spark's, and goes with it."""
        try:
            self.folder.mkdir(mode=0o700)
        except FileExistsError:
            self._check()

    def _check(self) -> None:
        """Nobody but this user could have put anything into the folder."""
        # No link: what it leads to may be anybody's, and another folder a moment later.
        found = self.folder.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise PermissionError(errno.EPERM, "not a folder", str(self.folder))
        if found.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "another user's", str(self.folder))
        if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise PermissionError(errno.EPERM, "open to other users", str(self.folder))

    @contextmanager
    def lock(self, timeout_ms: float) -> Iterator[None]:
        """Raises TimeoutError."""
        handle = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            until = time.monotonic() + timeout_ms / 1000
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= until:
                        raise TimeoutError(f"{self.folder}/lock is held by another process") from None
                time.sleep(_LOCK_POLL_S)
            yield
        finally:
            os.close(handle)

    # -- the coordinator ----------------------------------------------------------------------------

    def found(self) -> RunningCoordinator | None:
        """The coordinator that was started last, whether it lives or not. Raises PermissionError where others
        could have written that."""
        try:
            self._check()
            told = json.loads(self._found.read_bytes())
            secret = bytes.fromhex(told["secret"])
            return RunningCoordinator(int(told["port"]), secret, str(told["token"]), str(told["address"]))
        except (FileNotFoundError, KeyError, TypeError, ValueError):
            return None

    def publish(self, found: RunningCoordinator) -> None:
        """Only under the lock. What was said to those before it is forgotten."""
        told = {
            "port": found.port,
            "secret": found.secret.hex(),
            "token": found.token,
            "address": found.address,
        }
        for path in self.folder.glob("said-*"):
            path.unlink(missing_ok=True)
        self._write(self._found, json.dumps(told).encode())

    def starts(self) -> Starts:
        """How often it was started. The coordinator deletes the file once it has lived for long."""
        try:
            count, last_s = json.loads(self._starts.read_bytes())
            return Starts(int(count), float(last_s))
        except (FileNotFoundError, TypeError, ValueError):
            return Starts()

    def note_starts(self, starts: Starts) -> None:
        """Only under the lock."""
        self._write(self._starts, json.dumps([starts.count, starts.last_s]).encode())

    def lives(self) -> bool:
        """Whether a coordinator reads the pipe."""
        try:
            os.close(self._open_pipe())
        except OSError:
            return False
        return True

    def open_new_pipe(self) -> int:
        """A pipe for a coordinator about to be started, which inherits both of its ends: so it never ends.
        Only under the lock."""
        fresh = self.folder / "pipe.new"
        fresh.unlink(missing_ok=True)
        os.mkfifo(fresh, 0o600)
        os.replace(fresh, self.pipe)
        return os.open(self.pipe, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def _open_pipe(self) -> int:
        return os.open(self.pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    # -- its clusters -------------------------------------------------------------------------------

    def knows(self, found: RunningCoordinator, key: str) -> bool:
        """Whether this coordinator was told of the cluster."""
        return self._said(found, key).exists()

    def tell(
        self, found: RunningCoordinator, key: str, options: Mapping[str, str], timeout_ms: float
    ) -> None:
        """Give the coordinator another cluster. Raises OSError where it does not live, TimeoutError where it
        does not read in time. Only under the lock."""
        handle = self._open_pipe()
        try:
            # A line that another process could not finish ends here.
            write_all(handle, b"\n" + json_line({"cluster": key, "options": dict(options)}), timeout_ms)
        finally:
            os.close(handle)
        self._write(self._said(found, key), b"")

    def _said(self, found: RunningCoordinator, key: str) -> Path:
        return known_cluster_marker(self.folder, found.token, key)

    def _write(self, path: Path, content: bytes) -> None:
        fresh = path.with_name(path.name + ".new")
        handle = os.open(fresh, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            write_all(handle, content, _FILE_MS)
        finally:
            os.close(handle)
        os.replace(fresh, path)


def json_line(told: Mapping[str, Any]) -> bytes:
    """One line of the pipe."""
    return json.dumps(told).encode() + b"\n"


def write_all(handle: int, content: bytes, timeout_ms: float) -> None:
    """To a file, or to a pipe that may hold less than ``content``: its reader takes that piece by piece.

    Raises TimeoutError where a pipe stays full for so long, BrokenPipeError where nobody reads it.
    """
    until = time.monotonic() + timeout_ms / 1000
    while content:
        try:
            content = content[os.write(handle, content) :]
        except BlockingIOError:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"the coordinator read nothing for {timeout_ms:.0f} ms") from None
            select.select([], [handle], [], left_s)
