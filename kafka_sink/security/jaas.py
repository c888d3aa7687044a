"""Parses the login module in ``sasl.jaas.config`` as Kafka's Java client does.

Java splits the text with a StreamTokenizer. A word starts with a letter, ``_`` or ``$`` and continues with
letters, digits, ``.`` and ``-``. A value with any other character is quoted with ``"`` or ``'``. Backslash
escapes within quotes are those of Java's string literals. A slash outside of quotes begins a comment.
Source: ``org.apache.kafka.common.security.JaasConfig`` of kafka-clients 4.3, ``StreamTokenizer`` of Java.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

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
# Messages may show these names. Any other text in the place of a name may be part of a password.
_KNOWN_OPTIONS = (
    *("username", "password", "tokenauth", "clientId", "clientSecret", "scope", "serviceName"),
    *("principal", "keyTab", "useKeyTab", "awsProfileName", "awsRoleArn"),
)
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


@dataclass(frozen=True, slots=True)
class _Token:
    """A word or quoted text if ``text`` is not None, otherwise the single character ``symbol``."""

    text: str | None = field(repr=False)
    symbol: str = field(repr=False)


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
    name = tokens[at].text
    if name is None:
        raise ConfigurationError(f"{JAAS} does not begin with a login module, {_EXAMPLE}")
    flag = tokens[at + 1].text if at + 1 < len(tokens) else None
    if flag is None or flag.lower() not in _FLAGS:
        raise ConfigurationError(
            f"{JAAS} lacks the control flag after the login module ({', '.join(_FLAGS)}), {_EXAMPLE}"
        )
    at += 2
    options: dict[str, Secret] = {}
    while at < len(tokens) and tokens[at].symbol != ";":
        option = _option(tokens[at : at + 3])
        if option is None:
            # Do not show the text itself. It may be the end of a password that contains a quote, and the name
            # of the option before it may be another part of that password.
            last = next(reversed(options), "")
            known = f"after {last}" if last in _KNOWN_OPTIONS else f"number {len(options) + 1}"
            after = known if options else "the first one"
            last = ""
            options.clear()
            raise ConfigurationError(
                f'{JAAS}: an option of the login module ({after}) is not name="value". Quote values, and '
                "put a backslash before each quote and backslash inside them"
            )
        options[option[0]] = option[1]
        at += 3
    if at >= len(tokens):
        options.clear()
        option = None
        raise ConfigurationError(f"{JAAS} does not end with a semicolon, {_EXAMPLE}")
    return LoginModule(name.removeprefix(SHADED), options), at + 1


def _option(tokens: list[_Token]) -> tuple[str, Secret] | None:
    """Parse ``name = value`` from three tokens. This is a function of its own so that no frame of an error's
    traceback holds a value."""
    if len(tokens) < 3 or tokens[0].text is None or tokens[1].symbol != "=" or tokens[2].text is None:
        return None
    return tokens[0].text, Secret(tokens[2].text)


def _tokens(text: str) -> list[_Token]:
    tokens = []
    for match in _TOKEN.finditer(text):
        if match["quote"]:
            tokens.append(_Token(_ESCAPE.sub(_unescaped, match["quoted"]), ""))
        elif match["word"]:
            tokens.append(_Token(match["word"], ""))
        elif match["number"]:
            # Java parses it as a number, which has no text.
            tokens.append(_Token(None, "0"))
        elif match["symbol"]:
            tokens.append(_Token(None, match["symbol"]))
    return tokens


def _unescaped(escape: re.Match[str]) -> str:
    char = escape[1]
    return chr(int(char, 8)) if char[0] in "01234567" else _ESCAPES.get(char, char)
