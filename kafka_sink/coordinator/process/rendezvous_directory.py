"""The folder where planning workers find the coordinator: in the application's SPARK_LOCAL_DIRS, mode 0700.

It contains:

    found     port, secret, token and address (mode 0600, replaced atomically)
    pipe      the coordinator's stdin; later clusters are sent through it, with their credentials. If nobody
              reads the pipe, the coordinator has ended.
    said-...  one empty file for each cluster that this coordinator has
    ui-...    where it serves the live view
    console-. exists where it shows progress in the driver's terminal
    lock      held while any of the others changes

Another user who could write there could redirect tasks to a coordinator of their own. A folder that others
can write to is therefore not trusted.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import json
import math
import os
import select
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kafka_sink.coordinator.transport.address import check_private_folder, make_private_folder
from kafka_sink.secret import HiddenBytes, HiddenValues

# How often the coordinator looks for its driver and its folder.
WATCH_S = 1.0
# A process that has lived this long does not count as one that keeps ending.
LONG_LIFE_S = 600.0
# One that ended is started again at once; one that keeps ending, after ever longer pauses.
_PAUSE_S, _MAX_PAUSE_S = 10.0, 600.0


def known_cluster_marker(folder: Path, token: str, key: str) -> Path:
    """This file exists while the coordinator with this token serves the cluster.

    Planning writes it; the coordinator deletes it when it forgets the cluster.
    """
    return folder / f"said-{token}-{key}"


def ui_marker(folder: Path, token: str) -> Path:
    """Written by the coordinator with this token when it serves the live view, or could not: JSON with
    ``url``, ``address`` and ``port``, or ``error``."""
    return folder / f"ui-{token}"


def console_marker(folder: Path, token: str) -> Path:
    """This file exists where the coordinator with this token shows progress in the driver's terminal."""
    return folder / f"console-{token}"


def starts_file(folder: Path) -> Path:
    """The file that counts how often a coordinator was started."""
    return folder / "starts"


def is_current(marker: Path, token: str) -> bool:
    """Whether the application's folder exists, and no other coordinator has been started in it."""
    try:
        return bool(json.loads(marker.read_bytes())["token"] == token)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def pause_s(starts: int) -> float:
    """How long to wait after the last start, when ``starts`` processes in a row ended early."""
    return 0.0 if starts < 2 else min(_PAUSE_S * math.pow(2, min(starts, 30) - 2), _MAX_PAUSE_S)


# The pipe by which planning tells the coordinator its settings and clusters: one JSON object per line.


_READ_BYTES = 64 * 1024
# Options may contain a bundle of certificates, which takes hundreds of kilobytes.
_MAX_LINE_BYTES = 16 * 1024 * 1024


