"""Counts what a reader of kafka_sink meets, against the budgets in house.json beside this file.

    python tools/count_house.py [--step N ...] [--names | --quiet]

Prints every count, with `--names` what was counted, too. With `--step`, exits 1 and says why where a step's
check of house.json fails: files that are gone, counts that may be reached at most, names and words that must
not occur, functions that a row meets.

- A row's way is traced: one table, from `Producer.send` until it is acknowledged, in a task whose producer is
  warm, against the tests' scripted cluster. Comprehensions, generated methods and values (frozen dataclasses,
  named tuples, sequences) do not count. The calls that a step names may as well be those with compression.
- A container keyed by a partition or by a broker is an attribute, annotated as a dict, set, deque or the like
  whose first type is TopicPartition or Target, or else int or Node, in one of the engine's packages. Mappings
  and Sets are views of another's. What maps other ints than brokers' ids is listed in house.json.
- A name is looked for among a Python file's names and, in all texts, within backticks; a word anywhere.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import sys
import threading
import time
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "kafka_sink"
TESTS = ROOT / "tests"
DOCS = ROOT / "docs"
HOUSE = json.loads((Path(__file__).parent / "house.json").read_text(encoding="utf-8"))
# Public all the same: of named tuples, and of os.
_PUBLIC = ("_replace", "_asdict", "_fields", "_make", "_exit")
_PATCHES = ("setattr", "setitem", "setenv", "delattr", "delitem", "delenv", "chdir", "syspath_prepend")
_CONTAINERS = ("dict", "defaultdict", "Counter", "OrderedDict", "set", "frozenset", "deque")
_FOR_DEVELOPERS = ("design", "exactly-once-proof")
# How many are traced.
_TABLES = 5
_Function = ast.FunctionDef | ast.AsyncFunctionDef
# What was counted, by the count's name.
NAMES: dict[str, list[str]] = {}


def _counted(name: str, items: Iterable[object]) -> dict[str, int]:
    NAMES[name] = sorted(map(str, items))
    return {name: len(NAMES[name])}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def modules() -> dict[str, Path]:
    """The package's files by their names, such as `network/client`."""
    return {str(path.relative_to(PACKAGE).with_suffix("")): path for path in sorted(PACKAGE.rglob("*.py"))}


def lines_of(folder: Path, pattern: str = "*.py") -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in folder.rglob(pattern))


def packages() -> dict[str, tuple[int, int]]:
    """Lines and files by package, such as `coordinator/live`; "" is the top."""
    found: dict[str, tuple[int, int]] = {}
    for path in modules().values():
        name = str(path.parent.relative_to(PACKAGE)).replace(".", "")
        lines, files = found.get(name, (0, 0))
        found[name] = lines + path.read_text(encoding="utf-8").count("\n"), files + 1
    return found


def _body(node: _Function) -> list[ast.stmt]:
    return node.body[1:] if ast.get_docstring(node) is not None else node.body


def _forwards(node: _Function) -> bool:
    """Whether a method only calls one of a part (`self.part.call(a, b)`), with its own parameters."""
    body = _body(node)
    only = body[0] if len(body) == 1 else None
    if not isinstance(only, ast.Expr | ast.Return) or node.name.startswith("__"):
        return False
    call = only.value
    if not isinstance(call, ast.Call) or not re.match(r"self\.\w+\.", ast.unparse(call.func)):
        return False
    parameters = {one.arg for one in [*node.args.args, *node.args.kwonlyargs]}
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    return all(isinstance(one, ast.Name) and one.id in parameters for one in given)


def _is_empty(node: _Function) -> bool:
    """A method that does nothing, or returns a constant."""
    return all(
        isinstance(one, ast.Pass)
        or (isinstance(one, ast.Return) and isinstance(one.value, ast.Constant | None))
        for one in _body(node)
    )


def is_value(node: ast.ClassDef) -> bool:
    """A frozen dataclass, a named tuple or a sequence."""
    bases = " ".join(map(ast.unparse, node.bases))
    frozen = any("frozen=True" in ast.unparse(one) for one in node.decorator_list)
    return frozen or re.search(r"\b(NamedTuple|Sequence)\b", bases) is not None


