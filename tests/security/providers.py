"""Token functions as users would write them."""

from __future__ import annotations

NUMBER = 5


def fixed() -> str:
    return "fixed-token"


def with_end() -> tuple[str, float]:
    return "ending-token", 2e9


def failing() -> str:
    raise RuntimeError("hunter2")


def wrong() -> object:
    return {"token": "hunter2"}
