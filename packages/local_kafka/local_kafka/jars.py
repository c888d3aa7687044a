"""Finds Java, and Kafka's jars: in a folder that the user names, in the cache, or by a download."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from local_kafka.errors import LocalBrokerError

MINIMUM_JAVA = 17

_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
# Packages install their runtimes here. It is searched only if JAVA_HOME and PATH have no usable one.
_HOMES = "/usr/lib/jvm/*/bin/java"


@dataclass(frozen=True, slots=True)
class Java:
    """One runtime: the path of its ``java`` and its feature version (17, 21, ...)."""

    path: str
    version: int


def install_hint(which: Callable[[str], str | None] = shutil.which) -> str:
    """The command that installs a Java with this system's package manager."""
    for program, command in (
        ("apt-get", "sudo apt-get install -y openjdk-17-jre-headless"),
        ("dnf", "sudo dnf install -y java-17-openjdk-headless"),
        ("yum", "sudo yum install -y java-17-openjdk-headless"),
        ("apk", "sudo apk add openjdk17-jre-headless"),
        ("pacman", "sudo pacman -S jre17-openjdk-headless"),
        ("zypper", "sudo zypper install -y java-17-openjdk-headless"),
    ):
        if which(program):
            return command
    return "install a Java 17 runtime and set JAVA_HOME to it"


def java_version(path: str, timeout_s: float = 30.0) -> int | None:
    """The feature version that ``path -version`` prints; None if it does not run."""
    try:
        result = subprocess.run(
            [path, "-version"], capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _VERSION.search(result.stderr + result.stdout)
    return int(found.group(1)) if found else None


def _candidates(environ: Mapping[str, str]) -> Iterator[str]:
    home = environ.get("JAVA_HOME")
    if home:
        yield str(Path(home) / "bin" / "java")
    on_path = shutil.which("java", path=environ.get("PATH"))
    if on_path:
        yield on_path


def _installed() -> Iterator[str]:
    yield from map(str, sorted(Path("/").glob(_HOMES.lstrip("/"))))


def find_java(environ: Mapping[str, str] | None = None, *, search_installed: bool = True) -> Java:
    """The first Java of at least MINIMUM_JAVA, from JAVA_HOME, PATH, then the usual folders.

    Raises LocalBrokerError, which lists the ones that were too old and how to install a newer one.
    """
    environ = os.environ if environ is None else environ
    too_old: list[str] = []
    paths = [*_candidates(environ), *(_installed() if search_installed else ())]
    for path in dict.fromkeys(paths):
        version = java_version(path)
        if version is not None and version >= MINIMUM_JAVA:
            return Java(path, version)
        if version is not None:
            too_old.append(f"{path} is Java {version}")
    found = "; ".join(too_old) if too_old else "none found by JAVA_HOME, PATH or the usual folders"
    problem = "too old" if too_old else "missing"
    raise LocalBrokerError(
        f"Kafka needs Java {MINIMUM_JAVA} or newer, and it is {problem} here ({found}). "
        f"Install it: {install_hint()}"
    )


KAFKA_VERSION = "4.4.0"
SCALA_VERSION = "2.13"

KAFKA_HOME_ENV = "KAFKA_CHUNKED_KAFKA_HOME"
REPOSITORY_ENV = "KAFKA_CHUNKED_MAVEN_REPOSITORY"
_MAVEN_CENTRAL = "https://repo1.maven.org/maven2"
_AT_ONCE = 4
_TRIES = 3
_TIMEOUT_S = 60.0
_PIECE = 1 << 18

Progress = Callable[[str], None]


def print_progress(line: str) -> None:
    """The default: progress lines on stderr, so that stdout stays the caller's."""
    print(line, file=sys.stderr, flush=True)


def cache_root(environ: Mapping[str, str] | None = None) -> Path:
    """The user's cache folder for this: $XDG_CACHE_HOME/kafka-chunked, else ~/.cache/kafka-chunked."""
    environ = os.environ if environ is None else environ
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base and os.path.isabs(base) else Path.home() / ".cache") / "kafka-chunked"


def jars_of(home: Path) -> Path:
    """The folder with Kafka's jars in an unpacked Kafka (``libs``) or in a plain folder of jars.

    Raises LocalBrokerError if it has no Kafka server.
    """
    for folder in (home, home / "libs"):
        if next(folder.glob("kafka_2.1*.jar"), None) and next(folder.glob("kafka-clients-*.jar"), None):
            return folder.resolve()
    raise LocalBrokerError(
        f"{home} contains no Kafka: expected kafka_{SCALA_VERSION}-<version>.jar and "
        f"kafka-clients-<version>.jar there or in its libs folder (named by kafka_home or {KAFKA_HOME_ENV})"
    )