def source() -> dict[str, int]:
    """Counts of classes and functions in the package."""
    found: Counter[str] = Counter()
    places: defaultdict[str, set[str]] = defaultdict(set)
    for module, path in modules().items():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ClassDef):
                found["classes"] += 1
                places[node.name].add(module)
                protocol = any(ast.unparse(base).startswith("Protocol") for base in node.bases)
                found["protocols"] += protocol
                methods = [one for one in node.body if isinstance(one, _Function)]
                found["methods that only forward"] += sum(map(_forwards, methods))
                found["empty methods outside protocols"] += 0 if protocol else sum(map(_is_empty, methods))
            if isinstance(node, _Function):
                found["functions"] += 1
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                found["lines of the longest function"] = max(found["lines of the longest function"], length)
    homonyms = (name for name, where in places.items() if len(where) > 1)
    return found | _counted("homonyms among classes", homonyms)


def _keys(annotation: ast.expr | None) -> Iterator[str]:
    """The first type of each container of an annotation."""
    for node in ast.walk(annotation) if annotation else ():
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).split(".")[-1] in _CONTAINERS:
            inner = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) else node.slice
            yield ast.unparse(inner)


def containers() -> dict[str, int]:
    """Attributes of the engine's packages that are keyed by a partition, or by a broker."""
    partition: list[str] = []
    broker: list[str] = []
    for module, path in modules().items():
        if module.split("/")[0] not in HOUSE["engine packages"]:
            continue
        fields = (one for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef) for one in node.body)
        own = (
            node for node in ast.walk(tree(path)) if isinstance(getattr(node, "target", None), ast.Attribute)
        )
        for one in (*fields, *own):
            if not isinstance(one, ast.AnnAssign):
                continue
            name = f"{module}:{ast.unparse(one.target).removeprefix('self.')}"
            keys = set(_keys(one.annotation))
            if keys & {"TopicPartition", "Target"}:
                partition.append(name)
            elif keys & {"int", "Node"} and name not in HOUSE["ints that name no broker"]:
                broker.append(name)
    return {
        **_counted("containers keyed by partition", partition),
        **_counted("containers keyed by broker", broker),
    }


def _imports(path: Path) -> Iterator[str]:
    for node in tree(path).body:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [f"{node.module}.{one.name}" for one in node.names]
        elif isinstance(node, ast.Import):
            names = [one.name for one in node.names]
        else:
            continue
        yield from (name for name in names if name.split(".")[0] == "kafka_sink")


def bands() -> dict[str, int]:
    """Imports that go upwards, or to and fro within a band."""
    band = {part: depth for depth, parts in enumerate(HOUSE["bands"]) for part in parts}
    wrong: set[str] = set()
    pairs: set[tuple[str, str]] = set()
    for module, path in modules().items():
        here = module.split("/")[0]
        for name in _imports(path):
            there = name.split(".")[1] if "." in name else ""
            if not (PACKAGE / there).is_dir() and not (PACKAGE / f"{there}.py").exists():
                there = "__init__"
            pairs.add((here, there))
            if band.get(here, 0) > band.get(there, len(band)):
                wrong.add(f"{module} -> {name}")
    strays = {f"{here} is in no band" for here, _ in pairs if here not in band}
    circles = {f"{a} <-> {b}" for a, b in pairs if a < b and (b, a) in pairs and band.get(a) == band.get(b)}
    return _counted("imports against the bands", {*wrong, *circles, *strays})


def tests() -> dict[str, int]:
    """What tests do to private things, and which modules have none of their name."""
    found: Counter[str] = Counter()
    for path in sorted(TESTS.rglob("*.py")):
        found["test modules"] += path.name.startswith("test_")
        # What unittest.mock patches counts, too.
        imported = (node for node in ast.walk(tree(path)) if isinstance(node, ast.ImportFrom))
        mocks = {name.name for node in imported if node.module == "unittest.mock" for name in node.names}
        for node in ast.walk(tree(path)):
            if not isinstance(node, ast.Attribute):
                found["sleeps in tests"] += isinstance(node, ast.Name) and node.id == "sleep"
                found["monkeypatches in tests"] += isinstance(node, ast.Name) and node.id in mocks & {"patch"}
                continue
            of = node.value.id if isinstance(node.value, ast.Name) else ""
            private = re.match("_(?!_)", node.attr) and node.attr not in _PUBLIC and of not in ("self", "cls")
            found["private accesses in tests"] += bool(private)
            found["monkeypatches in tests"] += of == "monkeypatch" and node.attr in _PATCHES
            found["monkeypatches in tests"] += of == "mock" and node.attr == "patch"
            found["sleeps in tests"] += node.attr == "sleep"
    alone = [
        module
        for module in map(Path, modules())
        if not module.name.startswith("__")
        and str(module) not in HOUSE["modules with nothing to test"]
        and not (TESTS / module.parent / f"test_{module.name}.py").exists()
    ]
    return {
        **found,
        **_counted("modules without a test of their name", alone),
        "lines of tests": lines_of(TESTS),
        "lines of benchmarks": lines_of(ROOT / "benchmarks"),
    }


