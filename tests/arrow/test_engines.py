"""The sinks for Ray Data and Daft, with the real libraries where they are installed (``make engines``).

Brokers are scripted, so the engines' own processes write over sockets of this host.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kafka_sink.arrow.many_writers import ManyWriters
from kafka_sink.errors import ConfigurationError
from tests.support.fake_broker import FakeCluster
from tests.support.scripted_cluster import TOPIC, rows, written

HAS_RAY = importlib.util.find_spec("ray") is not None
HAS_DAFT = importlib.util.find_spec("daft") is not None
LETTERS = "letters"
PASSWORD = "a password that nobody may see"


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster({TOPIC: 1, LETTERS: 1}) as running:
        yield running


def options(cluster: FakeCluster, report: Path, **more: object) -> dict[str, object]:
    return {
        "kafka.bootstrap.servers": cluster.bootstrap_servers,
        "topic": TOPIC,
        "delivery.report.path": str(report),
        **more,
    }


def numbered(count: int, refused: int = 0) -> list[dict[str, Any]]:
    """Rows, of which the last ``refused`` can never be written."""
    return [
        {"value": f"<{number}>", "partition": -1 if number >= count - refused else 0}
        for number in range(count)
    ]


def assert_told(report: Path, count: int) -> None:
    """One line for all tasks."""
    (line,) = map(json.loads, report.read_text().splitlines())
    assert sum(one["rows"] for one in line["partitions"]) == count


@pytest.mark.skipif(not HAS_RAY, reason="ray is not installed")
@pytest.mark.filterwarnings("ignore")  # those of Ray about itself
def test_ray_data(cluster: FakeCluster, tmp_path: Path) -> None:
    import ray

    from kafka_sink.arrow.ray import KafkaDatasink

    ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
    try:
        tolerant = {"errors.tolerance": "all", "errors.deadletterqueue.topic.name": LETTERS}
        sink = KafkaDatasink(options(cluster, tmp_path / "report", **tolerant))
        ray.data.from_items(numbered(1_000, refused=3)).repartition(3).write_datasink(sink)
        with pytest.raises(Exception, match="unsupported type"):
            ray.data.from_items([{"value": 1.5}]).write_datasink(
                KafkaDatasink(options(cluster, tmp_path / "r"))
            )
    finally:
        ray.shutdown()
    assert sink.written is not None
    assert (sink.written.rows, sink.written.skipped, sink.written.dead_letters) == (997, 3, 3)
    assert sorted(written(cluster)) == list(range(997))
    assert_told(tmp_path / "report", 1_000)


@pytest.mark.skipif(not HAS_DAFT, reason="daft is not installed")
def test_daft(cluster: FakeCluster, tmp_path: Path) -> None:
    import daft

    from kafka_sink.arrow.daft import KafkaSink

    tolerant = {"errors.tolerance": "all", "errors.deadletterqueue.topic.name": LETTERS}
    sink = KafkaSink(options(cluster, tmp_path / "report", **tolerant))
    found = daft.from_pylist(numbered(1_000, refused=3)).write_sink(sink).to_pydict()
    assert found == {"rows": [997], "skipped": [3], "dead_letters": [3]}
    assert sorted(written(cluster)) == list(range(997))
    assert_told(tmp_path / "report", 1_000)
    with pytest.raises(Exception, match="unsupported type"):
        daft.from_pydict({"value": [1.5]}).write_sink(KafkaSink(options(cluster, tmp_path / "r")))


@pytest.mark.parametrize(
    "refused",
    [{"delivery.guarantee": "exactly-once"}, {"max.rows.per.second": 7}, {"max.bytes.per.second": 7}],
)
def test_what_only_one_process_can_do_is_refused(refused: dict[str, object]) -> None:
    given = {"kafka.bootstrap.servers": "h:1", "topic": "t", **refused}
    with pytest.raises(ConfigurationError, match=r"supported in Ray Data.*Use Spark"):
        ManyWriters(given, "Ray Data")


def test_tasks_report_and_the_driver_sums_up(
    cluster: FakeCluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writers = ManyWriters(options(cluster, tmp_path / "report"), "Ray Data")
    writers.start(rows(0, 0).schema)
    results = [writers.write([rows(0, 3), rows(3, 2)]), writers.write([pa.table(rows(5, 5))])]
    assert not (tmp_path / "report").read_text()
    found = writers.end(results)
    assert found.rows == 10
    assert found.offsets == {(TOPIC, 0): ((0, 9),)}
    assert_told(tmp_path / "report", 10)
    assert caplog.text.count("10 rows acknowledged in t (1 partition) by 2 tasks") == 1


def test_columns_that_a_format_makes_a_value_of_may_start(cluster: FakeCluster, tmp_path: Path) -> None:
    """Catches: a demand for a column 'value' where each row is encoded."""
    given = {"value.format": "json", "schema.registry.url": "http://127.0.0.1:1"}
    writers = ManyWriters(options(cluster, tmp_path / "report", **given), "Ray Data")
    writers.start(pa.schema([("id", pa.int64())]))


def test_no_password_is_shown() -> None:
    login = {
        "kafka.security.protocol": "SASL_SSL",
        "kafka.sasl.mechanism": "PLAIN",
        "kafka.sasl.username": "u",
    }
    given = {"kafka.bootstrap.servers": "h:1", "topic": "t", **login, "kafka.sasl.password": PASSWORD}
    assert PASSWORD not in repr(vars(ManyWriters(given, "Daft")))
