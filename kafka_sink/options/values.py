"""Parsers for the texts of options: one for each type, with its description for the documentation."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from urllib.parse import unquote, urlsplit

from kafka_sink.errors import ConfigurationError
from kafka_sink.secret import HIDDEN, Secret

INT_MAX = 2**31 - 1
LONG_MAX = 2**63 - 1
TOPIC_MAX_LENGTH = 249
TEXT_MAX_BYTES = 2**15 - 1
FORMATS = ("bytes", "avro", "protobuf", "json")
PROTOCOLS = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")

_INTEGER = re.compile(r"[+-]?[0-9]+")
_TOPIC = re.compile(r"[a-zA-Z0-9._-]+")
_SCHEME = re.compile(r"\s*(?P<scheme>[A-Za-z][A-Za-z0-9+._-]*)://")
_HOST = re.compile(r"[0-9a-zA-Z._%-]+")
# PEM, or the Base64 text of a DER key or certificate without the lines BEGIN and END.
_KEY = re.compile(r"(MI[IGH]|MC4CAQAw)[A-Za-z0-9+/\s]{56,}=*")
_IPV6 = re.compile(r"[0-9a-fA-F:.]+(%[0-9a-zA-Z._-]+)?")

HostPort = tuple[str, int]

_NUMBER_AND_UNIT = re.compile(r"([0-9]+)\s*([A-Za-z]+)")
_MILLISECONDS = {"ms": 1, "s": 1000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
# There is no kB or MB, because people read them both as a power of 1000 and as one of 1024.
_BYTES = {"B": 1, "KiB": 1024, "MiB": 1024**2, "GiB": 1024**3}
# The ends of the names of options in bytes. Names of options in milliseconds end in .ms.
_SIZES = (".bytes", "buffer.memory", "batch.size", "request.size", "bytes.per.second")


def without_unit(name: str, text: str) -> str:
    """Convert a number with a unit: ``20s`` to ``20000`` for milliseconds, ``64MiB`` to ``67108864`` for
    bytes. Other texts are returned unchanged. Raises ValueError with the reason for an unknown unit."""
    units = _MILLISECONDS if name.endswith(".ms") else _BYTES if name.endswith(_SIZES) else {}
    match = _NUMBER_AND_UNIT.fullmatch(text)
    if not units or match is None:
        return text
    for unit, count in units.items():
        if unit.lower() == match[2].lower():
            return str(int(match[1]) * count)
    near = next((unit for unit in units if unit.replace("i", "").lower() == match[2].lower()), "")
    hint = f" (did you mean {match[1]}{near}?)" if near else ""
    raise ValueError(f"is not a whole number, with or without a unit of {', '.join(units)}{hint}")


@dataclass(frozen=True)
class Kind:
    """A type of option value. ``parse`` accepts stripped text; its ValueError contains the reason only."""

    label: str
    allowed: str
    parse: Callable[[str], Any]
    show: Callable[[Any], str] = str

    @property
    def is_number(self) -> bool:
        """Whether it is a whole number. It may have a unit if the option's name shows what it measures."""
        return self.label in ("int", "long")


def integer(low: int, high: int = INT_MAX, *, or_value: int | None = None, why: str = "") -> Kind:
    """A whole number from ``low`` to ``high``, or ``or_value``. ``why`` is the reason for these bounds."""
    top = {INT_MAX: "", LONG_MAX: ""}.get(high, str(high))
    allowed = f"{low} to {high}" if top else f">= {low}"
    if or_value is not None:
        allowed += f", or {or_value}"

    def parse(text: str) -> int:
        # int() would also accept 1_000 and digits of other scripts, which Kafka's clients do not accept.
        if not _INTEGER.fullmatch(text):
            raise ValueError("is not a whole number")
        number = int(text)
        if number != or_value and not low <= number <= high:
            reason = f": {why}" if why else ""
            raise ValueError(f"is out of bounds (allowed: {allowed if top else f'{low} to {high}'}){reason}")
        return number

    return Kind("int" if high <= INT_MAX else "long", allowed, parse)


def _parse_boolean(text: str) -> bool:
    lowered = text.lower()
    if lowered not in ("true", "false"):
        raise ValueError("must be true or false")
    return lowered == "true"


BOOLEAN = Kind("boolean", "true, false", _parse_boolean, lambda value: str(value).lower())


