"""Counts what a reader of kafka_sink meets: `python tools/count_house.py` from the repository's root.

The row's way is traced: one table of rows, from `Producer.send` until it is acknowledged, in a task whose
producer is warm, against the tests' scripted cluster. Classes are those whose methods run; Kafka's wire
codecs and generated methods do not count.
"""

from __future__ import annotations

import ast
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "kafka_sink"
TESTS = ROOT / "tests"
SHORT = 50
_SEE = re.compile(r"^See \w+[^.]*\.$")
# Public all the same: of named tuples, and of os.
_PUBLIC = ("_replace", "_asdict", "_fields", "_make", "_exit")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _without_docstring(node: _Function) -> list[ast.stmt]:
    body = node.body
    first = body[0]
    is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return body[1:] if is_docstring else body


def _forwards(node: _Function) -> bool:
    """Whether a method only calls one of a part, with its own parameters and nothing else."""
    body = _without_docstring(node)
    if len(body) != 1 or not isinstance(body[0], ast.Expr | ast.Return) or node.name.startswith("__"):
        return False
    call = body[0].value
    parameters = [one.arg for one in [*node.args.args, *node.args.kwonlyargs]]
    if not isinstance(call, ast.Call) or not parameters or parameters[0] not in ("self", "cls"):
        return False
    where = call.func
    while isinstance(where, ast.Attribute):
        where = where.value
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    return (
        isinstance(where, ast.Name)
        and where.id == "self"
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Attribute)
        and all(isinstance(one, ast.Name) and one.id in parameters for one in given)
    )


def _is_empty(node: _Function) -> bool:
    """A method that does nothing, or returns a constant."""
    body = _without_docstring(node)
    return not body or (
        len(body) == 1
        and (
            isinstance(body[0], ast.Pass)
            or (isinstance(body[0], ast.Return) and isinstance(body[0].value, ast.Constant | None))
        )
    )


def _is_protocol(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases)


def source() -> dict[str, int]:
    """Counts in the package's files."""
    found: Counter[str] = Counter()
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix not in (".py", ".html"):
            continue
        text = path.read_text(encoding="utf-8")
        lines = text.count("\n")
        found["lines"] += lines
        found["files"] += 1
        if path.suffix != ".py":
            continue
        found[f"files below {SHORT} lines"] += lines < SHORT
        found["of these `__init__.py` and `__main__.py`"] += lines < SHORT and path.stem.startswith("__")
        found["noqa: ARG"] += len(re.findall(r"noqa: ARG", text))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                found["classes"] += 1
                protocol = _is_protocol(node)
                found["protocols"] += protocol
                methods = [one for one in node.body if isinstance(one, _Function)]
                found["methods that only forward"] += sum(map(_forwards, methods))
                found["empty methods outside protocols"] += 0 if protocol else sum(map(_is_empty, methods))
            if isinstance(node, _Function):
                found["functions"] += 1
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                found["longest function"] = max(found["longest function"], length)
                found['docstrings "See X."'] += bool(_SEE.match((ast.get_docstring(node) or "").strip()))
    return dict(found)


def private_accesses() -> tuple[int, int, Counter[str]]:
    """Of tests to others' private attributes: how many, in how many files, and which."""
    names: Counter[str] = Counter()
    files = 0
    for path in sorted(TESTS.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        of_file = [
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and node.attr.startswith("_")
            and not node.attr.startswith("__")
            and node.attr not in _PUBLIC
            and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
        ]
        files += bool(of_file)
        names.update(of_file)
    return sum(names.values()), files, names


class _Trace:
    """Which of the package's functions ran, and on which threads, while it was on."""

    def __init__(self) -> None:
        self.on = False
        self.functions: set[str] = set()
        self.threads: set[str] = set()

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if self.on and event == "call" and code.co_filename.startswith(str(PACKAGE)):
            if "<" in code.co_qualname.replace("<locals>", ""):
                return
            module = code.co_filename.removeprefix(str(PACKAGE)).strip("/").removesuffix(".py")
            self.functions.add(f"{module}:{code.co_qualname}")
            self.threads.add(threading.current_thread().name)

    def classes(self) -> Iterator[str]:
        """Those whose methods ran."""
        owners = {name.rpartition(".")[0] for name in self.functions}
        yield from sorted(name for name in owners if re.search(r":_?[A-Z]\w*$", name))


def row_way() -> _Trace:
    """Traces one table's way."""
    sys.path.insert(0, str(ROOT))
    import pyarrow as pa

    from kafka_sink.model import SparkTask
    from kafka_sink.options import parse
    from kafka_sink.rows.column_plan import ColumnPlan
    from kafka_sink.task.producer import Producer
    from tests.support.fake_broker import FakeCluster

    trace = _Trace()
    threading.setprofile(trace.note)
    table = pa.record_batch({"value": pa.array([b"x" * 100] * 1000, pa.binary())})
    plan = ColumnPlan.of([("value", "binary")], "t")
    with FakeCluster({"t": 3}) as cluster:
        options = parse({"kafka.bootstrap.servers": cluster.bootstrap_servers, "topic": "t"}).options
        producer = Producer(options)
        for _ in range(2):
            producer.begin(None, None, SparkTask())
            producer.send(table, plan=plan)
            producer.finish()
        producer.begin(None, None, SparkTask())
        time.sleep(0.2)
        trace.on = True
        sys.setprofile(trace.note)
        producer.send(table, plan=plan)
        producer.finish()
        trace.on = False
        sys.setprofile(None)
        producer.close()
    threading.setprofile(None)  # type: ignore[arg-type]
    return trace


def main() -> None:
    """Prints a line for each count; with `--names`, the functions of the row's way, too."""
    for name, number in source().items():
        print(f"{number:7,} {name}")
    number, files, names = private_accesses()
    print(f"{number:7,} private accesses in tests, in {files} files; most: {names.most_common(8)}")
    print(f"{sum(1 for _ in TESTS.rglob('test_*.py')):7,} test modules")
    trace = row_way()
    classes = list(trace.classes())
    print(f"{len(trace.functions):7,} functions on a row's way")
    print(f"{len(classes):7,} classes on a row's way")
    print(f"{len(trace.threads):7,} threads on a row's way")
    if "--names" in sys.argv:
        print("\n".join(sorted(trace.functions)))


if __name__ == "__main__":
    main()
