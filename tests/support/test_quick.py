"""The rule by which `make quick` chooses files."""

from __future__ import annotations

import pytest

from tests.support.quick import QUICK, is_left_out


class _Config:
    def __init__(self, expression: str) -> None:
        self._expression = expression

    def getoption(self, _: str) -> str:
        return self._expression


@pytest.mark.parametrize(
    ("name", "is_quick"),
    [
        ("memory/test_pool.py", True),
        ("local_kafka/test_jars.py", True),
        ("support/test_quick.py", True),
        ("scenarios/test_invariants.py", False),
        ("breaker/scenarios/test_shared_breaker.py", False),
        ("scenarios/conftest.py", True),
    ],
)
def test_quick_tests_are_in_files_named_after_a_module(
    pytestconfig: pytest.Config, name: str, is_quick: bool
) -> None:
    path = pytestconfig.rootpath / "tests" / name
    assert is_left_out(path, _Config(QUICK)) == (not is_quick)  # type: ignore[arg-type]
    assert not is_left_out(path, _Config(""))  # type: ignore[arg-type]
