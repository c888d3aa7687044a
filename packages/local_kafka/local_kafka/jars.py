"""Finds Java, and Kafka's jars: in a folder that the user names, in the cache, or by a download with Ivy."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import hmac
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from local_kafka.errors import LocalBrokerError

MINIMUM_JAVA = 17

_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
# Where packages put their runtimes. Searched only if JAVA_HOME and PATH have no usable one.
_HOMES = (
    "/usr/lib/jvm/*/bin/java",
    "/opt/homebrew/opt/openjdk*/bin/java",
    "/usr/local/opt/openjdk*/bin/java",
)
_MAC_HOMES = "/Library/Java/JavaVirtualMachines/*/Contents/Home/bin/java"


@dataclass(frozen=True, slots=True)
class Java:
    """One runtime: the path of its ``java`` and its feature version (17, 21, ...)."""

    path: str
    version: int


def install_hint() -> str:
    """The command that installs a Java on this platform."""
    if platform.system() == "Darwin":
        return "brew install openjdk@17"
    for program, command in (
        ("apt-get", "sudo apt-get install -y openjdk-17-jre-headless"),
        ("dnf", "sudo dnf install -y java-17-openjdk-headless"),
        ("yum", "sudo yum install -y java-17-openjdk-headless"),
        ("apk", "sudo apk add openjdk17-jre-headless"),
        ("pacman", "sudo pacman -S jre17-openjdk-headless"),
        ("zypper", "sudo zypper install -y java-17-openjdk-headless"),
    ):
        if shutil.which(program):
            return command
    return "install a Java 17 runtime and set JAVA_HOME to it"


def java_version(path: str) -> int | None:
    """The feature version that ``path -version`` prints; None if it does not run."""
    try:
        result = subprocess.run([path, "-version"], capture_output=True, text=True, timeout=30, check=False)
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
    for pattern in (*_HOMES, _MAC_HOMES):
        for path in sorted(Path("/").glob(pattern.lstrip("/"))):
            yield str(path)


def find_java(environ: Mapping[str, str] | None = None, *, search_installed: bool = True) -> Java:
    """The first Java of at least MINIMUM_JAVA, from JAVA_HOME, PATH, then the usual folders.

    Raises LocalBrokerError, which names the ones that were too old and says how to install one.
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


KAFKA_VERSION = "4.3.0"
SCALA_VERSION = "2.13"
# Kafka 4 logs through SLF4J 1.7, and its server module declares no binding. Without one it logs nothing.
LOG4J_VERSION = "2.25.4"

KAFKA_HOME_ENV = "KAFKA_CHUNKED_KAFKA_HOME"
IVY_SETTINGS_ENV = "KAFKA_CHUNKED_IVY_SETTINGS"

Progress = Callable[[str], None]

