"""The examples without Spark, on a real broker. The blocks of docs/arrow.md: tests/project/test_pages.py."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path

from local_kafka import LocalBroker
from tests.support.commands import run
from tests.support.topics import read_topic

ROOT = Path(__file__).resolve().parents[2]


def example(name: str, environment: dict[str, str], folder: Path, *arguments: str) -> str:
    command = [sys.executable, ROOT / "examples" / name, *arguments]
    return run(command, environment, folder=folder).stdout


def test_polars_to_kafka_twice_and_a_service(
    broker: LocalBroker, project_environment: dict[str, str], tmp_path: Path
) -> None:
    topic = f"polars-{uuid.uuid4().hex[:8]}"
    of_both = project_environment, tmp_path, broker.bootstrap_servers
    first, again = (example("polars_to_kafka.py", *of_both, topic) for _ in range(2))
    assert first == f"100,000 orders are in {topic}, in 4 partition(s).\n"
    assert again == f"{topic} has the orders of this day already.\n"
    topic = f"service-{uuid.uuid4().hex[:8]}"
    printed = example("arrow_service.py", *of_both, topic, "1")
    rows = read_topic(broker, topic)
    assert f"{len(rows):,} readings in all, none lost" in printed
    assert {row.key for row in rows} == {b"sensor-%d" % number for number in range(4)}