def find_jars(
    *,
    kafka_home: str | os.PathLike[str] | None = None,
    cache: Path | None = None,
    progress: Progress = print_progress,
    environ: Mapping[str, str] | None = None,
    pinned: Mapping[str, str] | None = None,
) -> Path:
    """The folder with Kafka's jars; downloads them once per user and version if no other folder is named.

    ``pinned``: as ``pinned_checksums`` returns them. Raises LocalBrokerError.
    """
    environ = os.environ if environ is None else environ
    named = kafka_home or environ.get(KAFKA_HOME_ENV)
    if named:
        return jars_of(Path(named).expanduser())
    pinned = pinned_checksums() if pinned is None else pinned
    what = f"Apache Kafka {KAFKA_VERSION} ({len(pinned)} jars, 46 MB)"
    return downloaded(f"kafka-{KAFKA_VERSION}", what, pinned, cache, progress, environ=environ)


def pinned_checksums() -> dict[str, str]:
    """SHA-256 by path in a Maven repository of every jar of this version: all that Kafka's server declares,
    and log4j-slf4j-impl, without which it logs nothing. Of kafka-tools only the jar: for ``run_tool``.
    """
    lines = (Path(__file__).parent / "jars.sha256").read_text(encoding="ascii").splitlines()
    return {path: digest for digest, path in (line.split() for line in lines)}


def downloaded(
    name: str,
    what: str,
    files: Mapping[str, str],
    cache: Path | None = None,
    progress: Progress = print_progress,
    then: Callable[[Path], Path] = lambda folder: folder,
    environ: Mapping[str, str] | None = None,
) -> Path:
    """The folder ``name`` of the cache with these files, SHA-256 by path in a Maven repository.

    The download goes to a folder beside its final place, and is renamed when it is complete; ``then`` may
    return another folder within it. A lock makes parallel callers wait for one download. An interrupted
    download leaves no incomplete cache. Raises LocalBrokerError.
    """
    try:
        environ = os.environ if environ is None else environ
        cache = cache_root(environ) if cache is None else cache
        final = cache / name
        if final.is_dir():
            return final
        cache.mkdir(parents=True, exist_ok=True)
        with only_one(cache / f"{name}.lock", progress):
            if not final.is_dir():  # another process may have downloaded it
                repository = environ.get(REPOSITORY_ENV, _MAVEN_CENTRAL).rstrip("/")
                _download(final, what, repository, files, progress, then)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        raise LocalBrokerError(
            f"cannot use the cache folder {cache or 'in your home'}: {error}; XDG_CACHE_HOME names another"
        ) from error
    return final


@contextlib.contextmanager
def only_one(lock: Path, progress: Progress) -> Iterator[None]:
    """Hold an advisory lock. The kernel releases it with the process, so it never goes stale."""
    with open(lock, "w", encoding="ascii") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            progress("Waiting for another process that downloads the same ...")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _download(
    final: Path,
    what: str,
    repository: str,
    files: Mapping[str, str],
    progress: Progress,
    then: Callable[[Path], Path],
) -> None:
    """Download the files. Leftovers of killed downloads are removed first: the caller holds the folder's
    lock."""
    for leftover in final.parent.glob(f"{final.name}.part-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    if not repository.startswith(("https://", "http://")) or "@" in repository:
        raise LocalBrokerError(f"{REPOSITORY_ENV} must be an http or https address without a login")
    progress(f"Downloading {what}; once per user ...")
    started = time.monotonic()
    staging = Path(tempfile.mkdtemp(prefix=f"{final.name}.part-", dir=final.parent))
    folder = staging / "files"
    folder.mkdir()
    workers = ThreadPoolExecutor(_AT_ONCE)
    try:
        fetched = [
            workers.submit(_fetch, f"{repository}/{path}", digest, folder) for path, digest in files.items()
        ]
        for count, one in enumerate(as_completed(fetched), 1):
            progress(f"  {count}/{len(files)} {one.result()}")
        then(folder).rename(final)
    finally:
        workers.shutdown(cancel_futures=True)
        shutil.rmtree(staging, ignore_errors=True)
    progress(f"It is in {final} ({time.monotonic() - started:.0f} s).")


def _fetch(address: str, digest: str, folder: Path) -> str:
    """The name of the file. Raises LocalBrokerError."""
    target = folder / address.rpartition("/")[2]
    for attempt in range(1, _TRIES + 1):
        found = hashlib.sha256()
        try:
            # Http or https: the caller has checked.
            with urlopen(address, timeout=_TIMEOUT_S) as response, target.open("wb") as file:  # noqa: S310
                while piece := response.read(_PIECE):
                    found.update(piece)
                    file.write(piece)
                if response.length:
                    raise ConnectionError("the connection ended early")
        except (URLError, HTTPException, TimeoutError, ConnectionError) as error:
            if isinstance(error, HTTPError):
                error.close()
            if attempt < _TRIES and not (isinstance(error, HTTPError) and error.code < 500):
                time.sleep(attempt)
                continue
            raise LocalBrokerError(
                f"{address} could not be downloaded: {error}. Check the network (https_proxy is used), name "
                f"another Maven repository in {REPOSITORY_ENV}, or an unpacked Kafka in {KAFKA_HOME_ENV}"
            ) from error
        break
    if not hmac.compare_digest(found.hexdigest(), digest):
        raise LocalBrokerError(
            f"the downloaded {target.name} has another content (SHA-256 {found.hexdigest()}, expected "
            f"{digest}): try again, or use another repository"
        )
    return target.name
