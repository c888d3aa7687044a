"""No text of another in which a secret of this process occurs is shown."""

from __future__ import annotations

import base64
import gc
import html
import json
import pickle
import struct
from urllib.parse import quote, quote_plus

import pytest

from kafka_sink.errors import ConfigurationError
from kafka_sink.network.authentication import decode_authenticate
from kafka_sink.options import parse
from kafka_sink.printable import printable, printable_list
from kafka_sink.secret import Secret, repeats_secret
from kafka_sink.security.settings import SecuritySettings

TEXT = "p@ss/w'ö\"rd+7 %\\x"
SHOWN = "[hidden: it repeats a secret]"


def basic(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


FORMS = {
    "plain": TEXT,
    "among others": f"Illegal header value b'Bearer {TEXT}'",
    "URL-quoted": quote(TEXT, safe=""),
    "path-quoted": f"https://h/{quote(TEXT)}",
    "form-quoted": quote_plus(TEXT),
    "quoted in lower case": quote_plus(TEXT).lower().replace("p%40ss", "p%40ss"),
    "base64": basic(TEXT),
    "base64 for URLs": base64.urlsafe_b64encode(TEXT.encode()).decode().rstrip("="),
    **{f"base64 behind {count} bytes": f"Basic {basic('u' * count + ':' + TEXT)}" for count in range(4)},
    "base64 before others": basic(f"me:{TEXT}, and more"),
    "base64 of the quoted": basic(f"me:{quote_plus(TEXT)}"),
    "base64 in lines": base64.encodebytes(f"{'u' * 70}:{TEXT}".encode()).decode(),
    "quoted base64": quote_plus(basic(TEXT)),
    "JSON": json.dumps({"error": TEXT}),
    "JSON of Unicode": json.dumps({"error": TEXT}, ensure_ascii=False),
    "Python's representation": repr(TEXT),
    "bytes": repr(TEXT.encode()),
    "HTML": html.escape(TEXT),
}


def test_a_text_that_repeats_a_secret_is_not_shown() -> None:
    secret = Secret.known(TEXT)
    for name, form in FORMS.items():
        assert printable(form) == SHOWN, name
        assert printable(f"{'x' * 290}{form}") == SHOWN, f"{name}: nor its beginning"
        assert printable_list(["a", form, "b"]) == f"a, {SHOWN}, b", name
    assert not repeats_secret(TEXT[:-1])
    assert printable("a broker's text") == "a broker's text"
    assert secret


def test_a_secret_is_known_as_long_as_it_lives_and_wherever_it_was_sent() -> None:
    one, other = Secret.known(TEXT), Secret.known(TEXT)
    assert one == other
    del one
    gc.collect()
    assert repeats_secret(TEXT), "the equal one"
    sent = pickle.dumps(other)
    del other
    gc.collect()
    assert not repeats_secret(TEXT)
    received = pickle.loads(sent)
    assert repeats_secret(TEXT)
    assert received.reveal() == TEXT


def test_texts_of_which_it_is_not_known_whether_they_are_secret_hide_nothing() -> None:
    assert not repeats_secret(f"{Secret('kafka').reveal()} is no secret here")
    assert not repeats_secret(f"{Secret.known('abc').reveal()} is in too many texts")
    copy = pickle.loads(pickle.dumps(Secret("kafka")))
    assert not copy.is_known
    assert not repeats_secret("kafka")


MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"
LOGIN = {
    "kafka.bootstrap.servers": "b:9093",
    "kafka.security.protocol": "SASL_SSL",
    "kafka.sasl.mechanism": "PLAIN",
    "kafka.sasl.username": "u",
}
SECRETS = [
    "kafka.sasl.password",
    "kafka.ssl.key.password",
    "kafka.ssl.keystore.password",
    "kafka.sasl.oauthbearer.client.credentials.client.secret",
    "schema.registry.basic.auth.user.info",
    "schema.registry.bearer.auth.token",
    "schema.registry.bearer.auth.client.secret",
]


def test_a_line_end_inside_of_a_secret_is_refused() -> None:
    """It would end a header, and HTTP clients put the whole header into their error."""
    for name in SECRETS:
        with pytest.raises(ConfigurationError, match="has a line end inside") as caught:
            parse({**LOGIN, name: "one\ntwo"})
        assert name in str(caught.value)
        assert "two" not in str(caught.value)
    with pytest.raises(ConfigurationError, match=r"jaas\.config.*: password has a line end inside"):
        of_jaas('username="u" password="secret\\nmore"')


def of_jaas(fields: str) -> SecuritySettings:
    given = {**LOGIN, "kafka.sasl.jaas.config": f"{MODULE} required {fields};"}
    del given["kafka.sasl.username"]
    return SecuritySettings.from_options(parse(given).options)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"])
def test_the_line_end_of_a_mounted_secret_is_dropped(end: str) -> None:
    options = parse({**LOGIN, "kafka.sasl.password": f"secret{end}"}).options
    assert options.sasl_password == Secret("secret")
    sasl = of_jaas(f'username="u" password="secret{end.encode("unicode_escape").decode()}"').sasl
    assert sasl is not None
    assert sasl.password == Secret("secret")


def test_the_parts_of_options_that_are_secret_are_known() -> None:
    options = parse({**LOGIN, "kafka.sasl.password": TEXT}).options
    assert repeats_secret(TEXT)
    message = f"no such user or password: {TEXT}".encode()
    payload = bytes(4) + struct.pack(">hh", 58, len(message)) + message + bytes(4)
    assert decode_authenticate(0, payload).error_message == SHOWN, "a broker repeats it"
    assert options.sasl_password
    fields = 'username="user-name" password="jaas-secret"'
    settings = of_jaas(fields)
    assert repeats_secret(fields.split('"')[3])
    assert not repeats_secret("user-name")
    assert settings
