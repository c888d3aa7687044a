"""Names that should be Kafka's, compared with kafka-clients: options, defaults, metrics, error codes."""

from __future__ import annotations

from dataclasses import replace

from kafka_sink.kafka_errors import ERRORS, error_of
from kafka_sink.options import parse, unsupported
from kafka_sink.options.table import SPECS, OptionSpec
from kafka_sink.options.values import KAFKA_PREFIX
from kafka_sink.task.producer import Producer
from tests.support.kafka_names import KafkaNames

# Options with the prefix that Kafka 4.4 does not have, and where their names come from. A later jar may.
_NOT_IN_THE_JAR = {
    "Kafka's consumer": ["allow.auto.create.topics"],
    "Kafka before 4.0": ["auto.include.jmx.reporter"],
    "KIP-1332 (KAFKA-20576), in Kafka's trunk": ["buffer.memory.allocation.strategy"],
    "KIP-526, before it became metadata.max.idle.ms": ["metadata.evict.ms"],
    "this sink": ["partitioner.spread.keys.when.muted"],
    "librdkafka": [
        *("enable.ssl.certificate.verification", "sasl.mechanisms", "sasl.username", "sasl.password"),
        *("sasl.oauthbearer.client.id", "sasl.oauthbearer.client.secret", "ssl.ca.location", "ssl.ca.pem"),
        *("ssl.certificate.location", "ssl.certificate.pem", "ssl.key.location", "ssl.key.pem"),
    ],
}
# Redpanda sends it in Produce responses, while a broker shuts down or a shard does not respond.
RETRIABLE_HERE_ONLY = {"BROKER_NOT_AVAILABLE"}
NOT_IN_THE_JAR = {name for names in _NOT_IN_THE_JAR.values() for name in names}
# Metrics that Kafka's producer does not have.
OUR_METRICS = {
    *("breaker-probes-total", "breaker-trips-total", "muted-partitions", "record-moved-total"),
    *("buffer-allocated-bytes", "buffer-allocated-bytes-max", "buffer-saved-bytes", "buffer-saved-bytes-max"),
    *("buffer-used-bytes", "buffer-used-bytes-max"),
    *("buffer-heap-bytes", "buffer-heap-bytes-max", "buffer-heap-bytes-total"),
}


def prefixed() -> list[OptionSpec]:
    return [spec for spec in SPECS if spec.name.startswith(KAFKA_PREFIX)]


def test_every_option_of_the_jar_is_known_and_no_other_claims_to_be_kafkas(names: KafkaNames) -> None:
    ours = {name.removeprefix(KAFKA_PREFIX) for spec in prefixed() for name in (spec.name, *spec.aliases)}
    places = [ours, set(unsupported.WITHOUT_EFFECT), set(unsupported.NOT_SUPPORTED)]
    known = set().union(*places)
    assert sum(map(len, places)) == len(known), "an option is in two places"
    assert {name for name in names.options if not name.startswith("internal.")} <= known
    # A newer jar may bring some of them.
    assert known - set(names.options) == NOT_IN_THE_JAR - set(names.options)
    assert known >= NOT_IN_THE_JAR


def test_options_of_the_consumer_and_admin_clients_are_all_known(names: KafkaNames) -> None:
    """Catches: a job whose options its Kafka source shares failed, one option per run."""
    others = {name for name in names.others - names.options.keys() if not name.startswith("internal.")}
    assert others - NOT_IN_THE_JAR == unsupported.OF_OTHER_CLIENTS


def test_defaults_that_are_called_kafkas_are(names: KafkaNames) -> None:
    found = {spec.name.removeprefix(KAFKA_PREFIX): _shown(spec) for spec in prefixed()}
    wanted = {name: default for name, default in names.options.items() if name in found}
    assert {name: found[name] for name in wanted} == wanted


def test_defaults_of_options_that_are_refused_or_without_effect(names: KafkaNames) -> None:
    found = {
        name: default
        for name, (default, _) in {**unsupported.NOT_SUPPORTED, **unsupported.WITHOUT_EFFECT}.items()
    }
    shared = found.keys() & names.options.keys() - {"key.serializer", "value.serializer"}
    assert [name for name in shared if not unsupported.same_setting(found[name], names.options[name])] == []


def _shown(spec: OptionSpec) -> str:
    default = spec.kafka_default if spec.differs else spec.default
    return "" if spec.required or default in (None, ()) else spec.kind.show(default)


def test_metrics_are_kafkas_or_ours(names: KafkaNames) -> None:
    producer = Producer(parse({"kafka.bootstrap.servers": "127.0.0.1:1"}).options)
    found = producer.metrics().keys()
    producer.close()
    assert found - names.metrics == OUR_METRICS


def test_error_codes_and_their_exceptions_are_javas(names: KafkaNames) -> None:
    """All of Java's codes: one that the table lacks counts as not retriable."""
    assert [error.name for error in ERRORS.values()] == [names.errors[code][0] for code in ERRORS]
    ours = {code: error_of(code) for code in names.errors}
    differing = {
        error.name
        for code, error in ours.items()
        if (error.retriable, error.is_of_metadata) != names.errors[code][1:]
    }
    assert differing == RETRIABLE_HERE_ONLY


def test_a_jar_that_brings_an_option_of_ours_breaks_no_check(names: KafkaNames) -> None:
    """KIP-1332's: Kafka's trunk has it with the default `full`."""
    newer = replace(names, options=names.options | {"buffer.memory.allocation.strategy": "full"})
    test_every_option_of_the_jar_is_known_and_no_other_claims_to_be_kafkas(newer)
    test_defaults_that_are_called_kafkas_are(newer)
    test_defaults_of_options_that_are_refused_or_without_effect(newer)
