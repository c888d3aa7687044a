"""``local-kafka-registry``: a real schema registry on this machine.

It is for examples and tests. It is Apicurio Registry, which also has Confluent's API. Its schemas are in
memory.
"""

from __future__ import annotations

import argparse
import sys
import tarfile
import tempfile
import time
import urllib.request
from pathlib import Path

from local_kafka.errors import LocalBrokerError
from local_kafka.jars import Progress, downloaded, find_java, print_progress
from local_kafka.node_config import HOST, free_port
from local_kafka.processes import SupervisedProcesses, announce, run_until_stopped

# The last version for Java 17.
VERSION = "2.6.13.Final"
_APP = "apicurio-registry-app"
_ARCHIVE = {
    f"io/apicurio/{_APP}/{VERSION}/{_APP}-{VERSION}-all.tar.gz": (
        "3cda1b34aa020fb4ac4dd6a66018d757e81e437f97e20a1f92d366b70091c6ba"
    )
}
_POLL_S = 0.1
_START_S = 180.0


class LocalRegistry:
    """A registry within a ``with`` block; ``url`` is its address for ``schema.registry.url``.

    It ends with the block, with Ctrl-C and with this process, even if that is killed. ``port``: any free one
    by default. The first start downloads 142 MB, once per user. All methods raise LocalBrokerError.
    """

    def __init__(self, port: int | None = None, *, progress: Progress = print_progress) -> None:
        self._port = port
        self._progress = progress
        self._processes: SupervisedProcesses | None = None

    def __enter__(self) -> LocalRegistry:
        java = find_java()
        home = _unpacked(self._progress)
        self._port = self._port or free_port(set())
        folder = Path(tempfile.mkdtemp(prefix="kafka-chunked-registry-"))
        self._processes = SupervisedProcesses(folder)
        try:
            argv = [
                *(java.path, "-Xmx256m", "-XX:TieredStopAtLevel=1", f"-Dquarkus.http.host={HOST}"),
                *(f"-Dquarkus.http.port={self._port}", "-jar"),
                str(home / f"{_APP}-{VERSION}-runner.jar"),
            ]
            self._processes.start("registry", argv, log=folder / "log", cwd=folder)
            self._await_start(self._processes, folder / "log")
        except BaseException:  # also on Ctrl-C: no process and no folder may remain
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The address for ``schema.registry.url``."""
        return f"http://{HOST}:{self._port}/apis/ccompat/v7"

    def close(self) -> None:
        """End the registry. ``with`` does this."""
        if self._processes is not None:
            self._processes.close()
            self._processes = None

    def _await_start(self, processes: SupervisedProcesses, log: Path) -> None:
        deadline = time.monotonic() + _START_S
        while not _responds(f"{self.url}/subjects"):
            if not processes.is_running("registry"):
                raise LocalBrokerError(f"the schema registry ended while it started: {_last_lines(log)}")
            if time.monotonic() > deadline:
                raise LocalBrokerError(f"the schema registry did not start in {_START_S:.0f} s")
            time.sleep(_POLL_S)


def _responds(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as response:  # noqa: S310 - http, to this machine
            return bool(response.status == 200)
    except OSError:
        return False


def _last_lines(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").splitlines()[-5:])


def _unpacked(progress: Progress) -> Path:
    """The folder with the registry; downloaded once per user."""
    what = f"Apicurio Registry {VERSION} (142 MB)"
    return downloaded(f"apicurio-registry-{VERSION}", what, _ARCHIVE, None, progress, _unpack)


def _unpack(folder: Path) -> Path:
    (archive,) = folder.iterdir()
    unpacked = folder / "unpacked"
    with tarfile.open(archive) as packed:
        packed.extractall(unpacked, filter="data")
    return unpacked


def main(arguments: list[str] | None = None) -> int:
    """Print the address on stdout, then wait for Ctrl-C or SIGTERM."""
    parser = argparse.ArgumentParser(
        prog="local-kafka-registry",
        description=f"Runs a schema registry (Apicurio Registry {VERSION}) here until Ctrl-C. Prints the "
        "address for schema.registry.url on stdout, and nothing else there. Schemas are in memory.",
    )
    parser.add_argument("--port", type=int, help="its port (default: a free one)")
    args = parser.parse_args(arguments)

    def run() -> None:
        with LocalRegistry(args.port) as registry:
            announce(registry.url, "The schema registry is running. Ctrl-C stops it.")

    return run_until_stopped(run)


if __name__ == "__main__":
    sys.exit(main())
