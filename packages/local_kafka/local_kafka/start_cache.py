"""Files of the first start of a Kafka, with which later starts take about half the processor time.

``bootstrap.checkpoint``: the features of a new cluster, as Kafka's StorageTool writes them into a data
folder. They depend only on the jars, and the tool is a JVM of its own. The file is kept with its checksum.
From Kafka 4.4 on the tool writes it as the first snapshot of the metadata log instead.
``classes.jsa``: the classes that a broker has loaded, in a file that Java maps instead of reading and
verifying each (class data sharing). A JVM writes it when it ends in order. Java goes on without a file that
is damaged, or that belongs to another Java or other jars.

Files appear by a rename, so that no process sees a half-written file. If the cache folder cannot be written,
every start is a first one. Each Java with each folder of jars has a folder of some 50 MB. The most recently
used folders are kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from local_kafka.jars import Java, cache_root

_PREFIX = "starts-"
# More than anyone's Javas and Kafkas at one time.
MAX_FOLDERS = 4
# The file that the tool writes into a data folder: before Kafka 4.4, and from 4.4 on.
CHECKPOINTS = ("bootstrap.checkpoint", "__cluster_metadata-0/00000000000000000000-0000000000.checkpoint")
CLASSES = "classes.jsa"
_CHECKSUM_BYTES = hashlib.sha256().digest_size
# JVMs other than OpenJDK's do not recognise the options for classes.
_LENIENT = "-XX:+IgnoreUnrecognizedVMOptions"
# A JVM that maps damaged classes crashes. It compares checksums only if asked, in some 20 ms.
_CHECKED = ("-XX:+UnlockDiagnosticVMOptions", "-XX:+VerifySharedSpaces")


class StartCache:
    """The cache of one Java with one folder of jars. ``folder`` is None if the user has no cache folder."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @classmethod
    def of(cls, java: Java, jars: Path, environ: Mapping[str, str] = os.environ) -> StartCache:
        """The cache in the user's cache folder; it is a new one if Java or a jar has changed."""
        program = Path(os.path.realpath(java.path))
        try:
            found = [(one, one.stat()) for one in (program, *sorted(jars.glob("*.jar")))]
            files = [(str(one), stat.st_size, stat.st_mtime_ns) for one, stat in found]
            key = hashlib.sha256(f"{java.version} {files}".encode()).hexdigest()
            folder = cache_root(environ) / f"{_PREFIX}{key[:16]}"
        except (OSError, RuntimeError):  # a jar that has gone meanwhile; a user without a home
            return cls(None)
        with contextlib.suppress(OSError):
            os.utime(folder)  # as _delete_oldest needs it
        return cls(folder)

    def restore_checkpoint(self, data: Path) -> bool:
        """Copy the kept file into a broker's data folder, which is created.

        Returns False if no file is kept, or if it is damaged.
        """
        if self._folder is None:
            return False
        for checkpoint in map(Path, CHECKPOINTS):
            with contextlib.suppress(OSError):
                kept = (self._folder / checkpoint.name).read_bytes()
                checksum, content = kept[:_CHECKSUM_BYTES], kept[_CHECKSUM_BYTES:]
                if checksum != hashlib.sha256(content).digest():
                    return False
                (data / checkpoint).parent.mkdir(parents=True, exist_ok=True)
                (data / checkpoint).write_bytes(content)
                return True
        return False

    def keep_checkpoint(self, data: Path) -> None:
        """Keep the file that the tool has written into ``data``."""
        for checkpoint in map(Path, CHECKPOINTS):
            with contextlib.suppress(OSError):
                content = (data / checkpoint).read_bytes()
                self._keep(checkpoint.name, partial(_write_with_checksum, content))

    def flags_to_read_classes(self) -> list[str]:
        """A broker's JVM flags to read the classes. Empty if none are kept yet."""
        if self._folder is None or not (self._folder / CLASSES).is_file():
            return []
        return [_LENIENT, *_CHECKED, f"-XX:SharedArchiveFile={self._folder / CLASSES}"]

    def flags_to_write_classes(self, folder: Path) -> list[str]:
        """A broker's JVM flags to write its classes into ``folder`` when it ends, for ``keep_classes``.

        Empty if classes are kept already, or cannot be kept: writing them takes seconds.
        """
        if self._folder is None or self.flags_to_read_classes() or not _is_writable(self._folder):
            return []
        return [_LENIENT, f"-XX:ArchiveClassesAtExit={folder / CLASSES}"]

    def keep_classes(self, folder: Path) -> None:
        """Keep the classes that a broker has written into ``folder``, if it has written any."""
        self._keep(CLASSES, lambda path: shutil.copyfile(folder / CLASSES, path))

    def _keep(self, name: str, write: Callable[[Path], object]) -> None:
        """Write the file by a rename: other processes may start a broker at the same time."""
        if self._folder is None:
            return
        with contextlib.suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            _delete_oldest(self._folder.parent)
            with tempfile.TemporaryDirectory(dir=self._folder) as staging:
                write(Path(staging) / name)
                (Path(staging) / name).replace(self._folder / name)


def _write_with_checksum(content: bytes, path: Path) -> None:
    path.write_bytes(hashlib.sha256(content).digest() + content)


def _delete_oldest(root: Path) -> None:
    """Keep the folders that were used last. A JVM that has mapped the classes of another goes on."""
    with contextlib.suppress(OSError):  # another process may delete them as well
        by_use = sorted(root.glob(f"{_PREFIX}*"), key=lambda folder: folder.stat().st_mtime_ns)
        for folder in by_use[:-MAX_FOLDERS]:
            shutil.rmtree(folder, ignore_errors=True)


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)
