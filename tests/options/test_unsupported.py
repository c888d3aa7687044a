"""Options that are not ours: without effect, not supported, unknown, misspelt, without prefix."""

from __future__ import annotations

import pytest

from kafka_sink.errors import ConfigurationError
from kafka_sink.options import parse, unsupported
from kafka_sink.options.parse import KAFKA_NAMES
from kafka_sink.options.table import SPECS

SERVERS = {"kafka.bootstrap.servers": "localhost:9092"}
SECRET = "hunter2-do-not-show"
# What must not go without its prefix.
_GUARDED = {name for name in KAFKA_NAMES if name.startswith(("ssl.", "sasl.", "transactional."))}
_GUARDED |= {
    name.removeprefix("kafka.")
    for spec in SPECS
    for name in (spec.name, *spec.aliases)
    if name.startswith("kafka.")
}


def error_of(raw: dict[str, str]) -> str:
    with pytest.raises(ConfigurationError) as caught:
        parse({**SERVERS, **raw})
    return str(caught.value)


def test_options_of_the_java_client_share_one_warning_unless_they_ask_for_nothing() -> None:
    raw = {"kafka.interceptor.classes": "a.B", "kafka.metric.reporters": SECRET}
    (warning,) = parse({**SERVERS, **raw, "kafka.metrics.num.samples": "3"}).warnings
    assert "kafka.interceptor.classes, kafka.metric.reporters, kafka.metrics.num.samples" in warning
    assert SECRET not in warning
    known = {**unsupported.WITHOUT_EFFECT, **unsupported.NOT_SUPPORTED}
    raw = {f"kafka.{name}": default for name, (default, _) in known.items() if "serializer" not in name}
    raw |= {"kafka.security.protocol": "plaintext", "kafka.ssl.enabled.protocols": "TLSv1.2, TLSv1.3"}
    assert parse({**SERVERS, **raw}).warnings == ()


def test_unsupported_options_name_themselves_and_hide_their_value() -> None:
    for name in (*unsupported.NOT_SUPPORTED, "config.providers.file.class"):
        message = error_of({f"kafka.{name}": SECRET})
        assert f"Option 'kafka.{name}'" in message
        assert SECRET not in message
    # Spark's sink refuses the option itself, not a value of it.
    for name in ("key.serializer", "value.serializer"):
        assert error_of({f"kafka.{name}": ""}).startswith(
            f"Option 'kafka.{name}' is not supported: remove it"
        )


def test_misspelt_option_of_this_sink_is_an_error() -> None:
    """Catches: a warning among hundreds of lines, and a job at least once, or without a limit."""
    for name, meant in {
        "kafka.linger": "kafka.linger.ms",
        "kafka.compresion.type": "kafka.compression.type",
        "kafka.max.in.flight.requests": "kafka.max.in.flight.requests.per.connection",
        "kafka.bootstrap.server": "kafka.bootstrap.servers",
        "kafka.sasl.jaas.cfg": "kafka.sasl.jaas.config",
        "kafka.topic": "topic",
        "delivery.guarante": "delivery.guarantee",
        "deliveryGuarantee": "delivery.guarantee",
        "errors.tolerence": "errors.tolerance",
        "max.rows.per.secnd": "max.rows.per.second",
        "tpoic": "topic",
        "txnVersoin": "txnVersion",
        "kafak.acks": "kafka.acks",
        "kafka_bootstrap_servers": "kafka.bootstrap.servers",
        "kafka.queue.buffering.max.ms": "kafka.linger.ms",
        "kafka.message.max.bytes": "kafka.max.request.size",
    }.items():
        message = error_of({name: SECRET})
        assert message.startswith(f"Unknown option '{name.lower()}' (did you mean '{meant}'?)")
        assert SECRET not in message
    assert error_of({"kafka.zzzzqqq": "1"}) == "Unknown option 'kafka.zzzzqqq'"


def test_options_of_a_kafka_source_are_ignored_with_one_warning() -> None:
    """Catches: "did you mean 'kafka.transaction.timeout.ms'?" for the session timeout of a consumer."""
    shared = {
        "kafka.session.timeout.ms": "45000",
        "kafka.group.id": SECRET,
        "kafka.interceptor.classes": "a.B",
    }
    (warning,) = parse({**SERVERS, **shared}).warnings
    assert warning == (
        "These Kafka options have no effect on this sink: kafka.group.id, kafka.interceptor.classes, "
        "kafka.session.timeout.ms"
    )


def test_unknown_and_unsupported_options_are_reported_in_one_error() -> None:
    """Catches: a migrated job that failed once for each of its options."""
    raw = {"kafka.linger": "5", "kafka.zzz.yyy": SECRET, "errors.tolerence": "all", "acks": "1"}
    assert error_of({**raw, "kafka.partitioner.class": "a.B"}) == (
        "Unknown options 'kafka.linger' (did you mean 'kafka.linger.ms'?), 'kafka.zzz.yyy', "
        "'errors.tolerence' (did you mean 'errors.tolerance'?); "
        "Option 'acks' has no effect without the prefix 'kafka.': write 'kafka.acks'; "
        "Option 'kafka.partitioner.class' selects a Java class, which this sink cannot run: compute the "
        "partition in a column 'partition' instead"
    )


def test_other_unknown_options_share_one_warning() -> None:
    raw = {"metrics.num.samples": SECRET, "somethingelse": "1", "retires": "3"}
    (warning,) = parse({**SERVERS, **raw}).warnings
    assert warning == (
        "Unknown options are ignored: metrics.num.samples (did you mean 'kafka.metrics.num.samples'?), "
        "retires (did you mean 'kafka.retries'?), somethingelse"
    )


def test_no_option_of_spark_or_kafka_is_taken_for_a_misspelt_one() -> None:
    """Jobs share their options between a source and this sink."""
    of_sources = (
        *("subscribe", "subscribePattern", "startingOffsets", "endingOffsets", "failOnDataLoss"),
        *("maxOffsetsPerTrigger", "minPartitions", "groupIdPrefix", "includeHeaders"),
        *("fetchOffset.numRetries", "mergeSchema", "compression", "partitionOverwriteMode", "truncate"),
        *(name for name in KAFKA_NAMES if name not in _GUARDED),
    )
    parse({**SERVERS, **dict.fromkeys(of_sources, "1")})
    # Options that Spark itself adds cause no warning either.
    assert parse({**SERVERS, "checkpointLocation": "/y", "queryName": "q"}).warnings == ()


def test_a_path_is_ignored_with_a_warning() -> None:
    """Catches: .save("orders"), which wrote to another topic without a word about "orders"."""
    (warning,) = parse({**SERVERS, "path": "orders"}).warnings
    assert warning.startswith("The path of save() or start() is ignored")


def test_an_option_of_kafka_without_its_prefix_is_an_error() -> None:
    """Catches: a job with Kafka's default of acks or compression.type, as by Spark's own sink."""
    for name in _GUARDED:
        message = error_of({name: SECRET})
        assert message == f"Option '{name}' has no effect without the prefix 'kafka.': write 'kafka.{name}'"
