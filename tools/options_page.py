"""Prints docs/options.md with the facts of the table of options, and with the texts that the page has now.

``make docs`` runs it from the repository's root: ``python -m tools.options_page``. It adds an entry without a
text for a new option.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from kafka_sink.options import unsupported
from kafka_sink.options.table import (
    BREAKER,
    BREAKER_OPTIONS,
    BY_NAME,
    FAILURE_RATE_OPTIONS,
    SPECS,
    TARGET,
    OptionSpec,
)
from kafka_sink.options.values import BREAKER_PREFIX, KAFKA_PREFIX, TOPIC_CONFIG_PREFIX, Kind

_INTRODUCTION = """\
# Options

<!-- `make docs` keeps the texts of options, and writes all else from kafka_sink/options/table.py. -->

Options of Apache Kafka's producer have the prefix `kafka.`; the sink's own have none. Names are
case-insensitive. Times are in milliseconds, sizes in bytes; where a name says which of the two it is, the
value may have a unit: `20ms`, `5min`, `64KiB`. All options are checked before a task starts.

## The twenty that people need first
"""

# The options that a user needs first, in the order in which they come up.
FIRST: Mapping[str, str] = {
    "kafka.bootstrap.servers": "brokers to contact first: `host:port,host:port`",
    "topic": "topic for all rows, instead of a column `topic`",
    "topic.create": "create it if it does not exist",
    "topic.partitions": "its number of partitions then",
    "kafka.acks": "which replicas must have a row before it counts as written",
    "kafka.compression.type": "`lz4` is fastest, `zstd` smallest",
    "kafka.batch.size": "most bytes of a record batch",
    "kafka.max.request.size": "most bytes of a row, and of a request",
    "kafka.linger.ms": "how long a batch waits for more rows",
    "kafka.buffer.memory": "memory of each Python worker for rows that are not acknowledged",
    "kafka.delivery.timeout.ms": "how long a row may take before its task fails",
    "kafka.security.protocol": "TLS and logins: [Security](security.md)",
    "kafka.sasl.mechanism": "how to log in: `PLAIN`, `SCRAM-SHA-512`, `OAUTHBEARER` and others",
    "kafka.sasl.jaas.config": "user and password, as Java clients have them",
    "kafka.ssl.truststore.location": "the authorities to trust, if they are not the system's",
    "value.format": "`avro`, `json` or `protobuf` with a [schema registry](schema-registry.md)",
    "max.rows.per.second": "limit for the whole job",
    "errors.tolerance": "`all` skips rows that can never be written",
    "delivery.guarantee": "`exactly-once`: [what it takes](exactly-once.md)",
    "ui.port": "`0` serves a [live view](metrics.md#the-live-view) on a free port",
}
_NONE = "none"
# The name in an entry, and an entry: its name, its facts, which are one sentence, and its text.
_NAME = re.compile(r"\*\*`([^`]+)`\*\*")
_ENTRY = re.compile(r"^- \*\*`(?P<name>[^`]+)`\*\* — .*?\. (?P<text>.+)$", re.MULTILINE)
PAGE = Path(__file__).resolve().parents[1] / "docs" / "options.md"


def document() -> str:
    texts = {entry["name"]: entry["text"] for entry in _ENTRY.finditer(PAGE.read_text(encoding="utf-8"))}
    parts = [_INTRODUCTION, *_first(), *_groups(texts), *_breaker(texts), *_others()]
    return "\n".join(parts) + "\n"


def _first() -> Iterator[str]:
    yield "| Option | |"
    yield "|---|---|"
    for name, text in FIRST.items():
        default = _default(BY_NAME[name])
        yield f"| `{name}` | {text}. {'Required' if default == 'required' else f'Default: {default}'} |"
    yield ""


def _groups(texts: Mapping[str, str]) -> Iterator[str]:
    for group, specs in groupby(SPECS, key=lambda spec: spec.group):
        entries = [_entry(spec.name, _facts(spec), texts) for spec in specs]
        if group == TARGET:
            entries.append(_entry(f"{TOPIC_CONFIG_PREFIX}*", ["string"], texts))
        yield from _section(group, entries)


def _section(title: str, entries: Sequence[str], introduction: str = "") -> Iterator[str]:
    """A heading, which is its anchor, and entries that are shown on a click: a phone shows the whole page.

    The closed box shows the names of its options, so that the page can be scanned.
    """
    yield f"## {title}\n"
    if introduction:
        yield f"{introduction}\n"
    names = ", ".join(f"<code>{name}</code>" for entry in entries for name in _NAME.findall(entry)[:1])
    yield f'<details markdown="1"><summary>{names or "All of them"}</summary>\n'
    yield from entries
    yield "\n</details>\n"


def _facts(spec: OptionSpec) -> list[str]:
    facts = [_kind(spec.kind)]
    default = _default(spec)
    if default != _NONE:
        facts.append(default if spec.required else f"default {default}")
    if spec.aliases:
        facts.append("also named " + ", ".join(f"`{alias}`" for alias in spec.aliases))
    return facts


def _kind(kind: Kind) -> str:
    """The kind's name, with the values that it allows unless the name contains them."""
    return kind.label if kind.allowed in ("any", "true, false") else f"{kind.label} ({kind.allowed})"


