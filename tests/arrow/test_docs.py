"""docs/arrow.md: every Python block runs, in order, against a real broker; and so do the examples."""

from __future__ import annotations

import re
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from local_kafka import LocalBroker
from tests.support.commands import run
from tests.support.topics import read_to_end, read_topic

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.usefixtures("in_tmp_path")
def test_every_block_of_the_page_runs(broker: LocalBroker, capsys: pytest.CaptureFixture[str]) -> None:
    topic = f"arrow-page-{uuid.uuid4().hex[:8]}"
    text = (ROOT / "docs" / "arrow.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", text, re.DOTALL)):
        here = code.replace("127.0.0.1:9092", broker.bootstrap_servers).replace(
            '"orders", "topic.c', f'"{topic}", "topic.c'
        )
        exec(compile(here, f"arrow.md, block {number}", "exec"), names)
    # The broker's own number of partitions.
    values = read_to_end(broker.bootstrap_servers, topic)
    assert values.count(b'{"customer":"alice","total":12.5}') == 1
    # From DuckDB, and once more by the version.
    assert sum(value.startswith(b'{"id":') for value in values) == 2 * 10_000
    assert sum(value.isdigit() for value in values) == 10_000
    assert values.count(b"from pandas") == values.count(b"event 2") == values.count(b"request 9") == 1
    assert "10000 0 True" in capsys.readouterr().out


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
