"""Where the workers of an executor find the relay: a folder in their SPARK_LOCAL_DIRS, mode 0700.

For each coordinator and cluster it contains a lock, which the relay's process holds, and the relay's socket.
Their name is an HMAC under the application's secret, so that another application's relay is never met.

The lock is a POSIX record lock: it goes with its process, however that ends, and a fork does not inherit it.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kafka_sink.coordinator.private_folder import check_private_folder, make_private_folder
from kafka_sink.coordinator.transport.address import CoordinatorAddress

FOLDER = "kafka-chunked-relay"
_BACKLOG = 128
# sockaddr_un has room for 108 bytes on Linux, for 104 on macOS, the final zero included.
_MAX_PATH = 103
_CREDENTIALS = struct.Struct("3i")


class RelayFolder:
    """The lock and the socket of one coordinator's relay. Methods raise OSError."""

    def __init__(self, folder: Path, address: CoordinatorAddress) -> None:
        self.folder = folder
        rendezvous = address.rendezvous
        text = f"relay {address.host} {rendezvous.port} {rendezvous.cluster}"
        self.name = hmac.digest(rendezvous.secret, text.encode(), "sha256").hex()[:24]

    @classmethod
    def of(cls, address: CoordinatorAddress) -> RelayFolder | None:
        """The folder in the first writable one of SPARK_LOCAL_DIRS. None where there is none to trust."""
        for parent in filter(None, os.environ.get("SPARK_LOCAL_DIRS", "").split(",")):
            folder = Path(parent) / FOLDER
            try:
                make_private_folder(folder)
            except OSError:
                continue
            return cls(folder, address)
        return None

    @property
    def lock_path(self) -> Path:
        """The lock's file."""
        return self.folder / f"{self.name}.lock"

    def try_lock(self) -> int | None:
        """Take the lock: a descriptor to close in the end; None if another process holds it.

        Raises OSError where the file system has no locks.
        A process must not call this while it holds the lock: closing any descriptor of the file releases it.
        """
        handle = os.open(self.lock_path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(handle)
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return None
            raise
        return handle

    def listen(self) -> socket.socket:
        """A socket for the workers. Only under the lock."""
        with self._path() as path:
            # Of a relay that was killed.
            Path(path).unlink(missing_ok=True)
            listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                listening.bind(path)
                listening.listen(_BACKLOG)
            except BaseException:
                listening.close()
                raise
        return listening

    def connect(self, timeout_ms: float) -> socket.socket:
        """A socket to the relay."""
        check_private_folder(self.folder)
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.settimeout(timeout_ms / 1000)
        try:
            with self._path() as path:
                connected.connect(path)
        except BaseException:
            connected.close()
            raise
        return connected

    @contextmanager
    def _path(self) -> Iterator[str]:
        """The socket's path. Spark's local folders may be too deep; Linux has a short way there."""
        path = f"{self.folder}/{self.name}.sock"
        if len(os.fsencode(path)) <= _MAX_PATH or sys.platform != "linux":
            yield path
            return
        handle = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            yield f"/proc/self/fd/{handle}/{self.name}.sock"
        finally:
            os.close(handle)


def is_own_user(connected: socket.socket) -> bool:
    """Whether the process at the other end runs as this user, where the system says so."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return True
    _, user, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size))
    return bool(user == os.getuid())