def docs() -> dict[str, int]:
    """Words of pages, for whom, and how many are longer than they may be."""
    pages = {path.stem: path for path in DOCS.glob("*.md")} | {
        name: ROOT / name for name in ("README.md", "CHANGELOG.md")
    }
    words = {name: len(path.read_text(encoding="utf-8").split()) for name, path in pages.items()}
    over = (f"{name}: {n:,}" for name, n in words.items() if n > HOUSE["docs"].get(name, 0))
    developers = sum(words.get(name, 0) for name in _FOR_DEVELOPERS)
    return {
        "words for users": sum(words.values()) - words["CHANGELOG.md"] - developers,
        "words for developers": developers,
        **_counted("pages over their budget", over),
    }


class _Trace:
    """Which of the package's functions ran, and on which threads, while it was on."""

    def __init__(self) -> None:
        self.on = False
        self.threads: set[str] = set()
        self._lines: set[tuple[str, int]] = set()

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if self.on and event == "call" and code.co_filename.startswith(str(PACKAGE)):
            self._lines.add((code.co_filename, code.co_firstlineno))
            self.threads.add(threading.current_thread().name)

    @contextmanager
    def one(self) -> Iterator[None]:
        """On within the block. Of several blocks that with the fewest functions counts: where the machine is
        busy, responses come late, and the breaker looks into that."""
        fewest, self._lines = self._lines, set()
        self.on = True
        sys.setprofile(self.note)
        yield
        self.on = False
        sys.setprofile(None)
        if fewest and len(fewest) < len(self._lines):
            self._lines = fewest

    def _functions(self, module: str, path: Path) -> Iterator[tuple[str, ast.ClassDef | None]]:
        """Those of a file that ran, each with its class."""
        found: list[tuple[str, ast.AST, ast.ClassDef | None]] = [("", tree(path), None)]
        while found:
            prefix, parent, owner = found.pop()
            for node in ast.iter_child_nodes(parent):
                if not isinstance(node, _Function | ast.ClassDef):
                    found.append((prefix, node, owner))
                    continue
                found.append(
                    (f"{prefix}{node.name}.", node, node if isinstance(node, ast.ClassDef) else None)
                )
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                if isinstance(node, _Function) and (str(path), first) in self._lines:
                    yield f"{module}:{prefix}{node.name}", owner

    def names(self) -> list[tuple[str, ast.ClassDef | None]]:
        """All functions that ran, each with its class."""
        return [one for module, path in modules().items() for one in self._functions(module, path)]

    def counts(self) -> dict[str, int]:
        """Functions and classes that a row meets; those of values are no classes here."""
        ran = self.names()
        owned = {name.rpartition(".")[0] for name, owner in ran if owner and not is_value(owner)}
        return {
            **_counted("functions on a row's way", (name for name, _ in ran)),
            **_counted("classes on a row's way", owned),
            **_counted(
                "breaker classes on a row's way", (one for one in owned if one.startswith("breaker/"))
            ),
            "threads on a row's way": len(self.threads),
        }


def row_way() -> dict[str, int]:
    """Traces a table's way."""
    sys.path[:0] = [str(ROOT), str(ROOT / "packages" / "local_kafka")]
    import pyarrow as pa

    from kafka_sink.options import parse
    from kafka_sink.rows.column_plan import ColumnPlan
    from kafka_sink.task.producer import Producer
    from tests.support.fake_broker import FakeCluster

    traces = {"none": _Trace(), "lz4": _Trace()}
    table = pa.record_batch({"value": pa.array([b"x" * 100] * 1000, pa.binary())})
    plan = ColumnPlan.of([("value", "binary")], "t")
    with FakeCluster({"t": 3}) as cluster:
        for compression, trace in traces.items():
            threading.setprofile(trace.note)
            given = {"kafka.bootstrap.servers": cluster.bootstrap_servers, "topic": "t"}
            producer = Producer(parse({**given, "kafka.compression.type": compression}).options)
            for _ in range(2):
                producer.begin()
                producer.send(table, plan=plan)
                producer.finish()
            for _ in range(_TABLES):
                producer.begin()
                time.sleep(0.2)
                with trace.one():
                    producer.send(table, plan=plan)
                    producer.finish()
            producer.close()
    threading.setprofile(None)  # type: ignore[arg-type]
    NAMES["calls with compression"] = [name for name, _ in traces["lz4"].names()]
    return traces["none"].counts()


