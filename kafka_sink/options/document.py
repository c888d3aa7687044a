"""The options page, written from the table. ``python -m kafka_sink.options > docs/options.md`` renews it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from kafka_sink.options import unsupported
from kafka_sink.options.breaker import BREAKER_OPTIONS
from kafka_sink.options.prefixes import BREAKER_PREFIX, KAFKA_PREFIX
from kafka_sink.options.table import SPECS, OptionSpec

_INTRODUCTION = """\
# Options

<!-- Made by `python -m kafka_sink.options > docs/options.md` from kafka_sink/options/table.py. -->

Options of the sink itself stand without a prefix; options of the producer stand under `kafka.` with the names
that Apache Kafka's own producer gives them. Case does not matter. Times are in milliseconds, sizes in bytes.
Everything is checked before a task starts. Defaults in **bold** are not Kafka's; the description says why.

```python
(df.write.format("kafka-chunked").mode("append")     # without .mode("append") Spark refuses the write itself
   .option("kafka.bootstrap.servers", "broker1:9092,broker2:9092")
   .option("topic", "flights")
   .option("kafka.compression.type", "lz4")
   .save())
```
"""


def document() -> str:
    """The whole Markdown page."""
    return "\n".join([_INTRODUCTION, *_tables(), *_breaker(), *_others()]) + "\n"


def _tables() -> Iterator[str]:
    for group, specs in groupby(SPECS, key=lambda spec: spec.group):
        yield f"## {group}\n"
        yield "| Option | Type | Default | Allowed | Importance | Meaning |"
        yield "|---|---|---|---|---|---|"
        yield from (_row(spec) for spec in specs)
        yield ""


def _row(spec: OptionSpec) -> str:
    name = f"`{spec.name}`"
    if spec.aliases:
        name += " (or " + ", ".join(f"`{alias}`" for alias in spec.aliases) + ")"
    cells = (name, spec.kind.label, _default(spec), spec.kind.allowed, spec.importance, spec.doc)
    return "| " + " | ".join(cells) + " |"


def _default(spec: OptionSpec) -> str:
    if spec.required:
        return "required"
    if not spec.differs:
        return _literal(spec, spec.default)
    return f"**{_literal(spec, spec.default)}** (Kafka: {_literal(spec, spec.kafka_default)})"


def _literal(spec: OptionSpec, value: object) -> str:
    return f"`{spec.kind.show(value)}`" if value not in (None, "") else "none"


def _breaker() -> Iterator[str]:
    yield "## Circuit breaker\n"
    yield (
        f"Options under `{KAFKA_PREFIX}{BREAKER_PREFIX}` (KIP-693). A class of your own is handed all of "
        "them without that prefix, and may have others; the names marked * are the default class's.\n"
    )
    yield "| Option | Type | Default | Allowed | Meaning |"
    yield "|---|---|---|---|---|"
    for option in BREAKER_OPTIONS:
        mark = " *" if option.of_default_class else ""
        default = option.kind.show(option.default)
        cells = (f"`{KAFKA_PREFIX}{BREAKER_PREFIX}{option.name}`{mark}", option.kind.label, f"`{default}`")
        yield "| " + " | ".join((*cells, option.kind.allowed, option.doc)) + " |"
    yield ""


def _others() -> Iterator[str]:
    yield "## Kafka options without effect\n"
    yield "They change nothing about what is sent. One warning per job names those that are set.\n"
    yield "| Option | Why |"
    yield "|---|---|"
    yield from (f"| `kafka.{name}` | {reason} |" for name, (_, reason) in unsupported.WITHOUT_EFFECT.items())
    yield ""
    yield "## Kafka options that are refused\n"
    yield "Accepted only with Kafka's default: without what they ask for, a job is not what it seems.\n"
    yield "| Option | Why |"
    yield "|---|---|"
    yield from (f"| `kafka.{name}` | {reason} |" for name, (_, reason) in unsupported.REFUSED.items())
    yield ""
    yield "## Unknown options\n"
    yield (
        "An unknown option under `kafka.` is an error that names the nearest known one. Other unknown "
        "options are ignored with one warning, as Spark puts options of its own there, except where a job "
        "would lack something that it asks for, such as a `security.protocol` without its prefix: that is "
        "an error."
    )
