"""What pages and docstrings name is there: files, folders, classes, functions, parameters, attributes."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "kafka_sink"
BENCHMARKS = ROOT / "benchmarks"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
MODULES = sorted(PACKAGE.rglob("*.py"))
# Between single backticks in pages: a path with an ending or a slash at its end.
_PATH = re.compile(r"`([A-Za-z_][\w./-]*(?:\.py|\.json|\.md|\.toml|/))(?:`|:)")
# Between double backticks in docstrings: a lone identifier, called or not, perhaps an attribute of one.
_NAME = re.compile(r"``(?!TLS_)([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(?:\(\))?``")
# Of other projects, or put together from parts: named, and nowhere in this package's code.
_OTHERS = """
    AdminClientConfig CommonClientConfigs ConsumerConfig DumpLogSegments JaasConfig KafkaWriter ProducerConfig
    KAFKA_CHUNKED_COORDINATOR_PORT StreamTokenizer sock_accept to_avro
    invalidate_caches pyspark_kafka_chunked save sha256sum shutdownOutput to_numpy validate writeStream
"""


def identifiers() -> frozenset[str]:
    """Every word of the package's code, its texts and its modules' names; not of docstrings and comments."""
    found = set(dir(builtins))
    for path in MODULES:
        found.update(path.relative_to(PACKAGE).with_suffix("").parts)
        lines = path.read_text().splitlines()
        for node in definitions(path):
            docstring = _docstring(node)
            if docstring is not None:
                for number in range(docstring.lineno - 1, docstring.end_lineno or 0):
                    lines[number] = ""
        found.update(re.findall(r"\w+", re.sub(r"(^|  )#.*", "", "\n".join(lines), flags=re.MULTILINE)))
    return frozenset(found)


@cache
def definitions(path: Path) -> list[ast.Module | ast.ClassDef | ast.FunctionDef]:
    """The module, its classes and functions; expressions are not looked into."""
    found: list[ast.Module | ast.ClassDef | ast.FunctionDef] = []
    pending: list[ast.AST] = [ast.parse(path.read_text())]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            found.append(node)
        if isinstance(node, ast.stmt | ast.Module):
            pending += [*getattr(node, "body", ()), *getattr(node, "orelse", ())]
    return found


def _docstring(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> ast.Constant | None:
    first = node.body[0] if node.body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        return first.value if isinstance(first.value.value, str) else None
    return None


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    for node in definitions(path):
        docstring = _docstring(node)
        if docstring is not None:
            yield docstring.lineno, str(docstring.value)


def test_each_line_of_the_threat_model_names_a_test_that_is_there() -> None:
    page = (ROOT / "SECURITY.md").read_text().partition("## Threat model")[2]
    lines = [line for line in page.splitlines() if line.startswith("| ") and line != "| | Test |"]
    assert len(lines) > 40
    for line in lines:
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", line)
        assert len(named) == 1 or line.startswith("| **Not held**"), line
        for path, name in named:
            assert f"def {name}(" in (ROOT / path).read_text(), line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    missing = [
        name
        for name in _PATH.findall(page.read_text())
        if not (ROOT / name).exists() and not any(PACKAGE.rglob(name)) and not any(BENCHMARKS.rglob(name))
    ]
    assert not missing


def test_names_in_docstrings_are_there() -> None:
    known = identifiers() | set(_OTHERS.split())
    missing = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in MODULES
        for line, text in docstrings(path)
        for name in _NAME.findall(text)
        if not set(name.split(".")) <= known
    ]
    assert not missing


def test_the_map_of_the_design_page_is_the_tree() -> None:
    page = (ROOT / "docs" / "design.md").read_text()
    table = page.split("## Map of the files")[1].split("\n## ")[0]
    named = set()
    for row in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE):
        first, *others = re.findall(r"`([^`]+)`", row)
        folder = first.rpartition("/")[0] if not first.endswith("/") else first.rstrip("/").rpartition("/")[0]
        named.add(first)
        named.update(other if "/" in other or not folder else f"{folder}/{other}" for other in others)
    folders = {f"kafka_sink/{path.parent.name}/" for path in PACKAGE.glob("*/*.py")}
    tree = folders | {f"kafka_sink/{path.name}" for path in PACKAGE.glob("*.py") if path.stem != "__init__"}
    ours = {name for name in named if name.startswith("kafka_sink/")}
    assert ours == tree
    assert not [name for name in named if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_site_shows_pictures_and_tables_of_a_page(page: Path) -> None:
    # Python-Markdown takes a block in a list for text of the list unless it is indented by four spaces.
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert not re.findall(r"^\n {2,3}(?:!\[|\|).*", prose, re.MULTILINE)
