"""producer.circuit.breaker.class: what is wrong with it shows at planning, with the reason."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from pyspark.sql.types import StringType, StructField, StructType

from kafka_sink.breaker import FailureRateCircuitBreaker, PartitionCircuitBreaker
from kafka_sink.breaker.interface import load_breaker
from kafka_sink.errors import ConfigurationError
from kafka_sink.options import parse
from kafka_sink.spark.datasource import KafkaChunkedDataSource
from tests.support.breaker_cluster import IdleBreaker

PREFIX = "kafka.producer.circuit.breaker."


class Own(IdleBreaker):
    """Mutes nothing; refuses one setting."""

    def configure(self, configs: Mapping[str, str]) -> None:
        if "bad" in configs:
            raise ValueError("bad is not good")
        self.configs = dict(configs)


class Unfinished(PartitionCircuitBreaker):
    pass


class Demanding(Own):
    """Cannot be made without arguments."""

    def __init__(self, needed: int) -> None:
        self.needed = needed


class Leaving(Own):
    """Ends the process that configures it."""

    def configure(self, configs: Mapping[str, str]) -> None:
        sys.exit("cannot work like this")


def made() -> Own:
    """No class, though it gives one."""
    return Own()


def load(**options: str) -> PartitionCircuitBreaker | None:
    named = {PREFIX + name.replace("_", "."): text for name, text in options.items()}
    return load_breaker(parse({"kafka.bootstrap.servers": "b:1", **named}).options)


def test_the_default_class_and_none() -> None:
    assert isinstance(load(), FailureRateCircuitBreaker)
    assert load(**{"class": "none"}) is load(**{"class": "None"}) is None


def test_an_own_class_gets_its_options_and_may_refuse_them() -> None:
    with pytest.raises(ConfigurationError, match="bad is not good"):
        load(**{"class": f"{__name__}.Own", "bad": "1"})
    found = load(**{"class": f"{__name__}.Own", "my_option": "7"})
    assert isinstance(found, Own)
    assert found.configs == {
        "my.option": "7",
        "max.in.flight.requests.per.connection": "5",
        "request.timeout.ms": "30000",
    }


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("off", "must be a dotted path such as package.module.Class, or none, got 'off'"),
        ("no.such.module.Class", r"module 'no\.such\.module' cannot be imported: ModuleNotFoundError"),
        (f"{__name__}.Absent", "has no class 'Absent'"),
        ("kafka_sink.model.Node", "is not a subclass of"),
        (f"{__name__}.Unfinished", "cannot be configured: TypeError"),
        (f"{__name__}.Demanding", "cannot be configured: TypeError.*needed"),
        (f"{__name__}.Leaving", "cannot be configured: SystemExit.*cannot work like this"),
        (f"{__name__}.made", "is not a subclass of"),
        (f"{__name__}.Own.configure", "cannot be imported: ModuleNotFoundError"),
        (".Own", "must be a dotted path"),
        ("kafka_sink..Own", "cannot be imported"),
        ("kafka_sink.model.", "has no class ''"),
        ("kafka_sink.breaker.PartitionCircuitBreaker", "cannot be configured: TypeError"),
    ],
)
def test_a_bad_class_is_named_with_the_reason(path: str, reason: str) -> None:
    pattern = rf"kafka\.producer\.circuit\.breaker\.class.*{reason}"
    with pytest.raises(ConfigurationError, match=pattern) as raised:
        load(**{"class": path})
    # Whole, as the user wrote it: not the module alone.
    assert f"'{path}'" in str(raised.value)


@pytest.mark.parametrize(
    "body", ["import sys; sys.exit('not here')", "raise RuntimeError('not here')", "1 +"]
)
def test_a_module_that_cannot_be_imported_says_why(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: planning that ends without an error message, as the module ends the process."""
    name = f"breaker_of_{len(body)}"
    (tmp_path / f"{name}.py").write_text(body)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigurationError, match=rf"module '{name}' cannot be imported: .*(not here|syntax)"):
        load(**{"class": f"{name}.Own"})


@pytest.mark.parametrize(
    ("option", "text", "reason"),
    [
        ("mute.retry.interval", "0", "out of bounds"),
        ("mute.retry.interval", "5", "a probe needs a round trip, got '5'"),
        ("muted.buffer.memory.perc", "half", "not a whole number"),
        ("trigger.message.cuont", "1", "did you mean"),
    ],
)
def test_planning_fails_for_bad_options(option: str, text: str, reason: str) -> None:
    source = KafkaChunkedDataSource({"kafka.bootstrap.servers": "b:1", "topic": "t", PREFIX + option: text})
    schema = StructType([StructField("value", StringType())])
    with pytest.raises(ConfigurationError, match=reason):
        source.writer(schema, overwrite=False)
