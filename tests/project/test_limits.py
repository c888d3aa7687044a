"""Limits on tests that no linter checks."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE, TESTS = ROOT / "kafka_sink", ROOT / "tests"
WITHOUT_TESTS = {"errors.py", "version.py"}  # They contain no logic.


def test_each_module_has_a_test_file() -> None:
    modules = [path.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if not path.name.startswith("__")]
    untested = [path for path in modules if not (TESTS / path.parent / f"test_{path.name}").exists()]
    assert [str(path) for path in untested if str(path) not in WITHOUT_TESTS] == []


def test_tests_seldom_sleep_or_use_private_attributes() -> None:
    nodes = [node for path in TESTS.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    names = [node.id for node in nodes if isinstance(node, ast.Name)]
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    sleeps = [name for name in [*names, *(node.attr for node in attributes)] if name == "sleep"]
    # Named tuples and `os` have public names with a leading underscore.
    pattern = re.compile(r"_(?!_|(?:replace|asdict|fields|make|exit)$)")
    others = [node for node in attributes if ast.unparse(node.value) not in ("self", "cls")]
    private = [ast.unparse(node) for node in others if pattern.match(node.attr)]
    assert len(sleeps) <= 25
    assert len(private) <= 20, private
