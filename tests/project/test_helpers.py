"""Helpers of tests live in tests/support, so that a test file can be read, moved or deleted on its own."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support import lanes

ROOT = Path(__file__).resolve().parents[2]
# Programs with a command line of their own (``python -m tests.chaos``); their own tests import their modules.
PROGRAMS = ("chaos", "exactly_once", "matrix")


def imported(path: Path) -> list[str]:
    """Modules of the tests that a file imports."""
    return re.findall(r"^ *(?:from|import) (tests\.[\w.]+)", path.read_text(encoding="utf-8"), re.MULTILINE)


def test_tests_import_helpers_and_no_other_tests() -> None:
    allowed = ("tests.support.", *(f"tests.{program}" for program in PROGRAMS))
    files = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    wrong = {
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files
        for name in imported(path)
        if not (name == "tests.support" or name.startswith(allowed)) or ".test_" in name
    }
    assert not wrong


def test_modules_that_run_alone_are_there() -> None:
    """Catches: a module that moved, whose processes then start beside each other."""
    assert [name for name in lanes.ALONE if not (ROOT / name).exists()] == []