# kafka-tools has DumpLogSegments and other classes for run_tool. They do not need its other dependencies,
# Connect and Jetty: 45 jars.
_KAFKA_MODULE = f"""<ivy-module version="2.0">
  <info organisation="kafka-chunked" module="local-broker"/>
  <configurations><conf name="default"/></configurations>
  <dependencies>
    <dependency org="org.apache.kafka" name="kafka_{SCALA_VERSION}" rev="{KAFKA_VERSION}"
      conf="default->default"/>
    <dependency org="org.apache.kafka" name="kafka-tools" rev="{KAFKA_VERSION}" transitive="false"
      conf="default->default"/>
    <dependency org="org.apache.logging.log4j" name="log4j-slf4j-impl" rev="{LOG4J_VERSION}"
      conf="default->default"/>
  </dependencies>
</ivy-module>
"""
_DOWNLOADED = re.compile(r"\[SUCCESSFUL \] [^#]*#([^;]+);([^!]+)!.*\((\d+)ms\)")
_FOUND = re.compile(r"^\s+found (\S+)")
_TROUBLE = re.compile(
    r"UNRESOLVED|not found|FAILED|Exception|ERROR|Host .*|Server access|refused|timed? ?out", re.IGNORECASE
)


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
    java: Java,
    *,
    kafka_home: str | os.PathLike[str] | None = None,
    ivy_settings: str | os.PathLike[str] | None = None,
    cache: Path | None = None,
    progress: Progress = print_progress,
) -> Path:
    """The folder with Kafka's jars; downloads them once per user and version if no other folder is named.

    The download goes to a folder beside its final place, and is renamed when it is complete. A lock makes
    parallel callers wait for one download. An interrupted download leaves no incomplete cache.

    Raises LocalBrokerError.
    """
    named = kafka_home or os.environ.get(KAFKA_HOME_ENV)
    if named:
        return jars_of(Path(named).expanduser())
    settings = ivy_settings_file(ivy_settings)
    try:
        cache = cache_root() if cache is None else cache
        final = cache / f"kafka-{KAFKA_VERSION}"
        if final.is_dir():
            return final
        cache.mkdir(parents=True, exist_ok=True)
        with only_one(cache / f"kafka-{KAFKA_VERSION}.lock", progress):
            if not final.is_dir():  # another process may have downloaded it
                what = f"Kafka {KAFKA_VERSION}"
                progress(f"Downloading Apache {what} (47 jars, 46 MB, about a minute; once per user) ...")
                with download(what, final, _KAFKA_MODULE, java, settings, progress) as jars:
                    _check(jars, pinned_checksums())
                    jars.rename(final)
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        raise LocalBrokerError(
            f"cannot use the cache folder {cache or 'in your home'}: {error}; XDG_CACHE_HOME names another"
        ) from error
    return final


def ivy_settings_file(named: str | os.PathLike[str] | None = None) -> str | os.PathLike[str] | None:
    """The Ivy settings file that the caller or the environment names. Raises LocalBrokerError."""
    settings = named or os.environ.get(IVY_SETTINGS_ENV)
    if settings and not Path(settings).is_file():
        raise LocalBrokerError(
            f"the Ivy settings file {settings} does not exist (ivy_settings or {IVY_SETTINGS_ENV})"
        )
    return settings


@contextlib.contextmanager
def only_one(lock: Path, progress: Progress) -> Iterator[None]:
    """Hold an advisory lock. The kernel releases it with the process, so it never goes stale."""
    with open(lock, "w", encoding="ascii") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            progress(f"Waiting for another process that downloads Kafka {KAFKA_VERSION} ...")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def download(
    what: str,
    final: Path,
    module: str,
    java: Java,
    settings: str | os.PathLike[str] | None,
    progress: Progress,
) -> Iterator[Path]:
    """The folder with what Ivy downloads for a module, beside its ``final`` place, for the block. The caller
    holds the lock of that place. Raises LocalBrokerError."""
    for leftover in final.parent.glob(
        f"{final.name}.part-*"
    ):  # of killed downloads, as this process has the lock
        shutil.rmtree(leftover, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=f"{final.name}.part-", dir=final.parent))
    started = time.monotonic()
    try:
        jars = staging / "jars"
        problem = _run_ivy(java, staging, jars, module, settings, progress)
        if problem:
            raise LocalBrokerError(f"{what} could not be downloaded {problem}")
        yield jars
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    progress(f"{what} is in {final} ({time.monotonic() - started:.0f} s).")


def _check(jars: Path, pinned: Mapping[str, str]) -> None:
    """Compare with pinned digests: the digests that Ivy checks come from the same repository as the jars."""
    brought = {jar.name: jar for jar in jars.glob("*.jar")}
    missing = sorted(pinned.keys() - brought.keys())
    if missing:
        raise LocalBrokerError(f"the download of Kafka {KAFKA_VERSION} lacks {', '.join(missing)}")
    for name, jar in sorted(brought.items()):
        if name not in pinned:
            raise LocalBrokerError(
                f"the download of Kafka {KAFKA_VERSION} contains {name}, which is not part of it"
            )
        found = hashlib.sha256(jar.read_bytes()).hexdigest()
        if not hmac.compare_digest(found, pinned[name]):
            raise LocalBrokerError(
                f"the downloaded {name} has another content (SHA-256 {found}, "
                f"expected {pinned[name]}): try again, or use another repository"
            )


