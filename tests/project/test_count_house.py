"""What tools/count_house.py counts, and why a step's check fails."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import pytest

from tools import count_house


@pytest.fixture
def house(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script, for a project of two modules."""
    for name, folder in {"ROOT": "", "PACKAGE": "kafka_sink", "TESTS": "tests", "DOCS": "docs"}.items():
        (tmp_path / folder).mkdir(exist_ok=True)
        monkeypatch.setattr(count_house, name, tmp_path / folder)
    for name, text in {
        "kafka_sink/network/client.py": """
from kafka_sink.engine import sender
class Client:
    known: dict[int, str]
    def __init__(self):
        self._muted: set[TopicPartition] = set()
        self.view: Mapping[TopicPartition, int] = {}
    def close(self, how):
        self._selector.close(how)
""",
        "kafka_sink/engine/sender.py": "class Client:\n    def idle(self):\n        return None\n",
        "tests/engine/test_sender.py": """
from unittest.mock import patch
def test(monkeypatch):
    monkeypatch.chdir(sender._folder)
    patch.object(sender, "x")
""",
        "docs/design.md": "The `Client` speaks to a `PostBox`. It stood idle.\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    return count_house


def test_it_counts(house: ModuleType) -> None:
    counts = {**house.source(), **house.containers(), **house.bands(), **house.tests()}
    expected = {
        "classes": 2,
        "homonyms among classes": 1,
        "methods that only forward": 1,
        "empty methods outside protocols": 1,
        "containers keyed by broker": 1,
        "containers keyed by partition": 1,
        "imports against the bands": 1,
        "private accesses in tests": 1,
        "monkeypatches in tests": 2,
        "sleeps in tests": 0,
        "modules without a test of their name": 1,
    }
    assert {name: counts[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("step", "failure"),
    [
        ({"gone": ["kafka_sink/engine"]}, "kafka_sink/engine is still there"),
        ({"gone": ["kafka_sink/sender.py"]}, None),
        ({"at most": {"classes": 1}}, "2 classes, 1 at most"),
        ({"at most": {"classes": 2}}, None),
        ({"names": ["Post[A-Z]\\w+"]}, "docs/design.md has the name PostBox"),
        ({"names": ["def idle"]}, "kafka_sink/engine/sender.py has the name def idle"),
        ({"names": ["Post", "stood", "def time"]}, None),
        ({"words": ["\\bstood idle\\b"]}, "docs/design.md says stood idle"),
        ({"way": ["Client.close"]}, None),
        ({"way": ["Client.open"]}, "a row does not meet Client.open"),
    ],
)
def test_a_step_fails(house: ModuleType, step: dict[str, object], failure: str | None) -> None:
    house.NAMES["functions on a row's way"] = ["network/client:Client.close"]
    found = list(house.failures(step, {"classes": 2}))
    assert (not found) if failure is None else (len(found) == 1 and found[0].startswith(failure))


def test_frozen_dataclasses_named_tuples_and_sequences_are_values(house: ModuleType) -> None:
    source = """
@dataclass(frozen=True)
class A: ...
class B(NamedTuple): ...
class C(Sequence[int]): ...
class D: ...
"""
    assert [house.is_value(node) for node in ast.parse(source).body] == [True, True, True, False]