@cache
def texts() -> dict[str, tuple[str, set[str]]]:
    """Code, tests and docs: each file's text, and the names in it."""
    found: dict[str, tuple[str, set[str]]] = {}
    for folder in ("kafka_sink", "packages", "tests", "benchmarks", "examples", "docs", "recipe", "."):
        walk = (ROOT / folder).glob("*") if folder == "." else (ROOT / folder).rglob("*")
        for path in walk:
            if path.suffix not in (".py", ".md", ".html") or path.name == "CHANGELOG.md":
                continue
            text = path.read_text(encoding="utf-8")
            names = {
                word
                for quoted in re.findall(r"`+([^`\n]+)`+", text)
                # Kafka's own names of options are not ours.
                if not quoted.startswith(("kafka.", "sasl."))
                for word in re.findall(r"\w+", quoted)
            }
            if path.suffix == ".py":
                tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
                names |= {one.string for one in tokens if one.type == tokenize.NAME}
                names |= {f"def {name.string}" for word, name in pairwise(tokens) if word.string == "def"}
            found[str(path.relative_to(ROOT))] = text, names
    return found


def failures(step: dict[str, Any], counts: dict[str, int]) -> Iterator[str]:
    """Why a step's check fails."""
    for path in step.get("gone", ()):
        # Folders of bytecode stay behind.
        if (ROOT / path).is_file() or any((ROOT / path).rglob("*.py")):
            yield f"{path} is still there"
    for name, most in step.get("at most", {}).items():
        if counts[name] > most:
            yield f"{counts[name]:,} {name}, {most:,} at most {NAMES.get(name, [''])[:10]}"
    ran = [*NAMES["functions on a row's way"], *NAMES.get("calls with compression", ())]
    way = {name.split(":")[1] for name in ran}
    yield from (f"a row does not meet {name}" for name in step.get("way", ()) if name not in way)
    for path, (text, names) in texts().items():
        for pattern in step.get("names", ()):
            yield from (f"{path} has the name {name}" for name in names if re.fullmatch(pattern, name))
        for pattern in step.get("words", ()):
            yield from (f"{path} says {word.group()}" for word in re.finditer(pattern, text, re.IGNORECASE))


def show(by_package: dict[str, tuple[int, int]], counts: dict[str, int], *, names: bool) -> None:
    for name in sorted({*by_package, *HOUSE["packages"]}):
        (lines, files), budget = by_package.get(name, (0, 0)), HOUSE["packages"].get(name, (0, 0))
        print(f"{lines:7,} lines {files:4} files   of {budget[0]:6,} {budget[1]:3}  kafka_sink/{name}")
    for name, number in counts.items():
        budget = f"   of {HOUSE['total'][name]:,}" if name in HOUSE["total"] else ""
        print(f"{number:7,} {name}{budget}")
        if names:
            print(*(f"          {one}" for one in NAMES.get(name, ())), sep="\n")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--step", type=int, nargs="*", default=[], help="steps whose checks must hold")
    parser.add_argument("--names", action="store_true", help="print what was counted, too")
    parser.add_argument("--quiet", action="store_true", help="print failures only")
    arguments = parser.parse_args()
    by_package = packages()
    counts = {
        "lines": lines_of(PACKAGE),
        "files": sum(files for _, files in by_package.values()),
        "page": lines_of(PACKAGE, "*.html"),
        "lines of coordinator": lines_of(PACKAGE / "coordinator"),
    }
    counts |= source() | containers() | bands() | tests() | docs() | row_way()
    if not arguments.quiet:
        show(by_package, counts, names=arguments.names)
    failed = [
        f"step {number}: {failure}"
        for number in arguments.step
        for failure in failures(HOUSE["steps"][str(number)], counts)
    ]
    print(*failed, sep="\n", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
