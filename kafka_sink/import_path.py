"""Which folders a Python process may import from: a module in one that others write to runs as this user."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence

_PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def anybody_may_write(folder: str) -> bool:
    """Whether every user of the host may create files there, as in /tmp."""
    try:
        mode = os.stat(folder).st_mode
    except OSError:
        return False
    return stat.S_ISDIR(mode) and bool(mode & stat.S_IWOTH)


def for_child(path: Sequence[str]) -> str:
    """PYTHONPATH for a process in another folder that imports what this one can, by absolute paths.

    Folders that anybody may write to are left out, except for the one that holds this package.
    """
    folders = dict.fromkeys(map(os.path.abspath, path))
    return os.pathsep.join(one for one in folders if one == _PACKAGE_ROOT or not anybody_may_write(one))
