"""Topics of their own."""

from __future__ import annotations

import itertools

import pytest

_numbers = itertools.count()


@pytest.fixture
def topic() -> str:
    return f"prepared-{next(_numbers)}"
