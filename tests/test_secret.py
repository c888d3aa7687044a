"""The secrets of this process are hidden in the texts of others, and errors are one line."""

from __future__ import annotations

import gc
import json
import pickle
import struct
from urllib.parse import quote, quote_plus

import pytest

from kafka_sink.errors import (
    BrokersUnreachableError,
    ConfigurationError,
    KafkaSinkError,
    MetadataTimeoutError,
    RegistryError,
    SchemaError,
)
from kafka_sink.network.authentication import decode_authenticate
from kafka_sink.options import parse
from kafka_sink.printable import printable, printable_list
from kafka_sink.secret import Secret, redacted
from kafka_sink.security.settings import SecuritySettings

TEXT = "p@ss/w'ö\"rd+7 %\\x"
FORMS = {
    "plain": TEXT,
    "URL-quoted": quote(TEXT, safe=""),
    "path-quoted": quote(TEXT),
    "form-quoted": quote_plus(TEXT),
    "JSON": json.dumps(TEXT)[1:-1],
    "JSON of Unicode": json.dumps(TEXT, ensure_ascii=False)[1:-1],
}


def hides(text: str) -> bool:
    return redacted(text) != text


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_secret_is_hidden_in_a_text_that_repeats_it(form: str) -> None:
    secret, longer = Secret.known(TEXT), Secret.known(f"user:{TEXT}")
    said = f"Illegal header value b'Bearer {form}'; {form}"
    hidden = "Illegal header value b'Bearer [hidden]'; [hidden]"
    assert printable(said) == hidden
    assert str(SchemaError(said)) == str(RegistryError(said)) == hidden
    assert printable_list(["a", form, "b"]) == "a, [hidden], b"
    assert form[:-1] not in printable("x" * 290 + form), "nor its beginning, where the text is cut"
    assert redacted(f"user:{TEXT}") == "[hidden]", "the longer one first"
    assert not hides(TEXT[:-1])
    assert secret
    assert longer


@pytest.mark.parametrize("kind", [KafkaSinkError, SchemaError, MetadataTimeoutError, BrokersUnreachableError])
def test_message_of_every_error_is_one_printable_line(kind: type[KafkaSinkError]) -> None:
    """Catches: names in a registered schema forged lines of a log and cleared terminals."""
    error = kind("no type\n26/01/01 ERROR forged\x1b[2J\u202e" + "x" * 100_000)
    for shown in (error, pickle.loads(pickle.dumps(error))):
        assert str(shown).isprintable()
        assert len(str(shown)) == 10_000
    assert str(kind()) == ""


def test_a_secret_is_known_as_long_as_it_lives_and_wherever_it_was_sent() -> None:
    one, other = Secret.known(TEXT), Secret.known(TEXT)
    assert one == other
    del one
    gc.collect()
    assert hides(TEXT), "the equal one"
    sent = pickle.dumps(other)
    del other
    gc.collect()
    assert not hides(TEXT)
    received = pickle.loads(sent)
    assert hides(TEXT)
    assert received.reveal() == TEXT


def test_texts_of_which_it_is_not_known_whether_they_are_secret_hide_nothing() -> None:
    assert not hides(f"{Secret('kafka').reveal()} is no secret here")
    assert not hides(f"{Secret.known('abc').reveal()} is in too many texts")
    copy = pickle.loads(pickle.dumps(Secret("kafka")))
    assert not copy.is_known
    assert not hides("kafka")


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


def test_option_that_cannot_be_encoded_is_refused_and_not_shown() -> None:
    """Catches: a password that is not UTF-8 ended in a UnicodeEncodeError whose arguments held it."""
    for name in SECRETS:
        with pytest.raises(ConfigurationError, match=r"is not valid Unicode") as caught:
            parse({**LOGIN, name: "s3cret\udce9"})
        assert name in str(caught.value)
        assert caught.value.__context__ is None


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n"])
def test_the_line_end_of_a_mounted_secret_is_dropped(end: str) -> None:
    options = parse({**LOGIN, "kafka.sasl.password": f"secret{end}"}).options
    assert options.sasl_password == Secret("secret")
    sasl = of_jaas(f'username="u" password="secret{end.encode("unicode_escape").decode()}"').sasl
    assert sasl is not None
    assert sasl.password == Secret("secret")


def test_the_parts_of_options_that_are_secret_are_known() -> None:
    options = parse({**LOGIN, "kafka.sasl.password": TEXT}).options
    assert hides(TEXT)
    message = f"no such user or password: {TEXT}".encode()
    payload = bytes(4) + struct.pack(">hh", 58, len(message)) + message + bytes(4)
    assert decode_authenticate(0, payload).error_message == "no such user or password: [hidden]"
    assert options.sasl_password
    fields = 'username="user-name" password="jaas-secret"'
    settings = of_jaas(fields)
    assert hides(fields.split('"')[3])
    assert not hides("user-name")
    assert settings
