"""Token functions as users would write them."""

from __future__ import annotations

import os
from pathlib import Path

NUMBER = 5


def from_file() -> tuple[str, float]:
    """A token that a test has put into a file, as good for five minutes."""
    path = Path(os.environ["TEST_TOKEN_FILE"])
    return path.read_text(), path.stat().st_mtime + 300


def fixed() -> str:
    return "fixed-token"


def with_end() -> tuple[str, float]:
    return "ending-token", 2e9


def failing() -> str:
    raise RuntimeError("hunter2")


def wrong() -> object:
    return {"token": "hunter2"}
