"""docs/how-to.md, spark-3.5.md and quickstart.md: every Python block runs, in order, on a real broker."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from local_kafka import LocalBroker
from tests.support.http_server import Server
from tests.support.lent_spark import lent
from tests.support.topics import read_to_end, read_topic
from tests.support.waiting import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DOCS = Path(__file__).resolve().parents[2] / "docs"


def blocks(page: str) -> list[tuple[str, str]]:
    text = (DOCS / page).read_text(encoding="utf-8")
    found = []
    for section in re.split(r"^##? ", text, flags=re.MULTILINE)[1:]:
        heading = section.splitlines()[0]
        found += [(heading, code) for code in re.findall(r"```python\n(.*?)```", section, re.DOTALL)]
    return found


@pytest.fixture
def catalogue() -> Iterator[Server]:
    with Server() as server:
        yield server


def test_every_block_runs(spark: SparkSession, broker: LocalBroker, catalogue: Server) -> None:
    names: dict[str, Any] = {"spark": spark, "servers": broker.bootstrap_servers, "catalogue": catalogue.url}
    for heading, code in blocks("how-to.md"):
        exec(compile(code, f"how-to.md: {heading}", "exec"), names)
    # Ends the admin client, which would miss its broker.
    names.clear()
    orders = read_topic(broker, "orders")
    assert sum(row.headers == (("source", b"shop"),) for row in orders) == 1_000
    assert sum(len(read_topic(broker, f"orders-{number}")) for number in range(3)) == 1_000
    assert len(read_topic(broker, "wide")) == 1_000
    assert len(read_topic(broker, "orders-dead-letters")) == 1
    ((method, path, _, body),) = catalogue.requests
    assert (method, path) == ("POST", "/api/v1/lineage")
    event = json.loads(body)
    assert event["eventType"] == "COMPLETE"
    assert event["job"] == {"namespace": "default", "name": "orders.to_kafka"}
    assert event["outputs"] == [{"namespace": f"kafka://{broker.bootstrap_servers}", "name": "orders"}]
    # What OpenLineage's schema requires.
    assert {"eventTime", "producer", "schemaURL"} <= event.keys()
    assert uuid.UUID(event["run"]["runId"]).version == 5


def test_the_page_on_spark_3_5_runs(spark: SparkSession, broker: LocalBroker) -> None:
    """On the PySpark at hand; ``make matrix`` tries the calls on 3.5."""
    names: dict[str, Any] = {"spark": spark, "servers": broker.bootstrap_servers}
    for heading, code in blocks("spark-3.5.md"):
        exec(compile(code, f"spark-3.5.md: {heading}", "exec"), names)
    until(lambda: names["query"].lastProgress is not None, names["query"].exception, within_s=120)
    names["query"].stop()
    assert len(read_topic(broker, "orders-by-function")) == 1_000
    # Brokers write the markers of a commit after their response to it.
    until(lambda: {b"0", b"99"} <= set(read_to_end(broker.bootstrap_servers, "orders-once")), poll_s=0.1)


def test_the_quickstart_runs(spark: SparkSession, broker: LocalBroker, live_view_port: int) -> None:
    names: dict[str, Any] = {}
    with lent(spark):
        for heading, code in blocks("quickstart.md"):
            here = code.replace("127.0.0.1:9092", broker.bootstrap_servers)
            here = here.replace('"topic", "orders"', '"topic", "quick-orders"').replace(
                '(["orders"])', '(["quick-orders"])'
            )
            here = here.replace('"ui.port", "0"', f'"ui.port", "{live_view_port}"')
            exec(compile(here, f"quickstart.md: {heading}", "exec"), names)
    assert len(read_topic(broker, "quick-orders")) == 100_000
