"""Folders that only this user can write to.

Another user who could write there could redirect tasks to processes of their own.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def make_private_folder(folder: Path) -> None:
    """Create the folder, private to this user, or check the one that exists.

    The parent is Spark's, so it is never created here. Raises OSError.
    """
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        check_private_folder(folder)


def check_private_folder(folder: Path) -> None:
    """Raise PermissionError if anybody but this user could have written to the folder."""
    # A link is refused: its target may be another user's, and may change at any time.
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise PermissionError(errno.EPERM, "it is not a folder", str(folder))
    if found.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "it belongs to another user", str(folder))
    if found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise PermissionError(errno.EPERM, "other users have access to it", str(folder))
