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
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = "kafka-chunked-coordinator"
_LOCK_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Found:
    """A coordinator that was started; ``token`` tells it from others that were."""

    port: int
    secret: bytes = field(repr=False)
    token: str

    def key_of(self, options: Mapping[str, str]) -> str:
        """The key of a cluster with these options. They hold passwords, which a plain hash would give away
        to whoever tries enough of them."""
        text = json.dumps(sorted(options.items()))
        return hmac.digest(self.secret, text.encode(), "sha256").hex()[:32]


class MeetingPlace:
    """``local_dirs``: SPARK_LOCAL_DIRS of the driver. All methods raise OSError where the folder is gone."""

    def __init__(self, local_dirs: str) -> None:
        self.parent = Path(local_dirs.split(",")[0])
        self.folder = self.parent / FOLDER
        self.pipe = self.folder / "pipe"
        self._found = self.folder / "found"

    def make(self) -> None:
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

    def found(self) -> Found | None:
        """The coordinator that was started last, whether it lives or not. Raises PermissionError where others
        could have written that."""
        try:
            self._check()
            told = json.loads(self._found.read_bytes())
            return Found(int(told["port"]), bytes.fromhex(told["secret"]), str(told["token"]))
        except (FileNotFoundError, KeyError, TypeError, ValueError):
            return None

    def publish(self, found: Found) -> None:
        """Only under the lock."""
        told = {"port": found.port, "secret": found.secret.hex(), "token": found.token}
        self._write(self._found, json.dumps(told).encode())

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

    def knows(self, found: Found, key: str) -> bool:
        """Whether this coordinator was told of the cluster."""
        return self._said(found, key).exists()

    def tell(self, found: Found, key: str, options: Mapping[str, str]) -> None:
        """Give the coordinator another cluster. Raises OSError where it does not live, BlockingIOError where
        it does not read. Only under the lock."""
        handle = self._open_pipe()
        try:
            # A line that another process could not finish ends here.
            write_all(handle, b"\n" + line({"cluster": key, "options": dict(options)}))
        finally:
            os.close(handle)
        self._write(self._said(found, key), b"")

    def _said(self, found: Found, key: str) -> Path:
        return said(self.folder, found.token, key)

    def _write(self, path: Path, content: bytes) -> None:
        fresh = path.with_name(path.name + ".new")
        handle = os.open(fresh, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            write_all(handle, content)
        finally:
            os.close(handle)
        os.replace(fresh, path)


def said(folder: Path, token: str, key: str) -> Path:
    """The file that tells that a coordinator knows a cluster. It deletes those of clusters that it forgot."""
    return folder / f"said-{token}-{key}"


def line(told: Mapping[str, Any]) -> bytes:
    """One line of the pipe."""
    return json.dumps(told).encode() + b"\n"


def write_all(handle: int, content: bytes) -> None:
    """Raises BlockingIOError where a pipe is full."""
    while content:
        content = content[os.write(handle, content) :]