class CommandPipe:
    """Reads lines from a descriptor, which must not block."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        self._held: list[bytes] = []
        self._held_bytes = 0
        # Whether the end was read. The coordinator's own pipe has none, as it can write there, too.
        self.is_closed = False

    def lines(self) -> list[dict[str, Any]]:
        """The complete lines. Skips invalid JSON, which a writer leaves behind when it dies within a line."""
        data = self._read()
        if b"\n" not in data:
            self._hold(data)
            return []
        *complete, partial = b"".join((*self._held, data)).split(b"\n")
        self._held, self._held_bytes = [], 0
        self._hold(partial)
        messages: list[dict[str, Any]] = []
        for line in filter(None, complete):
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if isinstance(message, dict):
                messages.append(HiddenValues(message))
        return messages

    def _read(self) -> bytes:
        pieces = []
        try:
            while data := os.read(self._handle, _READ_BYTES):
                pieces.append(data)
            self.is_closed = True
        except BlockingIOError:
            pass
        return b"".join(pieces)

    def _hold(self, data: bytes) -> None:
        """Keep a partial line. Of a line that is too long the start is dropped; its end is invalid JSON."""
        if self._held_bytes + len(data) > _MAX_LINE_BYTES:
            self._held, self._held_bytes = [], 0
        self._held.append(data)
        self._held_bytes += len(data)


FOLDER = "kafka-chunked-coordinator"
_LOCK_POLL_S = 0.005
_FILE_MS = 1000.0


@dataclass(frozen=True, slots=True)
class RunningCoordinator:
    """A coordinator that was started. ``token`` is unique to it; ``address`` is what it listens on."""

    port: int
    secret: bytes = field(repr=False)
    token: str
    address: str

    def key_of(self, options: Mapping[str, str]) -> str:
        """The key of a cluster with these options.

        It is keyed with the secret: options contain passwords, which could be guessed from a plain hash.
        """
        text = json.dumps(sorted(options.items()))
        return hmac.digest(self.secret, text.encode(), "sha256").hex()[:32]


@dataclass(frozen=True, slots=True)
class Starts:
    """How often a coordinator was started since one lived long, and when last (wall clock, seconds)."""

    count: int = 0
    last_s: float = 0.0


class RendezvousDirectory:
    """A folder in one of Spark's local folders. All methods raise OSError if the folder is gone."""

    def __init__(self, parent: str) -> None:
        self.parent = Path(parent)
        self.folder = self.parent / FOLDER
        self.pipe = self.folder / "pipe"
        self._found = self.folder / "found"
        self._starts = starts_file(self.folder)

    @classmethod
    def of(cls, local_dirs: str) -> RendezvousDirectory:
        """The existing rendezvous directory in SPARK_LOCAL_DIRS, else one in the first of these folders."""
        places = [cls(parent) for parent in local_dirs.split(",")]
        return next((place for place in places if os.path.lexists(place.folder)), places[0])

    @classmethod
    def make(cls, local_dirs: str) -> RendezvousDirectory:
        """The existing directory, else a new one in the first writable folder.

        Raises OSError if no folder is writable.
        """
        place = cls.of(local_dirs)
        problem: OSError | None = None
        for parent in dict.fromkeys((str(place.parent), *local_dirs.split(","))):
            place = cls(parent)
            try:
                make_private_folder(place.folder)
            except PermissionError as error:
                # Others can write to it: an attack, or a mistake that the user should see.
                if os.path.lexists(place.folder):
                    raise
                problem = error
            except OSError as error:
                problem = error
            else:
                return place
        raise problem or FileNotFoundError(errno.ENOENT, "no writable folder", local_dirs)

    @contextmanager
    def lock(self, timeout_ms: float) -> Iterator[None]:
        """Hold the lock within the block. Raises TimeoutError."""
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
        """The coordinator that was started last, which may have ended since.

        Raises PermissionError if others could have written this.
        """
        try:
            check_private_folder(self.folder)
            fields = json.loads(self._found.read_bytes())
            secret = bytes.fromhex(fields["secret"])
            return RunningCoordinator(
                int(fields["port"]), secret, str(fields["token"]), str(fields["address"])
            )
        except (FileNotFoundError, KeyError, TypeError, ValueError):
            return None

    def publish(self, found: RunningCoordinator) -> None:
        """Publish a new coordinator, which has no clusters yet. Only under the lock."""
        fields = HiddenValues(
            port=found.port, secret=found.secret.hex(), token=found.token, address=found.address
        )
        for pattern in ("said-*", "ui-*", "console-*"):
            for path in self.folder.glob(pattern):
                path.unlink(missing_ok=True)
        self._write(self._found, HiddenBytes(json.dumps(fields).encode()))

    def starts(self) -> Starts:
        """The recorded starts. A coordinator that lives long resets them by deleting the file."""
        try:
            count, last_s = json.loads(self._starts.read_bytes())
            return Starts(int(count), float(last_s))
        except (FileNotFoundError, TypeError, ValueError):
            return Starts()

    def note_starts(self, starts: Starts) -> None:
        """Record the starts. Only under the lock."""
        self._write(self._starts, json.dumps([starts.count, starts.last_s]).encode())

    def is_alive(self) -> bool:
        """Whether a coordinator reads from the pipe."""
        try:
            os.close(self._open_pipe())
        except OSError:
            return False
        return True

    def open_new_pipe(self) -> int:
        """A pipe for a new coordinator. Only under the lock.

        The descriptor is open for reading and writing. The coordinator inherits it, so it never reads EOF.
        """
        fresh = self.folder / "pipe.new"
        fresh.unlink(missing_ok=True)
        os.mkfifo(fresh, 0o600)
        os.replace(fresh, self.pipe)
        return os.open(self.pipe, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def _open_pipe(self) -> int:
        return os.open(self.pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    # -- clusters -----------------------------------------------------------------------------------

    def has_cluster(self, found: RunningCoordinator, key: str) -> bool:
        """Whether this coordinator has the cluster."""
        return self._marker(found, key).exists()

    def add_cluster(
        self, found: RunningCoordinator, key: str, options: Mapping[str, str], timeout_ms: float
    ) -> None:
        """Send the coordinator another cluster. Only under the lock.

        Raises OSError if it has ended, and TimeoutError if it does not read in time.
        """
        handle = self._open_pipe()
        try:
            write_all(handle, json_line({"cluster": key, "options": dict(options)}), timeout_ms)
        finally:
            os.close(handle)
        self._write(self._marker(found, key), b"")

    # -- the live view ------------------------------------------------------------------------------

    def live_view(self, found: RunningCoordinator) -> dict[str, Any] | None:
        """What the coordinator wrote about its live view; see ui_marker. None: nothing so far."""
        try:
            view = json.loads(ui_marker(self.folder, found.token).read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        return view if isinstance(view, dict) else None

    def open_live_view(self, where: Mapping[str, Any], timeout_ms: float) -> None:
        """Have the coordinator serve the live view, as LiveView opens it. Only under the lock. Raises as
        ``add_cluster``."""
        handle = self._open_pipe()
        try:
            write_all(handle, json_line({"ui": dict(where)}), timeout_ms)
        finally:
            os.close(handle)

    def shows_progress(self, found: RunningCoordinator) -> bool:
        """Whether the coordinator shows progress in the driver's terminal."""
        return console_marker(self.folder, found.token).exists()

    def note_progress(self, found: RunningCoordinator) -> None:
        """It does. Only under the lock."""
        self._write(console_marker(self.folder, found.token), b"")

    def _marker(self, found: RunningCoordinator, key: str) -> Path:
        return known_cluster_marker(self.folder, found.token, key)

    def _write(self, path: Path, content: bytes) -> None:
        fresh = path.with_name(path.name + ".new")
        handle = os.open(fresh, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            write_all(handle, content, _FILE_MS)
        finally:
            os.close(handle)
        os.replace(fresh, path)


def json_line(message: Mapping[str, Any]) -> bytes:
    """One line for the pipe. The line break before it completes one that another process left unfinished."""
    return HiddenBytes(b"\n" + json.dumps(message).encode() + b"\n")


def write_all(handle: int, content: bytes, timeout_ms: float) -> None:
    """Write to a file, or to a pipe, whose reader may have to make room several times.

    Raises TimeoutError if a pipe stays full until the timeout, and BrokenPipeError if it has no reader.
    """
    until = time.monotonic() + timeout_ms / 1000
    # A view, which shows no content in a traceback.
    left = memoryview(content)
    while left:
        try:
            left = left[os.write(handle, left) :]
        except BlockingIOError:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(
                    f"the coordinator did not read its pipe within {timeout_ms:.0f} ms"
                ) from None
            select.select([], [handle], [], left_s)
