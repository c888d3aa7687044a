"""Comments, docstrings and messages are sentences with a subject and a verb.

The patterns are beginnings of fragments, and words that readers had to read twice. No script finds all.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "kafka_sink"
# The packages that have been rewritten, and "." for the modules at the top. The list only grows.
REWRITTEN = (
    *(".", "arrow", "breaker", "cluster", "coordinator", "dead_letters", "driver", "engine", "memory"),
    *("network", "options", "records", "reports", "rows", "security", "spark", "task"),
    "transactions",
)
# Only comments and docstrings are checked for these. A title such as "By topic" is fine in a message.
BEGINNINGS = re.compile(r"(?:Of|By|As|Those|Others|Who|Not) ")
WORDS = re.compile(r"\b(?:(?:un)?mend(?:s|ed|ing|able)?|(?<!there )is none|whoever|in vain)\b")


def comments(source: str) -> Iterator[tuple[int, str]]:
    """The line and text of each block of comments: lines below each other, or one comment behind code."""
    block: list[str] = []
    first = row = column = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        alone = token.line.lstrip().startswith("#")
        if block and not (alone and token.start == (row + 1, column)):
            yield first, " ".join(block)
            block = []
        if not block:
            first = token.start[0]
        block.append(token.string.lstrip("#: "))
        row, column = token.start if alone else (0, 0)
    if block:
        yield first, " ".join(block)


def strings(source: str) -> Iterator[tuple[int, str, bool]]:
    """The line and text of each string, also of the parts of f-strings, and whether it is a docstring."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    statements = [node.body[0] for node in ast.walk(tree) if isinstance(node, documented) and node.body]
    docstrings = {id(statement.value) for statement in statements if isinstance(statement, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value, id(node) in docstrings


def faults(source: str) -> Iterator[str]:
    prose = [*((line, text, True) for line, text in comments(source)), *strings(source)]
    for line, text, is_prose in prose:
        start = BEGINNINGS.match(text) if is_prose else None
        for found in filter(None, (start, WORDS.search(text))):
            yield f"{line}: {found.group()!r} in {text[:60]!r}"


def modules_of(package: str) -> list[Path]:
    return sorted(PACKAGE.glob("*.py") if package == "." else (PACKAGE / package).rglob("*.py"))


@pytest.mark.parametrize("package", REWRITTEN)
def test_no_comment_begins_with_a_fragment_and_no_word_puzzles_a_reader(package: str) -> None:
    assert modules_of(package)
    found = [
        f"{path.relative_to(PACKAGE.parent)}:{fault}"
        for path in modules_of(package)
        for fault in faults(path.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('"""Of one cluster\'s tasks."""', 1),
        ("# As Partition's.\nx = 1", 1),
        ("# A batch\n# Of two lines.\nx = 1", 0),
        ("x = 1  # By topic.\n# Not sent.", 2),
        ("raise ValueError(f'{x} is none: mend it')", 1),
        ("message = 'By topic: '", 0),
        ("# The task waits as long as the batch is open.", 0),
    ],
)
def test_each_pattern_is_found(source: str, count: int) -> None:
    assert len(list(faults(source))) == count