def choice(values: Mapping[str, Any], *, any_case: bool = False) -> Kind:
    """One of the given words. The result is the value to which the word is mapped."""
    names = ", ".join(name or "(empty)" for name in values)
    written = {value: name for name, value in reversed(list(values.items()))}
    taken = {name.lower(): value for name, value in values.items()} if any_case else values

    def parse(text: str) -> Any:
        word = text.lower() if any_case else text
        if word not in taken:
            raise ValueError(f"is not one of {names}")
        return taken[word]

    return Kind("string", names + (" (any case)" if any_case else ""), parse, lambda value: written[value])


def words(*names: str, any_case: bool = False) -> Kind:
    """One of the given words. The result is the word in the spelling given here."""
    return choice({name: name for name in names}, any_case=any_case)


def _parse_string(text: str) -> str:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > TEXT_MAX_BYTES:
        raise ValueError(f"has {size} bytes, more than {TEXT_MAX_BYTES}")
    return text


STRING = Kind("string", "any", _parse_string)
# Any text, without a limit of its length.
TEXT = Kind("string", "any", str)
# A secret of one line. A line end is dropped, because a mounted file has one.
SECRET = Kind("password", "any", Secret.of_one_line, lambda value: value.reveal())
# A secret that may have several lines.
SECRET_LINES = Kind("password", "any", Secret.known, lambda value: value.reveal())


def _parse_names(text: str) -> tuple[str, ...]:
    entries = [entry.strip() for entry in text.split(",")] if text else []
    if not all(entries):
        raise ValueError("has an empty entry between its commas")
    return tuple(entries)


# Comma-separated names, or none if the text is empty. The code that uses the option checks the names.
NAMES = Kind("list", "comma-separated", _parse_names, ",".join)


def real(low: float, high: float) -> Kind:
    """A number from ``low`` to ``high``."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            raise ValueError("is not a number") from None
        if not low <= number <= high:
            raise ValueError(f"is out of bounds (allowed: {low} to {high})")
        return number

    return Kind("double", f"{low} to {high}", parse)


# Cached, because a column has the same topics in every table.
@lru_cache(maxsize=4096)
def topic_problem(name: str) -> str | None:
    """Why this topic name is invalid, or None if it is valid (``Topic.validate`` of kafka-clients)."""
    if not name:
        return "is empty"
    if name in (".", ".."):
        return "cannot be '.' or '..'"
    if len(name) > TOPIC_MAX_LENGTH:
        return f"is longer than {TOPIC_MAX_LENGTH} characters"
    if not _TOPIC.fullmatch(name):
        return "has characters other than ASCII letters, digits, '.', '_' and '-'"
    return None


def _parse_topic(text: str) -> str:
    problem = topic_problem(text)
    if problem:
        raise ValueError(problem)
    return text


TOPIC = Kind("string", "a legal topic name", _parse_topic)


_STRATEGIES = ("TopicNameStrategy", "RecordNameStrategy", "TopicRecordNameStrategy")
_STRATEGY_CLASSES = (
    "io.confluent.kafka.serializers.subject.",
    "io.confluent.kafka.serializers.subject.strategy.",
)


def _parse_strategy(text: str) -> str:
    for package in _STRATEGY_CLASSES:
        text = text.removeprefix(package)
    if text not in _STRATEGIES:
        raise ValueError(f"is not one of {', '.join(_STRATEGIES)}")
    return text


# A subject name strategy: its name, or the name of its Java class.
STRATEGY = Kind("string", ", ".join(_STRATEGIES), _parse_strategy)


def _url(*allowed: str) -> Kind:
    def parse(text: str) -> str:
        if text:
            _check_url(text, allowed)
        return text

    return Kind("string", " or ".join(f"{scheme}://" for scheme in allowed), parse)


def _parse_urls(text: str) -> str:
    for entry in text.split(",") if text else ():
        _check_url(entry.strip(), ("http", "https"))
    return text


URL = _url("http", "https")
URL_OR_FILE = _url("https", "http", "file")
URLS = Kind("list", "http:// or https://, comma-separated", _parse_urls)


def _check_url(text: str, allowed: Sequence[str]) -> None:
    """Raise ValueError, without the text, if it is not a URL of an ``allowed`` scheme with a host and a
    valid port. Files have no host."""
    if "@" in text:
        raise ValueError(
            "has an entry with an @: the login belongs in an option of its own, such as "
            "schema.registry.basic.auth.user.info"
        )
    if text.partition("://")[0].lower() not in allowed or "://" not in text:
        raise ValueError(
            f"has an entry that does not begin with {' or '.join(f'{scheme}://' for scheme in allowed)}"
        )
    try:
        parts = urlsplit(text)
        valid = parts.scheme == "file" or (parts.hostname is not None and parts.port != 0)
    except ValueError:
        valid = False
    if not valid:
        raise ValueError("has an entry whose host is missing or whose port is not 1 to 65535")


def without_query(urls: str) -> str:
    """The URLs without what follows ``?`` or ``#``, which may be a key or a login."""
    return ",".join(re.split("[?#]", url)[0] for url in urls.split(","))


