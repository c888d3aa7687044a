"""Deprecated functions warn, and are removed when they are due."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from packaging.version import Version

import kafka_sink
from kafka_sink.deprecation import deprecated

PACKAGE = Path(kafka_sink.__file__).parent


@deprecated(since="0.2", removed_in="0.4", instead="kafka_sink.write")
def write_rows(rows: int) -> int:
    """Write rows."""
    return rows


def due(source: str, version: str) -> list[str]:
    """The functions with the decorator whose removal is due in this version."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.FunctionDef):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "deprecated":
                given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in decorator.keywords}
                if Version(given["removed_in"]) <= Version(version):
                    found.append(node.name)
    return found


def test_a_call_warns_at_the_line_of_the_caller() -> None:
    with pytest.warns(
        DeprecationWarning, match=r"since 0\.2, and 0\.4 removes it\. Use kafka_sink\.write$"
    ) as seen:
        assert write_rows(3) == 3
    assert seen[0].filename == __file__
    assert write_rows.__doc__ == "Write rows."


def test_no_deprecated_function_is_kept_beyond_its_version() -> None:
    overdue = [
        name for path in PACKAGE.rglob("*.py") for name in due(path.read_text(), kafka_sink.__version__)
    ]
    assert overdue == [], "remove these, and name them in CHANGELOG.md"


def test_removals_become_due_at_their_version() -> None:
    source = Path(__file__).read_text()
    assert [due(source, version) for version in ("0.3.9", "0.4", "1.0")] == [
        [],
        ["write_rows"],
        ["write_rows"],
    ]
