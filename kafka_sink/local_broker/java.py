"""Finds a Java that can run Kafka."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kafka_sink.errors import LocalBrokerError

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
