"""An environment with the packages that a page of the documentation installs, and nothing else.

The libraries are those of the tests' own environment, to which the new one has links. So this needs no
package index, and takes no second copy of PySpark.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from importlib.metadata import PathDistribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

from tests.support.commands import run

ROOT = Path(__file__).resolve().parents[2]
# The folders that pages install, by the names of their distributions.
_FOLDERS = {".": "kafka-chunked", "./packages/local_kafka": "kafka-chunked-local-kafka"}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


def installed_by(page: Path) -> list[Requirement]:
    """The packages in the `pip install` lines of a page."""
    lines = [line for block in blocks(page, "sh") for line in block.splitlines()]
    words = [
        word
        for line in lines
        if line.startswith("pip install ")
        for word in shlex.split(line, comments=True)[2:]
    ]
    return [Requirement(_named(word)) for word in words]


def _named(word: str) -> str:
    folder, bracket, extras = word.partition("[")
    return _FOLDERS.get(folder, folder) + bracket + extras


def make_environment(page: Path, folder: Path) -> Path:
    """Returns the environment's Python."""
    run([sys.executable, "-m", "venv", "--without-pip", folder])
    (target,) = folder.glob("lib/python*/site-packages")
    seen: set[tuple[str, str]] = set()
    for requirement in installed_by(page):
        for found in _with_dependencies(requirement, seen):
            # The folder on sys.path that contains the distribution's files.
            source = Path(str(found.locate_file("")))
            names = {
                file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")
            }
            for name in names:
                link = target / name
                if not link.exists():
                    link.symlink_to(source / name)
    return folder / "bin" / "python"


def _with_dependencies(requirement: Requirement, seen: set[tuple[str, str]]) -> Iterator[PathDistribution]:
    """The distribution and all that it needs, with the extras that are asked for."""
    for extra in ("", *requirement.extras):
        key = requirement.name.lower(), extra
        if key in seen:
            continue
        seen.add(key)
        found = distribution(requirement.name)
        assert isinstance(found, PathDistribution)
        if not extra:
            yield found
        for line in found.requires or ():
            needed = Requirement(line)
            is_new = needed.marker is None or needed.marker.evaluate({"extra": extra})
            # If there is an extra, the requirements without it have been yielded already.
            if is_new and (not extra or "extra" in str(needed.marker)):
                yield from _with_dependencies(needed, seen)
