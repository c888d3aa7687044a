"""Processes of this machine, as Linux reports them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Process(NamedTuple):
    """Seconds are of processor time; the seconds of children that it has waited for are counted apart."""

    parent: int
    own_s: float
    waited_s: float


def processes() -> dict[int, Process]:
    """All processes, by their ids."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            # proc(5): after the name, which may hold any text, come state and parent, and further on utime,
            # stime, cutime, cstime.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        own, waited = (sum(map(int, fields[at : at + 2])) * _TICK_S for at in (11, 13))
        found[int(folder.name)] = Process(int(fields[1]), own, waited)
    return found


def below(root: int) -> dict[int, Process]:
    """The descendants of this process."""
    known = processes()

    def is_below(pid: int) -> bool:
        while pid in known and pid != root:
            pid = known[pid].parent
        return pid == root

    return {pid: one for pid, one in known.items() if pid != root and is_below(pid)}


def command_of(pid: int) -> list[str]:
    """The command line of the process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def memory_of(pid: int) -> tuple[int, int]:
    """Resident bytes that it shares with no other process, and all resident bytes. Raises OSError if it has
    ended."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return (kib["Private_Clean"] + kib["Private_Dirty"]) << 10, kib["Rss"] << 10
