"""Pages as a reader tries them: in a new environment with the page's own line for pip, one block after
another. Then the rows must be in Kafka. ``make matrix`` tries the calls of spark-3.5.md on PySpark 3.5.
"""

from __future__ import annotations

import code
import json
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from types import CodeType

import pytest

from local_kafka import LocalBroker
from tests.support.commands import run
from tests.support.http_server import Server
from tests.support.page_environment import ROOT, blocks, make_environment
from tests.support.topics import read_to_end, read_topic

_SERVERS = "127.0.0.1:9092"
Reader = Callable[..., str]


@pytest.fixture
def read(broker: LocalBroker, project_environment: dict[str, str], tmp_path: Path) -> Reader:
    """Runs a page's blocks as one program, on this broker, and returns what they print.

    ``changes``: texts of the page and what stands in their place, such as the name of a topic that only this
    page uses.
    """

    def run_page(name: str, changes: dict[str, str] | None = None, end: str = "") -> str:
        page = ROOT / name
        python = make_environment(page, tmp_path / "environment")
        code = "\n\n".join(blocks(page, "python"))
        assert _SERVERS in code
        for old, new in {_SERVERS: broker.bootstrap_servers, **(changes or {})}.items():
            assert old in code, old
            code = code.replace(old, new)
        script = tmp_path / "page.py"
        script.write_text(code + end, encoding="utf-8")
        # Spark's workers must find their Python as the page says.
        unset = ("PYTHONPATH", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON")
        environ = {name: value for name, value in project_environment.items() if name not in unset}
        return run([python, script], environ, folder=tmp_path).stdout

    return run_page


class Prompt(code.InteractiveConsole):
    """Python's prompt, which runs nothing."""

    def runcode(self, code: CodeType) -> None:
        pass

    def showsyntaxerror(self, *_: object, **__: object) -> None:
        raise AssertionError(f"the prompt refuses {self.buffer[-1]!r}")


@pytest.mark.parametrize("page", ["README", "docs/quickstart", "docs/how-to", "docs/arrow", "docs/spark-3.5"])
def test_blocks_can_be_pasted_at_the_prompt(page: str) -> None:
    """Catches: a statement directly after the body of a ``with`` or ``for``."""
    for block in blocks(ROOT / f"{page}.md", "python"):
        prompt = Prompt()
        waits = [prompt.push(line) for line in [*block.splitlines(), ""]]
        assert not waits[-1], block


def test_the_readme_runs(read: Reader, broker: LocalBroker) -> None:
    topic = f"greetings-{uuid.uuid4().hex[:8]}"
    printed = read("README.md", {"greetings": topic})
    assert sorted(re.findall(rf"^{topic} \d (.*)$", printed, re.MULTILINE)) == [
        "b'alice' b'hello'",
        "b'bob' b'hi'",
    ]
    found = sorted((row.key, row.value) for row in read_topic(broker, topic))
    assert found == [(b"alice", b"hello")] * 2 + [(b"bob", b"hi")] * 2 + [(b"carol", b"good morning")]


def test_the_quickstart_runs(read: Reader, broker: LocalBroker) -> None:
    printed = read("docs/quickstart.md", {'"orders"': '"quick-orders"', '"ticks"': '"quick-ticks"'})
    assert len(re.findall(r"^\d \d+ b'\d+' b'\{", printed, re.MULTILINE)) == 5
    assert len(read_topic(broker, "quick-orders")) == 100_000
    assert read_topic(broker, "quick-ticks")


def test_how_to_page_runs(read: Reader, broker: LocalBroker) -> None:
    with Server() as catalogue:
        read("docs/how-to.md", {"http://127.0.0.1:5000": catalogue.url})
        ((method, path, _, body),) = catalogue.requests
    orders = read_topic(broker, "orders")
    assert sum(row.headers == (("source", b"shop"),) for row in orders) == 1_000
    assert sum(b'"timestamp"' in (row.value or b"") for row in orders) == 100, "the stream's rows"
    assert sum(len(read_topic(broker, f"orders-{number}")) for number in range(3)) == 1_000
    assert len(read_topic(broker, "wide")) == 1_000
    assert len(read_topic(broker, "orders-dead-letters")) == 1
    # A stream, and a job whose second run is skipped.
    ledger = read_to_end(broker.bootstrap_servers, "ledger")
    assert len(ledger) == 100 + 1_000
    assert len(read_topic(broker, "orders-by-sql")) == 100
    assert (method, path) == ("POST", "/api/v1/lineage")
    event = json.loads(body)
    assert event["eventType"] == "COMPLETE"
    assert event["job"] == {"namespace": "default", "name": "orders.to_kafka"}
    assert event["outputs"] == [{"namespace": f"kafka://{broker.bootstrap_servers}", "name": "orders"}]
    # What OpenLineage's schema requires.
    assert {"eventTime", "producer", "schemaURL"} <= event.keys()
    assert uuid.UUID(event["run"]["runId"]).version == 5


def test_the_page_on_spark_3_5_runs(read: Reader, broker: LocalBroker) -> None:
    printed = read("docs/spark-3.5.md")
    assert "1000 rows acknowledged, 0 skipped" in printed
    assert len(read_topic(broker, "orders-by-function")) == 1_000
    assert {b"0", b"99"} <= set(read_to_end(broker.bootstrap_servers, "orders-once"))


def test_the_page_on_arrow_runs(read: Reader, broker: LocalBroker) -> None:
    topic = f"arrow-page-{uuid.uuid4().hex[:8]}"
    printed = read("docs/arrow.md", {'"topic": "orders"': f'"topic": "{topic}"'})
    # The broker's own number of partitions.
    values = read_to_end(broker.bootstrap_servers, topic)
    assert values.count(b'{"customer":"alice","total":12.5}') == 1
    # From DuckDB, and once more by the version.
    assert sum(value.startswith(b'{"id":') for value in values) == 2 * 10_000
    assert sum(value.isdigit() for value in values) == 10_000
    assert values.count(b"from pandas") == values.count(b"event 2") == values.count(b"request 9") == 1
    assert "10000 0 True" in printed


def test_the_page_on_circuit_breaker_classes_runs(read: Reader, broker: LocalBroker) -> None:
    topic = f"measured-{uuid.uuid4().hex[:8]}"
    prefix = '"kafka.producer.circuit.breaker'
    changes = {
        '"measured"': f'"{topic}"',
        # Every attempt is slow, so that the class is seen to mute a partition of the write.
        f'{prefix}.slow.ms": "200",': f'{prefix}.slow.ms": "-1", {prefix}.slow.count": "1",',
        "        return True\n": '        print("muting", topic_partition)\n        return True\n',
    }
    printed = read("docs/circuit-breaker.md", changes).splitlines()
    assert printed[:2] == ["muted orders-3: the last of 3 slow attempts took 250 ms", "muting orders-3"]
    assert any(line.startswith(f"muting {topic}-") for line in printed)
    assert "1000 rows written" in printed
    assert len(read_to_end(broker.bootstrap_servers, topic)) == 1_000
