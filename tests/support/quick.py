"""Which tests are quick, and that they are: `make quick` runs them alone.

They are the tests of one module that start no program. Other tests let several modules work together, or
check the project's own files.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

# The fixture that every fixture requests if it starts a JVM, a broker, Spark, a browser or another program.
PROGRAMS = "_programs"
QUICK = "not slow"
# The number of quick tests in each collected file.
FILES = pytest.StashKey[dict[Path, int]]()
_FORBIDDEN = ("java", "chromium", "chromedriver", "spark-submit")
_ROOT = Path(__file__).resolve().parents[2]
# The module of tests/memory/test_pool.py is in one of these folders, as memory/pool.py.
_MODULES = (_ROOT / "kafka_sink", _ROOT / "packages" / "local_kafka", _ROOT / "tests")


def has_module(path: Path) -> bool:
    """Whether a test file has the name of the module that it tests."""
    module = path.relative_to(_ROOT / "tests").with_name(path.name.removeprefix("test_"))
    return any((folder / module).exists() for folder in _MODULES)


def is_left_out(path: Path, config: pytest.Config) -> bool:
    """Whether `make quick` does not even import a file."""
    return config.getoption("markexpr") == QUICK and path.name.startswith("test_") and not has_module(path)


def mark(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test as slow whose fixtures, or their fixtures, start a program."""
    quick = config.stash[FILES] = defaultdict(int)
    for item in items:
        is_slow = PROGRAMS in getattr(item, "fixturenames", ())
        quick[item.path] += not is_slow
        if is_slow:
            item.add_marker("slow")


def forbid_programs(config: pytest.Config) -> None:
    """In `make quick`, fail a test that starts a program without the fixture, and report the fixture."""
    if config.getoption("markexpr") == QUICK:
        sys.addaudithook(_refuse)


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "subprocess.Popen":
        return
    program = Path(str(arguments[0]))
    # Tests write programs of these names into temporary folders. To ask a Java for its version takes 0.1 s.
    is_real = program.name in _FORBIDDEN and Path(tempfile.gettempdir()) not in program.parents
    if is_real and "-version" not in arguments[1]:
        raise AssertionError(f"a quick test starts {arguments[0]}: request the fixture {PROGRAMS}")
