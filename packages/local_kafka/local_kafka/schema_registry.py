"""``local-kafka-registry``: a real schema registry on this machine.

For examples and tests. It is Apicurio Registry, which has Confluent's API, too. Its schemas are in memory.
"""

from __future__ import annotations

import argparse
import hashlib
import hmac
import sys
import tarfile
import tempfile
import time
import urllib.request
from pathlib import Path
from types import TracebackType

from local_kafka.errors import LocalBrokerError
from local_kafka.jars import (
    Java,
    Progress,
    cache_root,
    download,
    find_java,
    ivy_settings_file,
    only_one,
    print_progress,
)
from local_kafka.node_config import HOST, free_port
from local_kafka.processes import SupervisedProcesses, announce, run_until_stopped

# The last version for Java 17.
VERSION = "2.6.13.Final"
_SHA256 = "3cda1b34aa020fb4ac4dd6a66018d757e81e437f97e20a1f92d366b70091c6ba"
_POLL_S = 0.1
_START_S = 180.0
_MODULE = f"""<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">
  <info organisation="kafka-chunked" module="local-registry"/>
  <configurations><conf name="default"/></configurations>
  <dependencies>
    <dependency org="io.apicurio" name="apicurio-registry-app" rev="{VERSION}" transitive="false"
      conf="default->default">
      <artifact name="apicurio-registry-app" type="tar.gz" ext="tar.gz" m:classifier="all"/>
    </dependency>
  </dependencies>
</ivy-module>
"""


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
        home = _unpacked(java, self._progress)
        self._port = self._port or free_port(set())
        folder = Path(tempfile.mkdtemp(prefix="kafka-chunked-registry-"))
        self._processes = SupervisedProcesses(folder)
        try:
            argv = [
                *(java.path, "-Xmx256m", "-XX:TieredStopAtLevel=1", f"-Dquarkus.http.host={HOST}"),
                *(f"-Dquarkus.http.port={self._port}", "-jar"),
                str(home / f"apicurio-registry-app-{VERSION}-runner.jar"),
            ]
            self._processes.start("registry", argv, log=folder / "log", cwd=folder)
            self._await_start(self._processes, folder / "log")
        except BaseException:  # also on Ctrl-C: no process and no folder may remain
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """For ``schema.registry.url``."""
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


def _unpacked(java: Java, progress: Progress) -> Path:
    """The folder with the registry; downloaded once per user."""
    cache = cache_root()
    final = cache / f"apicurio-registry-{VERSION}"
    if final.is_dir():
        return final
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with only_one(cache / f"{final.name}.lock", progress):
            if not final.is_dir():
                _download(final, java, progress)
    except OSError as error:
        raise LocalBrokerError(
            f"cannot use the cache folder {cache}: {error}; XDG_CACHE_HOME names another"
        ) from error
    return final


def _download(final: Path, java: Java, progress: Progress) -> None:
    what = f"Apicurio Registry {VERSION}"
    progress(f"Downloading {what} (142 MB; once per user) ...")
    with download(what, final, _MODULE, java, ivy_settings_file(), progress) as folder:
        archive = next(folder.iterdir())
        if not hmac.compare_digest(hashlib.sha256(archive.read_bytes()).hexdigest(), _SHA256):
            raise LocalBrokerError(
                f"the downloaded {archive.name} has another content: use another repository"
            )
        unpacked = folder / "unpacked"
        with tarfile.open(archive) as packed:
            packed.extractall(unpacked, filter="data")
        unpacked.rename(final)


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
