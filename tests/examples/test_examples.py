"""Every example runs, and what it claims is looked up in Kafka.

They run in this process, on the Spark that all tests share. tests/project/test_packaging.py starts jobs with
``python`` and with ``spark-submit``.
"""

from __future__ import annotations

import ast
import json
import runpy
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.csv
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from local_kafka import LocalBroker
from local_kafka.schema_registry import LocalRegistry
from tests.support.lent_spark import lent
from tests.support.surroundings import Environ
from tests.support.topics import read_topic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


@pytest.fixture
def topic() -> str:
    return f"example-{uuid.uuid4().hex[:8]}"


Run = Callable[..., None]


@pytest.fixture
def run_here(spark: SparkSession) -> Run:
    """Runs a script with these arguments in this process."""

    def run(script: str, *arguments: str, with_packages: bool = True) -> None:
        path = str(EXAMPLES / script)
        with pytest.MonkeyPatch.context() as patch, lent(spark, with_packages=with_packages):
            patch.setattr(sys, "argv", [path, *arguments])
            runpy.run_path(path, run_name="__main__")

    return run


def test_flights_arrive_complete(
    broker: LocalBroker,
    run_here: Run,
    monkeypatch: pytest.MonkeyPatch,
    topic: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """10,000 of them; ``make demo`` takes all."""
    read_csv = pyarrow.csv.read_csv
    monkeypatch.setattr(pyarrow.csv, "read_csv", lambda *a, **named: read_csv(*a, **named).slice(0, 10_000))
    arguments = ["--topic", topic, "--bootstrap-servers", broker.bootstrap_servers]
    with pytest.raises(SystemExit) as ended:
        run_here("flights.py", *arguments)
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "Every row arrived exactly once, unchanged, in its key's order." in printed
    assert "0 missing, 0 doubled, 0 changed" in printed
    assert "all     10,000 " in printed


def test_streaming_and_spark_submit(broker: LocalBroker, run_here: Run, topic: str) -> None:
    """The stream goes on where it stopped."""
    for script, count in (("streaming.py", 2_500), ("spark_submit_job.py", 50_000)):
        run_here(script, broker.bootstrap_servers, f"{topic}-{count}")
        rows = read_topic(broker, f"{topic}-{count}")
        assert len({row.value for row in rows}) == len(rows) == count
    assert len({row.key for row in rows}) == 500


def test_many_topics_example_writes_each_country_to_its_topic(
    broker: LocalBroker, run_here: Run, topic: str
) -> None:
    run_here("many_topics.py", broker.bootstrap_servers, topic)
    for country in ("de", "fr", "it", "nl", "pl"):
        rows = read_topic(broker, f"{topic}-{country}")
        assert len({row.key for row in rows}) == len(rows) == 4_000
        assert {json.loads(row.value or b"")["country"] for row in rows} == {country}


def test_each_row_is_there_once_though_a_job_died(
    broker: LocalBroker, run_here: Run, topic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_here("exactly_once.py", broker.bootstrap_servers, topic)
    assert "readers see 1,500 payments, 1,500 of them exactly once." in capsys.readouterr().out
    run_here("long_job.py", broker.bootstrap_servers, f"{topic}-long")
    printed = capsys.readouterr().out
    assert "The first run died after 2 parts." in printed
    assert "readers see 20,000 orders, 20,000 of them exactly once." in printed


def test_a_frozen_broker_is_muted_and_no_row_is_lost(
    cluster3: LocalBroker,
    run_here: Run,
    monkeypatch: pytest.MonkeyPatch,
    live_view_port: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @contextmanager
    def lent_cluster(brokers: int) -> Iterator[LocalBroker]:
        assert brokers == 3
        yield cluster3
        cluster3.thaw(1)

    monkeypatch.setattr("local_kafka.LocalBroker", lent_cluster)
    run_here("frozen_broker.py", str(live_view_port), "9")
    printed = capsys.readouterr().out
    assert "Broker 1 is muted" in printed
    assert "\n0 rows were acknowledged meanwhile" not in printed
    assert "18,000 of 18,000 rows are in Kafka" in printed


def test_schema_registry(broker: LocalBroker, registry: LocalRegistry, run_here: Run, topic: str) -> None:
    run_here("schema_registry.py", broker.bootstrap_servers, registry.url, topic, with_packages=False)
    found: dict[int, list[Any]] = {}
    with SchemaRegistryClient({"url": registry.url}) as client:
        read = AvroDeserializer(client)
        key, value = (SerializationContext(topic, part) for part in (MessageField.KEY, MessageField.VALUE))
        for row in read_topic(broker, topic):
            found.setdefault(read(row.key, key)["id"], []).append(read(row.value, value))
        schema = json.loads(client.get_latest_version(f"{topic}-value").schema.schema_str or "")
        read_order = JSONDeserializer(None, schema_registry_client=client)
        context = SerializationContext(f"{topic}-orders", MessageField.VALUE)
        orders = {}
        for row in read_topic(broker, f"{topic}-orders"):
            order = read_order(row.value, context)
            assert row.key == order["customer"].encode()
            orders[order["order"]] = order["total"]
    assert (schema["name"], schema["namespace"]) == ("Envelope", "com.example.customers")
    ada = {"id": 1, "name": "Ada", "city": "London"}
    assert found[1] == [{"before": None, "after": ada, "op": "c"}]
    assert [event and event["op"] for event in found[3]] == ["d", None]
    assert orders == {number: number / 4 for number in range(5_000)}


def test_first_steps_in_a_notebook(
    broker: LocalBroker, spark: SparkSession, environ: Environ, live_view_port: int
) -> None:
    """Cells run in order, as IPython runs them; what a cell shows is the value of its last expression."""
    # The notebook unsets the second one.
    environ(KAFKA_BOOTSTRAP_SERVERS=broker.bootstrap_servers, PYSPARK_DRIVER_PYTHON=None)
    names: dict[str, Any] = {}
    with lent(spark):
        shown = [run_cell(code, names) for code in cells(live_view_port)]
    assert 100_000 in shown
    jobs = next(value for value in shown if isinstance(value, list))
    assert ("committed", ["first-steps"], 100_000) in jobs
    rows = read_topic(broker, "first-steps")
    assert len({row.value for row in rows}) == len(rows) == 100_000
    read = next(value for value in reversed(shown) if isinstance(value, list))
    assert len(read) == 5
    assert set(read) <= {(row.partition, row.key, row.value) for row in rows}


NOTEBOOK = json.loads((EXAMPLES / "first_steps.ipynb").read_text(encoding="utf-8"))


def cells(live_view_port: int) -> list[str]:
    code = ["".join(cell["source"]) for cell in NOTEBOOK["cells"] if cell["cell_type"] == "code"]
    return [source.replace("8090", str(live_view_port)) for source in code]


def run_cell(code: str, names: dict[str, Any]) -> object:
    statements = ast.parse(code)
    last = statements.body.pop() if isinstance(statements.body[-1], ast.Expr) else None
    exec(compile(statements, "first_steps.ipynb", "exec"), names)
    if last is None:
        return None
    assert isinstance(last, ast.Expr)
    return eval(compile(ast.Expression(last.value), "first_steps.ipynb", "eval"), names)


def test_the_notebook_is_stored_without_outputs() -> None:
    assert (NOTEBOOK["nbformat"], NOTEBOOK["nbformat_minor"]) == (4, 5)
    for cell in NOTEBOOK["cells"]:
        assert not cell["metadata"]
        if cell["cell_type"] == "code":
            assert (cell["execution_count"], cell["outputs"]) == (None, [])


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_each_example_says_how_to_run_it(script: Path) -> None:
    assert f"examples/{script.name}" in script.read_text(encoding="utf-8").split('"""')[1]
