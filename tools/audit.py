"""Known holes of the dependencies, from a folder and without a network.

The versions that are pinned are looked up, and the oldest versions that users may have.

    python tools/audit.py ADVISORIES [constraints.txt [pyproject.toml]]
    python tools/audit.py --oldest          prints the oldest versions, as pins for pip-audit

ADVISORIES is a checkout of https://github.com/pypa/advisory-database, the database that PyPI shows and
pip-audit asks for. It is as good as it is new, so the date of its newest entry about these packages is
printed. Ends with 1 if one of the versions has a hole.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

_PIN = re.compile(r"^([A-Za-z0-9][\w.-]*)==([^\s;]+)")
# The requirements that pip installs for users. The other extras are for development.
_OF_USERS = re.compile(r"^(?:dependencies|spark|msk|kerberos) = \[(.*?)\]$", re.DOTALL | re.MULTILINE)
_OLDEST = re.compile(r'"([A-Za-z0-9][\w.-]*)>=([^",]+)')


def pins(constraints: Path) -> list[tuple[str, Version]]:
    found = [_PIN.match(line) for line in constraints.read_text().splitlines()]
    return [(canonicalize_name(one[1]), Version(one[2])) for one in found if one]


def oldest(project: Path) -> list[tuple[str, Version]]:
    """The lower bounds of the packages that users install."""
    found = _OLDEST.findall("".join(_OF_USERS.findall(project.read_text())))
    return [(canonicalize_name(name), Version(version)) for name, version in found]


def advisories(folder: Path, name: str) -> Iterator[Mapping[str, Any]]:
    """The advisories about a package that were not withdrawn."""
    for path in sorted((folder / "vulns" / name).glob("*.yaml")):
        entry = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not entry.get("withdrawn"):
            yield entry


def is_affected(entry: Mapping[str, Any], name: str, version: Version) -> bool:
    """Whether an advisory in OSV's format names this version, in a list or by a range."""
    for affected in entry.get("affected", ()):
        if canonicalize_name(affected["package"]["name"]) != name:
            continue
        ranges = [one for one in affected.get("ranges", ()) if one["type"] == "ECOSYSTEM"]
        if str(version) in affected.get("versions", ()) or any(_holds(one, version) for one in ranges):
            return True
    return False


def _holds(one: Mapping[str, Any], version: Version) -> bool:
    inside = False
    for event in one["events"]:
        if "introduced" in event and version >= _version(event["introduced"]):
            inside = True
        if "fixed" in event and version >= _version(event["fixed"]):
            inside = False
        if "last_affected" in event and version > _version(event["last_affected"]):
            inside = False
    return inside


def _version(text: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion:
        return Version("0")


def main(arguments: list[str]) -> int:
    if arguments == ["--oldest"]:
        print("\n".join(f"{name}=={version}" for name, version in oldest(Path("pyproject.toml"))))
        return 0
    folder = Path(arguments[0])
    if not (folder / "vulns").is_dir():
        print(f"error: {folder} is no checkout of the advisory database: it has no folder vulns")
        return 2
    files = dict(enumerate(map(Path, arguments)))
    pinned = pins(files.get(1, Path("constraints.txt")))
    lowest = oldest(files.get(2, Path("pyproject.toml")))
    newest, holes = "none", []
    for name, version in (*pinned, *lowest):
        for entry in advisories(folder, name):
            newest = max(str(entry.get("modified", "")), newest if newest != "none" else "")
            if is_affected(entry, name, version):
                names = ", ".join([entry["id"], *entry.get("aliases", ())])
                holes.append(f"{name} {version}: {names}")
    print(
        f"{len(pinned)} pinned versions and {len(lowest)} oldest ones; the newest advisory about one of "
        f"these packages is of {newest[:10]}"
    )
    print("\n".join(holes) or "No known holes in it.")
    return 1 if holes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
