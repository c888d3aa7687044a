"""Which secret options Spark would show, and the expression that hides them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kafka_sink.options import redaction
from kafka_sink.options.table import SPECS

KEY = "-----BEGIN PRIVATE KEY-----"
NAMES = [name for spec in SPECS if spec.secret for name in (spec.name, *spec.aliases)]
DOCUMENTED = Path(__file__).parents[2] / "docs" / "security.md"


@pytest.mark.parametrize("name", NAMES)
def test_the_expression_covers_every_secret_option_by_its_name(name: str) -> None:
    """Catches: a private key in a StreamingQueryException in spite of the documented expression."""
    assert re.search(redaction.regex(), name)
    assert re.search(redaction.regex(), name.lower())


def test_the_expression_covers_what_sparks_own_does_and_nothing_that_is_not_secret() -> None:
    assert redaction.regex().startswith(redaction.DEFAULTS[redaction.SETTING] + "|")
    hidden = [spec.name for spec in SPECS if not spec.secret and re.search(redaction.regex(), spec.name)]
    default = re.compile(redaction.DEFAULTS[redaction.SETTING])
    assert [name for name in hidden if not default.search(name)] == []


def test_the_documentation_names_the_expression() -> None:
    assert f"\nspark.redaction.regex={redaction.regex()}\n" in DOCUMENTED.read_text(encoding="utf-8")


def test_what_spark_would_show_is_found_by_name_and_value() -> None:
    given = {
        "kafka.ssl.Keystore.Key": KEY,
        "kafka.ssl.key.pem": KEY,
        "kafka.sasl.password": "p",
        "kafka.ssl.truststore.certificates": "-----BEGIN CERTIFICATE-----",
        "topic": "t",
        # Spark looks at values, too: it hides this one for the word in it.
        "kafka.sasl.jaas.config": 'PlainLoginModule required username="u" password="p";',
    }
    assert redaction.shown_by_spark(given, {}) == ["kafka.ssl.key.pem", "kafka.ssl.keystore.key"]
    assert redaction.shown_by_spark(given, {redaction.SETTING: redaction.regex()}) == []
    narrower = redaction.shown_by_spark(given, {redaction.SETTING: "secret"})
    assert "kafka.sasl.password" in narrower
    assert redaction.shown_by_spark(given, {"spark.sql.redaction.options.regex": "(?i)key"}) == []
    assert redaction.shown_by_spark(given, {redaction.SETTING: "(?<n>Java"}) == [], "nothing is known"


def test_the_warning_names_the_option_the_setting_and_files() -> None:
    line = redaction.warning(["kafka.ssl.keystore.key"])
    for part in (
        "'kafka.ssl.keystore.key'",
        "kafka.ssl.keystore.location",
        f"spark.redaction.regex={redaction.regex()}",
    ):
        assert part in line
