"""The libraries that this package needs, and the advice to give if one is missing.

``--py-files`` ships this package without its libraries, so executors may lack any of them.
"""

from __future__ import annotations

import grp
import os
import pwd
import socket
import stat
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

# Modules that every task imports, and the distribution that contains each of them.
OF_TASKS = {
    "pyarrow": "pyarrow",
    "numpy": "numpy",
    "lz4": "lz4",
    "zstandard": "zstandard",
    "zlib_ng": "zlib-ng",
    "google_crc32c": "google-crc32c",
    "cryptography": "cryptography",
    "msgspec": "msgspec",
}
# Modules that only some features on the driver import.
OF_DRIVER = {
    "prometheus_client": "prometheus-client",  # /metrics of the live view
}
# Modules that pip installs only with an extra. A cluster has its own PySpark.
OF_EXTRAS = {
    "pyspark": "pyspark",
}


def explanation(error: BaseException, is_there: Callable[[str], object] = find_spec) -> str | None:
    """Advice about a failed import; None if the error is not about a missing library."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    module = error.name.split(".")[0]
    distribution = (OF_TASKS | OF_DRIVER | OF_EXTRAS).get(module)
    if distribution is None:
        return None
    # Lists all missing libraries, so that one pip command installs them.
    missing = [name for module, name in OF_TASKS.items() if not is_there(module)]
    what, names = "lacks libraries that kafka-chunked needs", " ".join(missing) or distribution
    if not missing and is_there(module):
        # The library exists, but not the part of it that was imported.
        what, names = f"has a version of {distribution} that is too old", f"--upgrade {distribution}"
    return (
        f"{error}: {sys.executable} on host {socket.gethostname()} {what}. "
        "Set PYSPARK_PYTHON to a Python that has them. With --py-files, which ships none, install them "
        f"on the driver and every executor: {sys.executable} -m pip install {names}"
    )


# A Python process must not import from a folder that another user may write to: that user's code would run as
# this user.


_PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def foreign(found: os.stat_result, *, is_folder: bool = False) -> str:
    """Why a file or folder that this process wants to use is not its user's alone; "" if it is.

    ``found`` must be of the file itself, not of the target of a symbolic link: another user may change the
    link at any time. A folder must be closed to all others. A file may be readable, but a hard link to it
    may be in a folder of another user.
    """
    if not (stat.S_ISDIR if is_folder else stat.S_ISREG)(found.st_mode):
        return "it is not a folder" if is_folder else "it is not a regular file"
    if found.st_uid != os.geteuid():
        return "it belongs to another user"
    if is_folder and found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        return "other users have access to it"
    return "it has a hard link" if not is_folder and found.st_nlink > 1 else ""


def others_may_write(path: str) -> bool:
    """Whether another user of this host, except root, could change or replace the file, or fill the folder.

    This is so for /tmp, for example. False if the path does not exist.
    """
    path = os.path.realpath(path)
    if not os.path.exists(path):
        return False
    return _is_of_others(path) or any(
        # In a folder with the sticky bit, such as /tmp, only a file's owner may move or replace it.
        _is_of_others(str(parent)) and not os.stat(parent).st_mode & stat.S_ISVTX
        for parent in Path(path).parents
    )


def _is_of_others(path: str) -> bool:
    try:
        status = os.stat(path)
    except OSError:
        return True
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & stat.S_IWOTH:
        return True
    if not status.st_mode & stat.S_IWGRP:
        return False
    # With an access control list, the group's bits say what its entries for users and groups may grant.
    return not _is_own_group(status.st_gid) or _has_acl(path)


def _has_acl(path: str) -> bool:
    try:
        return bool(os.getxattr(path, "system.posix_acl_access"))
    except OSError:
        return False  # there is no list, or the file system does not support them


def _is_own_group(group: int) -> bool:
    """Whether the group is root's, or the private group that many systems create for each user."""
    if group == 0:
        return True
    try:
        user, of_files = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(group)
    except KeyError:
        return False
    return of_files.gr_name == user and set(of_files.gr_mem) <= {user}


def path_for_child(path: Sequence[str]) -> str:
    """PYTHONPATH for a process in another folder, so that it imports what this process can import.

    The paths are absolute. Folders that other users may write to are left out, except this package's.
    """
    folders = dict.fromkeys(map(os.path.abspath, path))
    return os.pathsep.join(
        folder for folder in folders if folder == _PACKAGE_ROOT or not others_may_write(folder)
    )


def module_command(module: str) -> list[str]:
    """The command that runs a module of this package.

    Run it in "/": Python 3.10 has no ``-P`` and would import modules from the current folder.
    """
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    return [os.path.abspath(sys.executable), *safe, "-m", module]
