"""The libraries that this package needs, and what to say where one is missing.

``--py-files`` ships this package without them, so executors may lack any of them.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
from collections.abc import Sequence
from importlib.util import find_spec

# Modules that every task imports, and the distribution that has each.
OF_TASKS = {
    "pyarrow": "pyarrow",
    "numpy": "numpy",
    "lz4": "lz4",
    "zstandard": "zstandard",
    "zlib_ng": "zlib-ng",
    "google_crc32c": "google-crc32c",
    "cryptography": "cryptography",
}
# Modules that only some uses of the driver's side import.
OF_DRIVER = {
    "prometheus_client": "prometheus-client",  # /metrics of the live view
}
# Modules that pip installs for an extra only. A cluster brings its PySpark itself.
OF_EXTRAS = {
    "pyspark": "pyspark",
}


def explanation(error: BaseException) -> str | None:
    """What to do about an import that failed; None if it is not about a library that is missing."""
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return None
    module = error.name.split(".")[0]
    distribution = (OF_TASKS | OF_DRIVER | OF_EXTRAS).get(module)
    if distribution is None:
        return None
    # All that are missing, so that one pip line is enough.
    missing = [name for module, name in OF_TASKS.items() if not _is_there(module)]
    what, names = "lacks libraries that kafka-chunked needs", " ".join(missing) or distribution
    if not missing and _is_there(module):
        # It is there, without the part that was imported.
        what, names = f"has a version of {distribution} that is too old", f"--upgrade {distribution}"
    return (
        f"{error}: {sys.executable} on host {socket.gethostname()} {what}. "
        "Set PYSPARK_PYTHON to a Python that has them. With --py-files, which ships none, install them "
        f"on the driver and every executor: {sys.executable} -m pip install {names}"
    )


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


# Which folders a Python process may import from: a module in one that others write to runs as this user.


_PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def anybody_may_write(folder: str) -> bool:
    """Whether every user of the host may create files there, as in /tmp."""
    try:
        mode = os.stat(folder).st_mode
    except OSError:
        return False
    return stat.S_ISDIR(mode) and bool(mode & stat.S_IWOTH)


def is_ours(folder: str) -> bool:
    """Whether only this user and root may create files there."""
    try:
        found = os.stat(folder)
    except OSError:
        # An archive of Spark's, say, that is not there yet.
        return not os.path.lexists(folder)
    return found.st_uid in (0, os.getuid()) and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def path_for_child(path: Sequence[str]) -> str:
    """PYTHONPATH for a process in another folder that imports what this one can, by absolute paths.

    Folders of others, and those that a group may write to, are left out, except for the one that holds this
    package. What comes with Python itself is on the child's path without it.
    """
    folders = dict.fromkeys(map(os.path.abspath, path))
    return os.pathsep.join(one for one in folders if one == _PACKAGE_ROOT or is_ours(one))
