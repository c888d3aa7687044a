"""Virtual environments with the wheel, one for each claimed pair of Python and PySpark."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_INSTALL_SECONDS = 1800
# The job reads back with it.
_CONFLUENT = "confluent-kafka>=2.6"


@dataclass(frozen=True)
class Environment:
    """A Python, and which PySpark is installed with the wheel: the newest that this Python takes, by default.

    ``lowest``: the oldest version of every direct dependency that pyproject.toml allows. ``pandas``: another
    pandas than the extra "spark" allows.
    """

    python: str
    pyspark: str = "pyspark"
    lowest: bool = False
    pandas: str = ""

    def __str__(self) -> str:
        wanted = "newest pyspark" if self.pyspark == "pyspark" else self.pyspark
        wanted = "oldest of all dependencies" if self.lowest else wanted
        return ", ".join(filter(None, (f"Python {self.python}", wanted, self.pandas)))

    @property
    def folder(self) -> str:
        name = "lowest" if self.lowest else self.pyspark.replace("~=", "-")
        return "-".join(filter(None, (self.python, name, self.pandas.replace(">=", "-"))))


_NEWEST = Environment.pyspark
# On Python 3.12, 3.5 lacks a module that left the standard library.
_PYSPARKS = {
    "3.10": ("pyspark~=3.5.0", _NEWEST),
    "3.11": ("pyspark~=3.5.0", "pyspark~=4.0.0", "pyspark~=4.1.0", "pyspark~=4.2.0", _NEWEST),
    "3.12": ("pyspark~=4.0.0", "pyspark~=4.1.0", _NEWEST),
    "3.13": ("pyspark~=4.0.0", "pyspark~=4.1.0", _NEWEST),
    "3.14": (_NEWEST,),
}
ENVIRONMENTS = (
    Environment("3.10", lowest=True),
    Environment("3.13", pandas="pandas>=3"),
    *(Environment(python, pyspark) for python, pysparks in _PYSPARKS.items() for pyspark in pysparks),
)


class InstallError(Exception):
    """The end of what the installer printed."""


def build_wheel(folder: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--wheel-dir", str(folder), str(_ROOT)], check=True, timeout=200)
    return next(folder.glob("*.whl"))


def prepare(environment: Environment, wheel: Path, root: Path) -> Path | None:
    """The Python of an environment below ``root`` in which the wheel is installed.

    None where this machine has no such Python. An environment that exists is brought up to date.
    """
    python = _find(environment.python)
    if python is None:
        return None
    venv = root / environment.folder
    made = venv / "bin" / "python"
    if not made.exists():
        _uv("venv", "--quiet", "--python", python, str(venv))
    install = ("pip", "install", "--quiet", "--python", str(made))
    if environment.lowest:
        extra = ("--extra", "spark", "--requirements", str(_ROOT / "pyproject.toml"))
        _uv(*install, "--resolution", "lowest-direct", *extra)
        _uv(*install, "--resolution", "lowest-direct", _CONFLUENT)
        _uv(*install, "--reinstall", "--no-deps", str(wheel))
    else:
        extra_name = "" if environment.pandas else "[spark]"
        wanted = [f"kafka-chunked{extra_name} @ file://{wheel}", environment.pyspark, _CONFLUENT]
        wanted += [environment.pandas] if environment.pandas else []
        _uv(*install, "--reinstall-package", "kafka-chunked", *wanted)
    return made


def _uv(*arguments: str) -> None:
    command = [str(Path(sys.executable).parent / "uv"), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_INSTALL_SECONDS, cwd=_ROOT, check=False
    )
    if done.returncode:
        raise InstallError((done.stderr or done.stdout)[-1500:])


def _find(version: str) -> str | None:
    """A ``pythonX.Y`` that starts: on PATH, or among pyenv's versions."""
    name = f"python{version}"
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [shutil.which(name), *map(str, sorted(pyenv.glob(f"{version}.*/bin/{name}")))]
    for found in candidates:
        if found and subprocess.run([found, "--version"], capture_output=True, check=False).returncode == 0:
            return found
    return None
