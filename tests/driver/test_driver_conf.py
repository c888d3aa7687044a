"""How many tasks run at once, and which secret options Spark would show, from Spark's settings."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from kafka_sink import spark_application
from kafka_sink.driver import driver_conf
from kafka_sink.driver.driver_conf import (
    REDACTION_DEFAULTS,
    REDACTION_SETTING,
    UNKNOWN,
    redaction_regex,
    redaction_warning,
    shown_by_spark,
    spark_conf,
    tasks_of,
)
from kafka_sink.options.table import SPECS
from kafka_sink.spark_application import SparkApplication, planning_for


def test_tasks_of_a_configuration() -> None:
    yarn = {"spark.master": "yarn", "spark.executor.instances": "5"}
    limited = {"spark.dynamicAllocation.maxExecutors": "3", "spark.task.cpus": "2"}
    for conf, expected in (
        ({"spark.master": "local"}, 1),
        ({"spark.master": "local[3]"}, 3),
        ({"spark.master": "local[3,4]"}, 3),
        ({"spark.master": "local[*]"}, os.cpu_count()),
        ({"spark.master": "spark://h:7077"}, UNKNOWN),
        ({"spark.master": "spark://h:7077", "spark.cores.max": "12"}, 12),
        ({**yarn, "spark.executor.cores": "4"}, 20),
        (yarn, 5),
        ({"spark.master": "k8s://x", **limited}, 1),
        ({"spark.cores.max": "nonsense"}, UNKNOWN),
        ({}, UNKNOWN),
    ):
        assert tasks_of(conf) == expected, conf


def test_sparks_configuration_is_read_as_spark_reads_it(tmp_path: Path) -> None:
    (tmp_path / "spark-defaults.conf").write_text(
        "# a comment\n\nspark.driver.host  from.defaults\nspark.kafka-chunked.coordinator.port=7\n"
        "spark.kafka-chunked.coordinator.enabled : false\nspark.hadoop.secret hidden\n"
    )
    of_file = {
        "spark.driver.host": "from.defaults",
        "spark.kafka-chunked.coordinator.port": "7",
        "spark.kafka-chunked.coordinator.enabled": "false",
    }
    environ = {"SPARK_CONF_DIR": str(tmp_path)}
    assert spark_conf(["java"], environ) == of_file
    (tmp_path / "conf").mkdir()
    other = tmp_path / "other.properties"
    other.write_text("spark.driver.bindAddress=0.0.0.0\n")
    named = ["java", "--properties-file", str(other)]
    assert spark_conf(named, environ) == {"spark.driver.bindAddress": "0.0.0.0"}
    given = ["java", "-Dspark.driver.host=a", "-Dother=b", "X", "--conf", "spark.driver.host=c", "--conf=x=y"]
    assert spark_conf(given, environ) == {**of_file, "spark.driver.host": "c"}
    assert spark_conf([], {"SPARK_HOME": "/nowhere"}) == {}


KEY = "-----BEGIN PRIVATE KEY-----"
DOCUMENTED = Path(__file__).parents[2] / "docs" / "security.md"


def test_the_expression_covers_every_secret_option_by_its_name() -> None:
    """Catches: a private key in a StreamingQueryException in spite of the documented expression."""
    for name in (name for spec in SPECS if spec.secret for name in (spec.name, *spec.aliases)):
        assert re.search(redaction_regex(), name)
        assert re.search(redaction_regex(), name.lower())
    assert f"\nspark.redaction.regex={redaction_regex()}\n" in DOCUMENTED.read_text(encoding="utf-8")
    assert redaction_regex().startswith(REDACTION_DEFAULTS[REDACTION_SETTING] + "|")
    hidden = [spec.name for spec in SPECS if not spec.secret and re.search(redaction_regex(), spec.name)]
    default = re.compile(REDACTION_DEFAULTS[REDACTION_SETTING])
    assert [name for name in hidden if not default.search(name)] == []


def test_secrets_that_spark_would_show_are_found_by_name_and_value() -> None:
    given = {
        "kafka.ssl.Keystore.Key": KEY,
        "kafka.ssl.key.pem": KEY,
        "kafka.sasl.password": "p",
        "kafka.ssl.truststore.certificates": "-----BEGIN CERTIFICATE-----",
        "topic": "t",
        # Spark looks at values, too: it hides this one for the word in it.
        "kafka.sasl.jaas.config": 'PlainLoginModule required username="u" password="p";',
    }
    assert shown_by_spark(given, {}) == ["kafka.ssl.key.pem", "kafka.ssl.keystore.key"]
    assert shown_by_spark(given, {REDACTION_SETTING: redaction_regex()}) == []
    narrower = shown_by_spark(given, {REDACTION_SETTING: "secret"})
    assert "kafka.sasl.password" in narrower
    assert shown_by_spark(given, {"spark.sql.redaction.options.regex": "(?i)key"}) == []
    assert shown_by_spark(given, {REDACTION_SETTING: "(?<n>Java"}) == [], "nothing is known"
    line = redaction_warning(["kafka.ssl.keystore.key"])
    setting = f"spark.redaction.regex={redaction_regex()}"
    for part in ("'kafka.ssl.keystore.key'", "kafka.ssl.keystore.location", setting):
        assert part in line


def test_a_secret_option_that_spark_would_show_is_warned_of_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches: a private key that stands in exceptions, plans and the event log, without a word about it."""
    conf = {"spark.redaction.regex": "(?i)keystore"}
    with planning_for(SparkApplication(str(tmp_path), os.getpid(), conf)):
        driver_conf.warn_of_shown_secrets({"kafka.ssl.keystore.key": "k", "topic": "t"})
        assert caplog.messages == [], "the session's expression covers it"
        spark_application.forget("secrets checked")
        for _ in range(2):
            driver_conf.warn_of_shown_secrets({"kafka.sasl.password": "hunter2", "topic": "t"})
    (line,) = caplog.messages
    assert "'kafka.sasl.password'" in line
    assert "hunter2" not in line


def test_an_idle_timeout_that_ends_tasks_before_the_sink_can_say_why_is_warned_of() -> None:
    sql, core = "spark.sql.execution.pyspark.udf.", "spark.python.worker."
    for prefix, timeout, kills, warns in (
        (sql, None, None, False),
        (sql, "60", None, False),
        (sql, "60", "true", True),
        (core, "1min", "true", True),
        (core, "120s", "True", True),
        (sql, "121", "true", False),
        (sql, "0", "true", False),
        (core, "60", "false", False),
        (core, "soon", "true", False),
    ):
        conf = {f"{prefix}idleTimeoutSeconds": timeout, f"{prefix}killOnIdleTimeout": kills}
        line = driver_conf.idle_timeout_problem(conf.get, 120_000)
        assert (line is not None) is warns, conf
        if line is not None:
            assert "kafka.delivery.timeout.ms" in line
            assert "idleTimeoutSeconds" in line
