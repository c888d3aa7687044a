"""Variables in option values."""

from __future__ import annotations

import pytest

from kafka_sink.errors import ConfigurationError
from kafka_sink.options.environment import expanded, has_variables


def test_variables_are_filled_in_wherever_they_are() -> None:
    environ = {"ZONE": "eu-1b", "POD": "7", "RAW": "\udcff"}
    assert expanded("o", "${env:ZONE}", environ) == "eu-1b"
    assert expanded("o", "app-${env:POD},ws_az=${env:ZONE}", environ) == "app-7,ws_az=eu-1b"
    assert expanded("o", "$ZONE ${ZONE} {env:ZONE}", environ) == "$ZONE ${ZONE} {env:ZONE}"
    assert expanded("o", "${env:RAW}", environ) == "\ufffd", "a request takes UTF-8"
    assert [has_variables(value) for value in ("a${env:B}", "${B}", "")] == [True, False, False]


def test_a_variable_that_is_not_set_is_empty_and_named_in_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for _ in range(2):
        assert expanded("kafka.client.id", "zone=${env:NO_ZONE}", {}) == "zone="
    (warning,) = caplog.messages
    assert warning.startswith("kafka.client.id=zone=${env:NO_ZONE}: this process has no environment variable")


def test_a_text_that_no_request_takes_is_refused_by_the_options_name() -> None:
    with pytest.raises(ConfigurationError, match=r"'kafka\.client\.id' has 40000 bytes"):
        expanded("kafka.client.id", "${env:LONG}", {"LONG": "x" * 40_000})
