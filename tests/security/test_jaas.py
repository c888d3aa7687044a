"""JAAS texts as Spark users have them: read as Java reads them, and never shown."""

from __future__ import annotations

import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_sink.errors import ConfigurationError
from kafka_sink.secret import Secret
from kafka_sink.security.jaas import parse_jaas
from tests.support.security.secured_broker import PASSWORD, jaas_quoted, plain_jaas

PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule"


def parsed(text: str) -> tuple[str, dict[str, str]]:
    module = parse_jaas(Secret(text))
    return module.name, {name: value.reveal() for name, value in module.options.items()}


def test_quotes_commas_backslashes_and_equals_signs_survive() -> None:
    assert parsed(plain_jaas("u,=", PASSWORD)) == (PLAIN, {"username": "u,=", "password": PASSWORD})
    assert parsed(f"kafkashaded.{PLAIN} required;") == (PLAIN, {})


REFUSED = [
    ("", "no login module"),
    ('username="u" password="hunter2";', "control flag"),
    (f"{PLAIN}", "control flag"),
    (f'{PLAIN} username="u" password="hunter2";', "control flag"),
    (f'{PLAIN} required username="u" password="hunter2"', "semicolon"),
    (f"{PLAIN} required hunter2@x;", "first one"),
    (f"{PLAIN} required password=hunter2@x;", "after password"),
    (f"{PLAIN} required username=u password=9hunter2;", "after username"),
    (f'{PLAIN} required username="u" password="x"hunter2";', "after password"),
    (f'{PLAIN} required username="u" password="x"hunter2="y" z;', "number 4"),
    (f'{PLAIN} required username="u" password="x"hunter2="y"', "semicolon"),
    (f'{PLAIN} required a="1"; {PLAIN} required a="hunter2";', "2 login modules"),
    ("= required;", "does not begin"),
]


@pytest.mark.parametrize(("text", "problem"), REFUSED)
def test_what_java_refuses_is_refused_and_never_shown(text: str, problem: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        parse_jaas(Secret(text))
    assert problem in str(caught.value)
    assert "hunter2" not in str(caught.value)
    for frame, _ in traceback.walk_tb(caught.value.__traceback__):
        if frame.f_code.co_filename.endswith("security/jaas.py") and "tests" not in frame.f_code.co_filename:
            assert "hunter2" not in repr(frame.f_locals)


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_quoted_pair_comes_back(user: str, password: str) -> None:
    clean = [text.replace("\n", " ").replace("\r", " ") for text in (user, password)]
    text = f"{PLAIN} required u={jaas_quoted(clean[0])} p={jaas_quoted(clean[1])};"
    assert parsed(text)[1] == {"u": clean[0], "p": clean[1]}
