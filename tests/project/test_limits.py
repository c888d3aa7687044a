"""Limits on tests that no linter checks."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.quick import FILES

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, TESTS = ROOT / "kafka_sink", ROOT / "tests"
WITHOUT_LOGIC = ("errors.py", "version.py")
MODULES = sorted(
    path.relative_to(PACKAGE)
    for path in PACKAGE.rglob("*.py")
    if not path.name.startswith("__") and str(path.relative_to(PACKAGE)) not in WITHOUT_LOGIC
)


def path_of_tests(module: Path) -> Path:
    return TESTS / module.parent / f"test_{module.name}"


def test_each_module_has_a_test_file() -> None:
    assert [path for path in MODULES if not path_of_tests(path).exists()] == []


def test_each_module_has_a_quick_test(pytestconfig: pytest.Config) -> None:
    """A test that starts no program. It checks the files that this run has collected."""
    slow = {path for path, quick in pytestconfig.stash[FILES].items() if not quick}
    assert sorted(f"kafka_sink/{path}" for path in MODULES if path_of_tests(path) in slow) == []


def test_tests_seldom_sleep_or_use_private_attributes() -> None:
    nodes = [node for path in TESTS.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    names = [node.id for node in nodes if isinstance(node, ast.Name)]
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    sleeps = [name for name in [*names, *(node.attr for node in attributes)] if name == "sleep"]
    # Named tuples and `os` have public names with a leading underscore.
    pattern = re.compile(r"_(?!_|(?:replace|asdict|fields|make|exit)$)")
    hidden = [node for node in attributes if pattern.match(node.attr)]
    private = [ast.unparse(node) for node in hidden if ast.unparse(node.value) not in ("self", "cls")]
    assert len(sleeps) <= 25
    assert len(private) <= 20, private