def pinned_checksums() -> dict[str, str]:
    """SHA-256 by name of every jar of this version, as ``sha256sum`` writes them."""
    lines = (Path(__file__).parent / "jars.sha256").read_text(encoding="ascii").splitlines()
    return {name: digest for digest, name in (line.split() for line in lines)}


def ivy_jar() -> Path:
    """The Ivy jar that PySpark ships. Raises LocalBrokerError without a full PySpark."""
    spec = importlib.util.find_spec("pyspark")
    folders = (
        [Path(place) / "jars" for place in (spec.submodule_search_locations or ()) if spec] if spec else []
    )
    if os.environ.get("SPARK_HOME"):
        folders.append(Path(os.environ["SPARK_HOME"]) / "jars")
    for folder in folders:
        for jar in sorted(folder.glob("ivy-*.jar"), reverse=True):
            return jar
    raise LocalBrokerError(
        "no Ivy found: the download of Kafka uses the one inside pyspark's jars (pip install pyspark). "
        f"Or set {KAFKA_HOME_ENV} to an unpacked Kafka."
    )


def _proxy_flags(environ: Mapping[str, str]) -> list[str]:
    """Translate https_proxy, which Java does not read."""
    flags = []
    for scheme in ("http", "https"):
        value = environ.get(f"{scheme}_proxy") or environ.get(f"{scheme.upper()}_PROXY")
        found = re.match(r"(?:\w+://)?(?:[^@/]*@)?([^:/]+):(\d+)", value or "")
        if found:
            flags += [f"-D{scheme}.proxyHost={found.group(1)}", f"-D{scheme}.proxyPort={found.group(2)}"]
    return flags


def _run_ivy(
    java: Java,
    staging: Path,
    jars: Path,
    module_text: str,
    settings: str | os.PathLike[str] | None,
    progress: Progress,
) -> str:
    """Why it failed; empty if it did not."""
    module = staging / "ivy.xml"
    module.write_text(module_text, encoding="utf-8")
    # The classifier belongs in the pattern: without it two artifacts of one module would share a file.
    pattern = f"{jars}/[artifact]-[revision](-[classifier]).[ext]"
    command = [
        *(java.path, "-XX:TieredStopAtLevel=1", *_proxy_flags(os.environ), "-jar", str(ivy_jar())),
        *(["-settings", os.fspath(settings)] if settings else []),
        *("-ivy", str(module), "-confs", "default"),
        *("-retrieve", pattern, "-cache", str(staging / "ivy-cache")),
    ]
    tail: deque[str] = deque(maxlen=200)
    ivy = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
    )
    try:
        _follow(ivy.stdout or (), tail, progress)
        code = ivy.wait()
    finally:
        if ivy.poll() is None:
            ivy.kill()
        ivy.wait()
        if ivy.stdout:
            ivy.stdout.close()
    return _failure(code, list(tail)) if code != 0 or not jars.is_dir() else ""


def _follow(lines: Iterable[str], tail: deque[str], progress: Progress) -> None:
    """Turn Ivy's output into progress lines: modules found while it resolves, then jars as they come."""
    found = brought = 0
    reported = time.monotonic()
    for line in lines:
        if line.strip(". \n"):
            tail.append(line.rstrip())
        if _FOUND.match(line):
            found += 1
            if time.monotonic() - reported >= 2:
                reported = time.monotonic()
                progress(f"  resolving: {found} modules found")
        done = _DOWNLOADED.search(line)
        if done:
            brought += 1
            progress(f"  {brought}/{max(found, brought)} {done.group(1)} {done.group(2)}")


def _failure(code: int, tail: list[str]) -> str:
    """A short message from Ivy's warnings, with what to do."""
    seen: dict[str, None] = {}
    for line in tail:
        if _TROUBLE.search(line):
            seen.setdefault(line.strip().strip(":").strip(), None)
    causes = list(seen)[:4] or tail[-3:]
    return (
        f"(Ivy ended with {code}): {' | '.join(causes)}. Check the network (https_proxy is used), set "
        f"{IVY_SETTINGS_ENV} to an Ivy settings file with your repository, or name a folder that has it "
        f"({KAFKA_HOME_ENV} for Kafka)."
    )
