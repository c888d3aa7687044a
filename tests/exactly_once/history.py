"""What a round's drivers wrote and its readers saw, for a checker that is not ours: porcupine, by Go."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

_CHECKER = Path(__file__).with_name("checker")
_FILE = "history"


class Checker:
    """The built checker. ``with`` it; raises RuntimeError where there is no Go."""

    def __enter__(self) -> Checker:
        go = shutil.which("go")
        if go is None:
            raise RuntimeError("the checker of histories is in Go, and 'go' is not on the path")
        self._folder = tempfile.mkdtemp(prefix="history-checker-")
        self._binary = Path(self._folder) / "checker"
        command = [go, "build", "-o", str(self._binary), "."]
        done = subprocess.run(command, cwd=_CHECKER, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the checker of histories could not be built: {done.stderr}")
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def problems(self, registers: list[dict[str, object]]) -> list[str]:
        """A line for each group of rows whose history no order of its operations explains."""
        text = json.dumps(registers)
        done = subprocess.run(
            [str(self._binary)], input=text, capture_output=True, text=True, check=False, timeout=600
        )
        if done.returncode not in (0, 1):
            raise RuntimeError(done.stderr)
        return done.stdout.splitlines()


def write_began(checkpoint: str, first: int, rows: int) -> str:
    """A driver is about to plan a micro-batch. Returns its name for ``write_is_known``."""
    name = f"{os.getpid()}-{time.monotonic_ns()}"
    _append(checkpoint, {"name": name, "call": time.monotonic_ns(), "first": first, "rows": rows})
    return name


def write_is_known(checkpoint: str, name: str) -> None:
    """The driver was told that the batch is committed."""
    _append(checkpoint, {"name": name, "return": time.monotonic_ns()})


def _append(checkpoint: str, line: dict[str, object]) -> None:
    with (Path(checkpoint) / _FILE).open("a", encoding="ascii") as file:
        file.write(json.dumps(line) + "\n")


@dataclass(frozen=True)
class Read:
    """Which rows a reader of committed rows saw, and how often."""

    call: int
    end: int
    seen: Counter[int]


@dataclass
class _Write:
    call: int
    first: int
    rows: int
    is_known: bool = False


@dataclass
class History:
    """Reads in their order; writes are in the checkpoint's file."""

    checkpoint: str
    reads: list[Read] = field(default_factory=list)

    def registers(self, rows: Iterable[int]) -> list[dict[str, object]]:
        """Rows with the same writes and reads are one register.

        A write that is known ends when the last read begins: Kafka tells that a transaction is committed
        before all of its partitions show it, so earlier reads may miss it.
        """
        writes = self._writes()
        last = self.reads[-1].call if self.reads else 0
        groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = defaultdict(list)
        for row in rows:
            of_row = tuple(i for i, one in enumerate(writes) if one.first <= row < one.first + one.rows)
            groups[of_row, tuple(read.seen[row] for read in self.reads)].append(row)
        return [
            {
                "name": f"{len(members)} rows from {members[0]} on, seen {list(times)} times",
                "writes": [
                    {
                        "call": writes[i].call,
                        "return": max(writes[i].call, last - 1),
                        "is_known": writes[i].is_known,
                    }
                    for i in of_row
                ],
                "reads": [
                    {"call": read.call, "return": read.end, "times": seen}
                    for read, seen in zip(self.reads, times, strict=True)
                ],
            }
            for (of_row, times), members in groups.items()
        ]

    def _writes(self) -> list[_Write]:
        found: dict[str, _Write] = {}
        file = Path(self.checkpoint) / _FILE
        for text in file.read_text(encoding="ascii").splitlines() if file.exists() else ():
            line = json.loads(text)
            if "call" in line:
                found[line["name"]] = _Write(line["call"], line["first"], line["rows"])
            else:
                found[line["name"]].is_known = True
        return list(found.values())
