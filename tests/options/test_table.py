"""docs/options.md is what the table says, and the table is what Kafka's producer says."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from kafka_sink.options import unsupported
from kafka_sink.options.table import SPECS
from tests.support.kafka_names import KafkaNames
from tools.options_page import document

ROOT = Path(__file__).resolve().parents[2]

# Ours alone: KIP-1332's option (KAFKA-20576) and KIP-1123's, which are not in 4.3, KIP-693's,
# the consumer's name for auto-creation, inert since Kafka 4.0.
NOT_IN_KAFKA = {
    "partitioner.spread.keys.when.muted",
    "buffer.memory.allocation.strategy",
    "client.rack",
    "partitioner.rack.aware",
    "allow.auto.create.topics",
    "auto.include.jmx.reporter",
    # librdkafka's names, and the two that Spark users of PLAIN and SCRAM know from it.
    "ssl.ca.location",
    "ssl.key.location",
    "ssl.certificate.location",
    "enable.ssl.certificate.verification",
    "sasl.username",
    "sasl.password",
}
# Java waits for a token without a limit.
TIME_OUTS_THAT_KAFKA_LACKS = {"sasl.login.connect.timeout.ms", "sasl.login.read.timeout.ms"}


def test_page_is_current() -> None:
    assert (ROOT / "docs" / "options.md").read_text() == document(), "run: make docs"


def test_every_producer_option_of_kafka_has_its_place(names: KafkaNames) -> None:
    ours = {spec.name.removeprefix("kafka.") for spec in SPECS if spec.name.startswith("kafka.")}
    places = [ours, set(unsupported.WITHOUT_EFFECT), set(unsupported.NOT_SUPPORTED)]
    assert sum(map(len, places)) == len(set().union(*places)), "an option is in two places"
    # A newer jar may bring some of them.
    assert set().union(*places) - (NOT_IN_KAFKA - set(names.options)) == set(names.options)


def test_the_page_has_every_option_of_kafkas_producer(names: KafkaNames) -> None:
    page = document()
    for name in names.options:
        assert f"`kafka.{name}`" in page, name


def test_the_page_for_moving_jobs_names_the_defaults_that_differ() -> None:
    page = (ROOT / "docs" / "migration.md").read_text()
    line = page.partition("These defaults differ from Kafka's: ")[2].partition(".\n")[0]
    differ = {spec.name.removeprefix("kafka.") for spec in SPECS if spec.differs and not spec.required}
    assert set(re.findall(r"`([a-z.]+\.[a-z]+)`", line)) == differ - TIME_OUTS_THAT_KAFKA_LACKS


def test_defaults_called_kafkas_are_kafkas(names: KafkaNames) -> None:
    for spec in SPECS:
        name = spec.name.removeprefix("kafka.")
        if name in names.options and not spec.required:
            shown = "" if spec.kafka_default in (None, "") else spec.kind.show(spec.kafka_default)
            assert unsupported.same_setting(names.options[name], shown), name
    for name, (default, _) in unsupported.WITHOUT_EFFECT.items():
        if name in names.options:
            assert unsupported.same_setting(names.options[name], default), name
    for name, (default, _) in unsupported.NOT_SUPPORTED.items():
        assert unsupported.same_setting(names.options[name], default), name


def test_a_jar_that_brings_an_option_of_ours_breaks_no_page(names: KafkaNames) -> None:
    """KIP-1332's: Kafka's trunk has it with the default `full`."""
    newer = replace(names, options=names.options | {"buffer.memory.allocation.strategy": "full"})
    test_every_producer_option_of_kafka_has_its_place(newer)
    test_the_page_has_every_option_of_kafkas_producer(newer)
    test_defaults_called_kafkas_are_kafkas(newer)
