"""Threads of the sink keep off the names that Python's own Thread uses, of any version that is promised.

A Sender with a method ``_handle`` worked until 3.12; since 3.13 Thread keeps its handle under that name.
"""

from __future__ import annotations

import ast
import re
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Of 3.10 to 3.14; this Python's own are added.
TAKEN = """
    _after_fork _args _bootstrap _bootstrap_inner _context _daemonic _delete _handle _ident _initialized
    _invoke_excepthook _is_stopped _kwargs _name _native_id _os_thread_handle _reset_internal_locks
    _set_ident _set_native_id _set_os_name _set_tstate_lock _started _stderr _stop _target _tstate_lock
    _wait_for_tstate_lock
"""
FOLDERS = ("kafka_sink", "benchmarks", "tests")


def threads() -> list[ast.ClassDef]:
    """The classes that derive from Thread, by their source: nothing has to be imported."""
    texts = (path.read_text(encoding="utf-8") for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    # A quick look first: most files have no such class, and parsing all takes a second.
    some = (text for text in texts if re.search(r"^ *class .*Thread", text, re.MULTILINE))
    nodes = (node for text in some for node in ast.walk(ast.parse(text)))
    classes = (node for node in nodes if isinstance(node, ast.ClassDef))
    return [made for made in classes if any("Thread" in ast.unparse(base) for base in made.bases)]


def names_of(made: ast.ClassDef) -> set[str]:
    """Its methods, and the attributes that they set."""
    methods = {node.name for node in ast.walk(made) if isinstance(node, ast.FunctionDef)}
    stored = {
        node.attr
        for node in ast.walk(made)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and ast.unparse(node.value) == "self"
    }
    return methods | stored


def test_no_name_is_threads_own() -> None:
    found = threads()
    assert {"Sender", "CoordinatorClient"} <= {made.name for made in found}
    thread = threading.Thread()
    own = set(TAKEN.split()) | {name for name in {*dir(thread), *vars(thread)} if name.startswith("_")}
    own -= {"__init__", "__enter__", "__exit__"}
    wrong = {made.name: taken for made in found if (taken := names_of(made) & own)}
    assert wrong == {}
