"""docs/options.md is what the table says, and the table is what Kafka's producer says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kafka_sink.local_broker import LocalBroker
from kafka_sink.options import unsupported
from kafka_sink.options.migration import fate, migration
from kafka_sink.options.table import SPECS

ROOT = Path(__file__).resolve().parents[2]

# Ours alone: KAFKA-20576's option (not in 4.3), KIP-693's, the consumer's name for auto-creation, inert
# since Kafka 4.0.
NOT_IN_KAFKA = {
    "partitioner.spread.keys.when.muted",
    "buffer.memory.allocation.strategy",
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

LIST_CONFIGS = """
import org.apache.kafka.clients.producer.ProducerConfig;
import org.apache.kafka.common.config.ConfigDef;
public class ListConfigs {
  public static void main(String[] args) throws Exception {
    for (var field : ProducerConfig.class.getDeclaredFields()) {
      if (field.getType() != ConfigDef.class) continue;
      field.setAccessible(true);
      for (var key : ((ConfigDef) field.get(null)).configKeys().values()) {
        var value = key.defaultValue == ConfigDef.NO_DEFAULT_VALUE ? null : key.defaultValue;
        var text = value == null ? "" : value instanceof Class<?> type ? type.getName() : value.toString();
        System.out.println(key.name + "\\t" + text);
      }
    }
  }
}
"""


def test_page_is_current() -> None:
    made = subprocess.run(
        [sys.executable, "-m", "kafka_sink.options"], cwd=ROOT, check=True, capture_output=True, text=True
    )
    assert (ROOT / "docs" / "options.md").read_text() == made.stdout, (
        "run: python -m kafka_sink.options > docs/options.md"
    )


def test_the_page_for_moving_jobs_is_current() -> None:
    assert (ROOT / "docs" / "migration.md").read_text() == migration(), "run: make docs"


@pytest.fixture(scope="module")
def kafka_configs(broker: LocalBroker, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Names and defaults of all options of the real producer, as text."""
    source = tmp_path_factory.mktemp("java") / "ListConfigs.java"
    source.write_text(LIST_CONFIGS)
    command = [broker.java, "-cp", broker.classpath, str(source)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(line.split("\t") for line in done.stdout.splitlines())


def test_every_producer_option_of_kafka_has_its_place(kafka_configs: dict[str, str]) -> None:
    ours = {spec.name.removeprefix("kafka.") for spec in SPECS if spec.name.startswith("kafka.")}
    places = [ours, set(unsupported.WITHOUT_EFFECT), set(unsupported.REFUSED)]
    assert sum(map(len, places)) == len(set().union(*places)), "an option stands in two places"
    assert set().union(*places) - NOT_IN_KAFKA == set(kafka_configs)


def test_the_page_for_moving_jobs_has_every_option_of_kafkas_producer(
    kafka_configs: dict[str, str],
) -> None:
    page = migration()
    for name in kafka_configs:
        assert f"| `{name}` | {fate(name)} |" in page, name


def test_defaults_called_kafkas_are_kafkas(kafka_configs: dict[str, str]) -> None:
    for spec in SPECS:
        name = spec.name.removeprefix("kafka.")
        if name in kafka_configs and not spec.required:
            shown = "" if spec.kafka_default in (None, "") else spec.kind.show(spec.kafka_default)
            assert unsupported.same_setting(kafka_configs[name].strip("[]"), shown), name
    for name, (default, _) in unsupported.WITHOUT_EFFECT.items():
        if name in kafka_configs:
            assert unsupported.same_setting(kafka_configs[name].strip("[]"), default), name
    for name, (default, _) in unsupported.REFUSED.items():
        assert unsupported.same_setting(kafka_configs[name].strip("[]"), default), name
