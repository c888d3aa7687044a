"""Parses the login module in ``sasl.jaas.config`` as Kafka's Java client does.

Java splits the text with a StreamTokenizer. A word starts with a letter, ``_`` or ``$`` and continues with
letters, digits, ``.`` and ``-``. A value with any other character is quoted with ``"`` or ``'``. Backslash
escapes within quotes are those of Java's string literals. A slash outside of quotes begins a comment.
Source: ``org.apache.kafka.common.security.JaasConfig`` of kafka-clients 4.3, ``StreamTokenizer`` of Java.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kafka_sink.errors import ConfigurationError
from kafka_sink.options.unsupported import SHADED
from kafka_sink.secret import Secret

_FLAGS = ("required", "requisite", "sufficient", "optional")
_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_ESCAPE = re.compile(r"\\([0-3][0-7]{0,2}|[4-7][0-7]?|[\s\S])")
# The end of a line also closes a quoted text. A comment without an end reaches to the end of the text.
_TOKEN = re.compile(
    r"""[\x00-\x20]+ | /\*.*?(?:\*/|\Z) | /[^\n\r]*
    | (?P<quote>["']) (?P<quoted>(?: \\. | \\\Z | (?!(?P=quote))[^\\\n\r] )*) (?P=quote)?
    | (?P<word>[A-Za-z_$\u00a0-\U0010ffff] [A-Za-z_$\u00a0-\U0010ffff0-9.-]*)
    | (?P<number>[0-9.]+)
    | (?P<symbol>.)""",
    re.VERBOSE | re.DOTALL,
)
JAAS = "Option 'kafka.sasl.jaas.config'"
_EXAMPLE = (
    'as in: org.apache.kafka.common.security.plain.PlainLoginModule required username="u" password="p";'
)


@dataclass(frozen=True)
class LoginModule:
    """A login module: its class without Databricks' prefix, and its options, whose values may be secret."""

    name: str
    options: dict[str, Secret]

    def get(self, name: str) -> str:
        """Return an option's value, or "" if it is not set."""
        return self.options[name].reveal() if name in self.options else ""


# A word or quoted text is a Secret, any other character is a str.
_Token = Secret | str


def parse_jaas(config: Secret) -> LoginModule:
    """Return the only login module. Raises ConfigurationError, whose text contains no option's value."""
    tokens = _tokens(config.reveal())
    modules = []
    at = 0
    while at < len(tokens):
        module, at = _entry(tokens, at)
        modules.append(module)
    if len(modules) != 1:
        count = f"{len(modules)} login modules" if modules else "no login module"
        raise ConfigurationError(f"{JAAS} has {count} instead of one, {_EXAMPLE}")
    return modules[0]


def _entry(tokens: list[_Token], at: int) -> tuple[LoginModule, int]:
    module = tokens[at]
    if not isinstance(module, Secret):
        raise ConfigurationError(f"{JAAS} does not begin with a login module, {_EXAMPLE}")
    flag = tokens[at + 1] if at + 1 < len(tokens) else ""
    if not isinstance(flag, Secret) or flag.reveal().lower() not in _FLAGS:
        raise ConfigurationError(
            f"{JAAS} lacks the control flag after the login module ({', '.join(_FLAGS)}), {_EXAMPLE}"
        )
    at += 2
    options: dict[str, Secret] = {}
    while at < len(tokens) and tokens[at] != ";":
        name, equals, value = (*tokens[at : at + 3], "", "")[:3]
        if not isinstance(name, Secret) or equals != "=" or not isinstance(value, Secret):
            valid = len(options)
            # Neither the message nor this frame may show texts: what is read as a name may be the end of a
            # password that contains a quote.
            options.clear()
            raise ConfigurationError(
                f'{JAAS}: the text after {valid} valid options of the login module is not name="value". '
                "Quote values, and put a backslash before each quote and backslash inside them"
            )
        options[name.reveal()] = value
        at += 3
    if at >= len(tokens):
        options.clear()
        raise ConfigurationError(f"{JAAS} does not end with a semicolon, {_EXAMPLE}")
    return LoginModule(module.reveal().removeprefix(SHADED), options), at + 1


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    for match in _TOKEN.finditer(text):
        if match["quote"]:
            tokens.append(Secret(_ESCAPE.sub(_unescaped, match["quoted"])))
        elif match["word"]:
            tokens.append(Secret(match["word"]))
        elif match["number"] or match["symbol"]:
            # Java parses a number as such, without a text.
            tokens.append(match["symbol"] or "0")
    return tokens


def _unescaped(escape: re.Match[str]) -> str:
    char = escape[1]
    return chr(int(char, 8)) if char[0] in "01234567" else _ESCAPES.get(char, char)
