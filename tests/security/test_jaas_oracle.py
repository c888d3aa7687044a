"""The same texts read by Kafka's own client: the same modules and options, or refused by both."""

from __future__ import annotations

import base64
import random
import subprocess
from pathlib import Path

from kafka_sink.errors import ConfigurationError
from kafka_sink.secret import Secret
from kafka_sink.security.jaas import parse_jaas
from local_kafka import LocalBroker
from tests.security.test_jaas import REFUSED
from tests.support.security.secured_broker import PASSWORD, jaas_quoted, plain_jaas

SOURCE = Path(__file__).parents[1] / "support" / "security" / "JaasOracle.java"
MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"
PIECES = (
    *(MODULE, " required ", " optional ", "a", "b=", "c = ", '"x y"', "'q'", "word", "9", "1.5", "-", "-a"),
    *([";", ",", "=", "/", "//", "/*", "*/", "\\", '"', "'", "\\n", "ü", "€", "$", "_", ".", "@", "#"]),
    *('"\\""', " ", "\n", "\t", "\x01", '"\\101\\7\\400"', "user-name", "a.b", "k=v", 'k="v"'),
)

# What users have written, and what the grammar allows.
TAKEN = (
    f"{MODULE} REQUIRED username='a\"b' password=\"it's\";",
    f'{MODULE} required\n  a="1"\n  b = word ;\n',
    f'{MODULE} required a="x\\ty\\101\\7z\\q\\"";',
    f"{MODULE} required a=b-c.d_e$9;",
    f"/* note */ {MODULE} required // a comment\n a='//no' b=\"/*no*/\";",
    f'{MODULE} required a="" a="2";',
    f'{MODULE} required a="ü€";',
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
        f"{MODULE} required;",
        "",
        ";",
        f"{MODULE} required a={jaas_quoted('')};",
        *TAKEN,
        *(text for text, _ in REFUSED),
    ]
    for _ in range(3000):
        middle = "".join(chosen.choice(PIECES) for _ in range(chosen.randrange(1, 9)))
        made.append(f"{MODULE} required {middle};" if chosen.random() < 0.8 else middle)
    return made


def test_every_text_is_read_as_kafkas_client_reads_it(broker: LocalBroker) -> None:
    given = texts()
    command = [broker.java, "-cp", broker.classpath, str(SOURCE)]
    lines = "\n".join(map(encoded, given)) + "\n"
    done = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = done.stdout.splitlines()
    assert len(theirs) == len(given)
    different = [
        (text, mine, its) for text, its in zip(given, theirs, strict=True) if (mine := ours(text)) != its
    ]
    assert different == []
    assert sum(line != "refused" for line in theirs) > 50