def _entry(name: str, facts: Iterable[str], texts: Mapping[str, str]) -> str:
    return f"- **`{name}`** — {', '.join(facts)}. {texts.get(name, '')}"


def _reasons(options: Mapping[str, tuple[str, str]]) -> list[str]:
    """One line for each reason."""
    names: dict[str, list[str]] = {}
    for name, (_, reason) in options.items():
        names.setdefault(reason, []).append(f"`kafka.{name}`")
    return [f"- {', '.join(found)}: {reason}" for reason, found in names.items()]


def _of_other_clients() -> str:
    names = ", ".join(f"`kafka.{name}`" for name in sorted(unsupported.OF_OTHER_CLIENTS))
    return f"- {names}: Kafka's consumer and admin clients have these, and its producer does not"


def _default(spec: OptionSpec) -> str:
    if spec.required:
        return "required"
    if not spec.differs:
        return _literal(spec, spec.default)
    return f"**{_literal(spec, spec.default)}** (Kafka: {_literal(spec, spec.kafka_default)})"


def _literal(spec: OptionSpec, value: object) -> str:
    shown = "" if value is None else spec.kind.show(value)
    return f"`{shown}`" if shown else _NONE


def _breaker(texts: Mapping[str, str]) -> Iterator[str]:
    introduction = (
        f"Under `{KAFKA_PREFIX}{BREAKER_PREFIX}` (KIP-693). A class of your own gets all of them without "
        "this prefix and may define others."
    )
    entries = [
        _entry(
            option.name,
            [*_facts(option), *(["of the default class"] if option in FAILURE_RATE_OPTIONS else [])],
            texts,
        )
        for option in BREAKER_OPTIONS
    ]
    yield from _section(BREAKER, entries, introduction)


def _others() -> Iterator[str]:
    yield from _section(
        "Kafka options without effect",
        [*_reasons(unsupported.WITHOUT_EFFECT), _of_other_clients()],
        "The sink sends the same rows with and without them. One warning per job lists those that are set.",
    )
    yield from _section(
        "Kafka options that are not supported",
        _reasons(unsupported.NOT_SUPPORTED),
        "Any value other than Kafka's default is an error: the job would lack what the option asks for. The "
        "callback handlers of Amazon MSK's IAM login and of OAUTHBEARER are accepted, because the sink does "
        "their work itself.",
    )
    yield "## Unknown options\n"
    yield (
        "An unknown option under `kafka.` is an error, and so is one that is nearly an option of this sink, "
        "such as `delivery.guarante`. One error lists all of them, with the options that they are probably "
        "meant to be. Other unknown options are "
        "ignored with one warning, because Spark adds options of its own. An option that asks for a "
        "guarantee but lacks its prefix, such as `security.protocol`, is an error."
    )


if __name__ == "__main__":
    print(document(), end="")
