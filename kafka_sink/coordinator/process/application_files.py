"""What planning and the coordinator share in the application's folder: names of files, times of restarts."""

from __future__ import annotations

import json
import math
from pathlib import Path

# How often the coordinator looks for its driver and its folder.
WATCH_S = 1.0
# A process that has lived this long does not count as one that keeps ending.
LONG_LIFE_S = 600.0
# One that ended is started again at once; one that keeps ending, after ever longer pauses.
_PAUSE_S, _MAX_PAUSE_S = 10.0, 600.0


def known_cluster_marker(folder: Path, token: str, key: str) -> Path:
    """This file exists while the coordinator with this token serves the cluster.

    Planning writes it; the coordinator deletes it when it forgets the cluster.
    """
    return folder / f"said-{token}-{key}"


def ui_marker(folder: Path, token: str) -> Path:
    """Written by the coordinator with this token when it serves the live view, or could not: JSON with
    ``url``, ``address`` and ``port``, or ``error``."""
    return folder / f"ui-{token}"


def console_marker(folder: Path, token: str) -> Path:
    """This file exists where the coordinator with this token shows progress in the driver's terminal."""
    return folder / f"console-{token}"


def starts_file(folder: Path) -> Path:
    """The file that counts how often a coordinator was started."""
    return folder / "starts"


def is_current(marker: Path, token: str) -> bool:
    """Whether the application's folder exists, and no other coordinator has been started in it."""
    try:
        return bool(json.loads(marker.read_bytes())["token"] == token)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def pause_s(starts: int) -> float:
    """How long to wait after the last start, when ``starts`` processes in a row ended early."""
    return 0.0 if starts < 2 else min(_PAUSE_S * math.pow(2, min(starts, 30) - 2), _MAX_PAUSE_S)
