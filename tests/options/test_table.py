"""docs/options.md has the table's facts, a text for each option, and all that Kafka's producer has."""

from __future__ import annotations

import re
from pathlib import Path

from kafka_sink.options.table import SPECS
from tests.support.kafka_names import KafkaNames
from tools.options_page import document

ROOT = Path(__file__).resolve().parents[2]

# Java waits for a token without a limit.
TIME_OUTS_THAT_KAFKA_LACKS = {"sasl.login.connect.timeout.ms", "sasl.login.read.timeout.ms"}


def test_page_is_current() -> None:
    page = (ROOT / "docs" / "options.md").read_text()
    assert page == document(), "run: make docs"
    assert not re.search(r"\. $", page, re.MULTILINE), "write a text for each option"


def test_the_page_has_every_option_of_kafkas_producer(names: KafkaNames) -> None:
    page = document()
    for name in names.options:
        assert f"`kafka.{name}`" in page, name


def test_the_page_for_moving_jobs_names_the_defaults_that_differ() -> None:
    page = (ROOT / "docs" / "migration.md").read_text()
    line = page.partition("These defaults differ from Kafka's: ")[2].partition(".\n")[0]
    differ = {spec.name.removeprefix("kafka.") for spec in SPECS if spec.differs and not spec.required}
    assert set(re.findall(r"`([a-z.]+\.[a-z]+)`", line)) == differ - TIME_OUTS_THAT_KAFKA_LACKS


def test_attributes_are_the_names_without_prefix() -> None:
    """Messages make the one of the other."""
    for spec in SPECS:
        plain = spec.name.removeprefix("kafka.").replace(".", "_")
        assert spec.attribute == re.sub(r"(?<=[a-z])([A-Z])", r"_\1", plain).lower()
