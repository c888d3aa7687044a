"""The modules that a process loads. Contracts in pyproject.toml check which module may import which."""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator, Set
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.commands import run
from tests.support.strategy import forced

ROOT = Path(__file__).resolve().parents[2]
OF_TASKS = ("breaker", "engine", "memory", "network", "records", "task")


class Imports(NamedTuple):
    """The modules that a module imports at its head, and those that its functions or types import."""

    head: set[str]
    late: set[str]


def names_of(statement: ast.Import | ast.ImportFrom, own: Set[str]) -> Iterator[str]:
    """The modules that a statement imports. ``own``: the names of all modules of the package."""
    for alias in statement.names:
        if isinstance(statement, ast.Import):
            yield alias.name
        else:
            member = f"{statement.module}.{alias.name}"
            yield member if member in own else str(statement.module)


def imported(node: ast.AST, own: Set[str], is_late: bool = False) -> Iterator[tuple[bool, str]]:
    """The modules that are imported below a node, and whether that is in a function or for a type."""
    in_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    types = node.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) else []
    for child in ast.iter_child_nodes(node):
        is_child_late = is_late or in_function or child in types
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield from ((is_child_late, name) for name in names_of(child, own))
        else:
            yield from imported(child, own, is_child_late)


@cache
def all_imports() -> dict[str, Imports]:
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (ROOT / "kafka_sink").rglob("*.py")
    }
    imports = {}
    for module, path in files.items():
        found = set(imported(ast.parse(path.read_text(encoding="utf-8")), files.keys()))
        imports[module] = Imports(*({name for late, name in found if late is kind} for kind in (False, True)))
    return imports


def loaded_with(module: str) -> set[str]:
    """The modules that Python loads when it imports a module, and which the package's own modules import."""
    loaded, waiting = set[str](), [module]
    while waiting:
        name = waiting.pop()
        if name not in loaded:
            loaded.add(name)
            own = all_imports().get(name)
            if own is not None:
                waiting += [name.rpartition(".")[0], *own.head]
    return loaded


def contains(entry: str, module: str) -> bool:
    return module == entry or module.startswith(f"{entry}.")


def test_design_lists_the_modules_that_functions_import() -> None:
    """Catches: an import inside a function without a reason, and a reason that has gone."""
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    section = page.partition("## Imports inside functions")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]+) \|", section, re.MULTILINE)
    entries = {entry for cell in cells for entry in re.findall(r"`([\w.]+)`", cell)}
    late = {name: module for module, imports in all_imports().items() for name in imports.late}
    covering = {name: max((e for e in entries if contains(e, name)), key=len, default="") for name in late}
    assert {name: late[name] for name, entry in covering.items() if not entry} == {}
    assert entries - set(covering.values()) == set()


def test_functions_import_no_module_that_is_loaded_anyway() -> None:
    pointless = [
        f"{module} imports {name} late"
        for module, imports in all_imports().items()
        # Names of PySpark that not all versions have are imported in a `try`, and for types in addition.
        for name in sorted(name for name in imports.late if not contains("pyspark", name))
        if any(contains(name, loaded) for loaded in loaded_with(module))
    ]
    assert pointless == []


def test_the_doctor_loads_no_library() -> None:
    """Catches: a missing library ends the doctor before it can report it."""
    foreign = {name.partition(".")[0] for name in loaded_with("kafka_sink.doctor")}
    assert foreign - set(sys.stdlib_module_names) == {"", "kafka_sink"}


@pytest.mark.parametrize("entry", ["coordinator.server_process", "spark.planning"])
def test_a_process_that_sends_no_rows_loads_nothing_of_a_task(entry: str) -> None:
    """Catches: a package whose __init__ imports what tasks need, which contracts do not see.

    The coordinator starts beside each driver, and each job is planned in a new process. NumPy and PyArrow
    alone take 0.3 s of processor time.
    """
    code = (
        f"import sys, kafka_sink.{entry}\n"
        f"names = {{f'kafka_sink.{{name}}' for name in {OF_TASKS}}} | {{'numpy', 'pyarrow'}}\n"
        "print(*sorted(names & set(sys.modules)))"
    )
    # Under the other allocation strategy, the tests' own module imports the pool in every process.
    environ = {name: value for name, value in os.environ.items() if name != forced.VARIABLE}
    done = run([sys.executable, "-c", code], environ)
    assert done.stdout.split() == []
