"""JAAS texts as Spark users have them: read as Kafka's own client reads them, and never shown."""

from __future__ import annotations

import base64
import random
import traceback
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kafka_sink.errors import ConfigurationError
from kafka_sink.secret import Secret
from kafka_sink.security.jaas import parse_jaas
from local_kafka import LocalBroker
from tests.support.commands import run
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
    (f"{PLAIN} required hunter2@x;", "after 0 valid"),
    (f"{PLAIN} required password=hunter2@x;", "after 1 valid"),
    (f"{PLAIN} required username=u password=9hunter2;", "after 1 valid"),
    (f'{PLAIN} required username="u" password="x"hunter2";', "after 2 valid"),
    (f'{PLAIN} required username="u" password="x"hunter2="y" z;', "after 3 valid"),
    (f'{PLAIN} required username="u" password="x"hunter2="y"', "semicolon"),
    (f'{PLAIN} required a="1"; {PLAIN} required a="hunter2";', "2 login modules"),
    ("= required;", "does not begin"),
]


def test_invalid_jaas_text_is_refused_and_never_shown() -> None:
    for text, problem in REFUSED:
        with pytest.raises(ConfigurationError) as caught:
            parse_jaas(Secret(text))
        assert problem in str(caught.value)
        assert "hunter2" not in str(caught.value)
        frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
        shown = [
            one.f_locals for one in frames if one.f_code.co_filename.endswith("kafka_sink/security/jaas.py")
        ]
        assert shown
        assert "hunter2" not in repr(shown)


@given(st.text(max_size=40), st.text(max_size=40))
def test_any_quoted_pair_comes_back(user: str, password: str) -> None:
    clean = [text.replace("\n", " ").replace("\r", " ") for text in (user, password)]
    text = f"{PLAIN} required u={jaas_quoted(clean[0])} p={jaas_quoted(clean[1])};"
    assert parsed(text)[1] == {"u": clean[0], "p": clean[1]}


# -- by Kafka's own client ---------------------------------------------------------------------------

SOURCE = Path(__file__).parents[1] / "support" / "security" / "JaasOracle.java"
PIECES = (
    *(PLAIN, " required ", " optional ", "a", "b=", "c = ", '"x y"', "'q'", "word", "9", "1.5", "-", "-a"),
    *([";", ",", "=", "/", "//", "/*", "*/", "\\", '"', "'", "\\n", "ü", "€", "$", "_", ".", "@", "#"]),
    *('"\\""', " ", "\n", "\t", "\x01", '"\\101\\7\\400"', "user-name", "a.b", "k=v", 'k="v"'),
)

# What users have written, and what the grammar allows.
TAKEN = (
    f"{PLAIN} REQUIRED username='a\"b' password=\"it's\";",
    f'{PLAIN} required\n  a="1"\n  b = word ;\n',
    f'{PLAIN} required a="x\\ty\\101\\7z\\q\\"";',
    f"{PLAIN} required a=b-c.d_e$9;",
    f"/* note */ {PLAIN} required // a comment\n a='//no' b=\"/*no*/\";",
    f'{PLAIN} required a="" a="2";',
    f'{PLAIN} required a="ü€";',
)


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def ours(text: str) -> str:
    try:
        module = parse_jaas(Secret(text))
    except ConfigurationError:
        return "refused"
    pairs = sorted((name, value.reveal()) for name, value in module.options.items())
    return " ".join([encoded(module.name), *(f"{encoded(name)}={encoded(value)}" for name, value in pairs)])


def texts() -> list[str]:
    chosen = random.Random(7)
    made = [
        plain_jaas("u", PASSWORD),
        "",
        ";",
        f"{PLAIN} required;",
        f"{PLAIN} required a={jaas_quoted('')};",
    ]
    made += [*TAKEN, *(text for text, _ in REFUSED)]
    for _ in range(3000):
        middle = "".join(chosen.choice(PIECES) for _ in range(chosen.randrange(1, 9)))
        made.append(f"{PLAIN} required {middle};" if chosen.random() < 0.8 else middle)
    return made


def test_every_text_is_read_as_kafkas_client_reads_it(broker: LocalBroker) -> None:
    given = texts()
    lines = "\n".join(map(encoded, given)) + "\n"
    theirs = run([broker.java, "-cp", broker.classpath, SOURCE], given=lines).stdout.splitlines()
    assert len(theirs) == len(given)
    mine = list(map(ours, given))
    assert [one for one in zip(given, mine, theirs, strict=True) if one[1] != one[2]] == []
    assert sum(line != "refused" for line in theirs) > 50