def _parse_topics(text: str) -> tuple[str, ...]:
    topic_names = _parse_names(text)
    for name in topic_names:
        if problem := topic_problem(name):
            raise ValueError(f"has an entry that {problem}")
    return tuple(dict.fromkeys(topic_names))


TOPICS = Kind("list", "legal topic names, comma-separated", _parse_topics, ",".join)


def looks_like_key(text: str) -> bool:
    """Whether the text is a private key or a certificate, even if the option expects something else."""
    return "-----BEGIN" in text or _KEY.fullmatch(text) is not None


def schemes(text: str) -> set[str]:
    """The protocols in front of addresses (``SSL://host:port``), in upper case."""
    matches = (_SCHEME.match(entry) for entry in text.split(","))
    return {match["scheme"].upper() for match in matches if match}


def _parse_addresses(text: str) -> tuple[HostPort, ...]:
    # Kafka's own clients took a comma behind the last address until 4.0.
    entries = [entry.strip() for entry in text.rstrip().removesuffix(",").split(",")]
    if not text:
        raise ValueError("is empty")
    if ";" in text:
        raise ValueError("has a ';' between its addresses: write a comma")
    if not all(entries):
        raise ValueError("has an empty entry between its commas")
    if any(len(entry.split()) > 1 for entry in entries):
        raise ValueError("has a space inside an address: write a comma between two addresses")
    return tuple(dict.fromkeys(_parse_address(entry) for entry in entries))


def _parse_address(entry: str) -> HostPort:
    if "@" in entry:
        raise ValueError("has an entry with an @: credentials do not belong in an address")
    scheme = _SCHEME.match(entry)
    if scheme:
        if scheme["scheme"].upper() not in PROTOCOLS:
            raise ValueError(
                f"has an entry with {scheme['scheme']}:// in front of its address: write host:port alone"
            )
        entry = entry[scheme.end() :]
    host, colon, port_text = entry.rpartition(":")
    if not colon or not host:
        raise ValueError("has an entry that is not host:port")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if ":" not in host or not _IPV6.fullmatch(host):
            raise ValueError("has brackets around something that is not an IPv6 address")
    elif ":" in host:
        raise ValueError("has an IPv6 address without brackets (write [address]:port)")
    elif not _HOST.fullmatch(host):
        raise ValueError("has an entry whose host is not a name or an address")
    if not re.fullmatch(r"[0-9]{1,5}", port_text) or not 1 <= int(port_text) <= 65535:
        raise ValueError("has an entry whose port is not 1 to 65535")
    return host, int(port_text)


def _show_addresses(pairs: tuple[HostPort, ...]) -> str:
    return ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in pairs)


# ``host:port,host:port``, with IPv6 in brackets. A protocol in front (``SSL://``) is accepted and dropped.
ADDRESSES = Kind("list", "host:port, comma-separated; IPv6 as [::1]:9092", _parse_addresses, _show_addresses)


# -- prefixes of option names -------------------------------------------------------------------------------


# Kafka's own options have this prefix, as in Spark's Kafka sink.
KAFKA_PREFIX = "kafka."
# After KAFKA_PREFIX: the options of the circuit breaker (KIP-693).
BREAKER_PREFIX = "producer.circuit.breaker."
# Settings of a topic that topic.create creates have this prefix.
TOPIC_CONFIG_PREFIX = "topic.config."


def local_path(value: str, option: str) -> str:
    """The path in an option: an absolute path, or a ``file:`` URI. Otherwise raises ConfigurationError."""
    parts = urlsplit(value)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return unquote(parts.path)
    # An @ in a URL means that it contains a password.
    shown = HIDDEN if "@" in value else value
    if parts.scheme:
        raise ConfigurationError(
            f"Option '{option}' = {shown}: only files on the driver's host are supported. Write to such "
            "a file, and copy it afterwards"
        )
    if not os.path.isabs(value):
        raise ConfigurationError(f"Option '{option}' = {shown} must be an absolute path")
    return value
