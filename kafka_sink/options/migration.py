"""The page for jobs that move here from Spark's own Kafka sink, written from the table of options.

``python -m kafka_sink.options migration > docs/migration.md`` renews it.
"""

from __future__ import annotations

from collections.abc import Iterator

from kafka_sink.options import unsupported
from kafka_sink.options.prefixes import KAFKA_PREFIX
from kafka_sink.options.table import SPECS, OptionSpec

_INTRODUCTION = """\
# Moving a job from Spark's own Kafka sink

<!-- Made by `python -m kafka_sink.options migration > docs/migration.md` from kafka_sink/options. -->

```python
(df.write.format("kafka-chunked").mode("append")     # was: format("kafka"); Spark wants the mode named here
   .option("kafka.bootstrap.servers", "broker1:9093")
   .option("kafka.security.protocol", "SASL_SSL")    # all options stay as they are
   .save())
```

Columns stay as they are, too: `value`, and where there are any `key`, `topic`, `partition`, `headers`. A
column `timestamp` becomes the record's timestamp here; Spark's sink ignores it.

Every producer option of Apache Kafka 4.3 and every option of Spark's sink is below. What is neither honoured
nor harmless is an error when the write is planned, with the option's name and what to set instead.
"""

# Options of Spark's own sink (Structured Streaming + Kafka Integration Guide, Spark 4), and of its session.
SPARK_OPTIONS: dict[str, str] = {
    "kafka.bootstrap.servers": "honoured",
    "topic": "honoured: it wins over a column `topic`, as there",
    "includeHeaders": "accepted without effect: a column `headers` is always written, as there",
    "path, checkpointLocation, queryName": "Spark's own: nothing changes",
    "kafka.key.serializer, kafka.value.serializer": "refused, as there",
}
SPARK_CONFS: dict[str, str] = {
    "spark.kafka.producer.cache.timeout": "without effect: a Python worker keeps up to four producers, and "
    "Spark ends idle workers after a minute",
    "spark.kafka.producer.cache.evictorThreadRunInterval": "without effect, as the one above",
    "spark.kafka.clusters.*": "without effect: delegation tokens are not supported. Log in with the options",
}


def migration() -> str:
    """The whole Markdown page."""
    return "\n".join([_INTRODUCTION, *_spark(), *_producer(), *_further()]) + "\n"


def fate(name: str) -> str:
    """What becomes of a producer option of Kafka's, by its name without prefix. Raises KeyError."""
    spec = _BY_NAME.get(name)
    if spec is not None:
        return _honoured(spec)
    if name in unsupported.WITHOUT_EFFECT:
        return f"accepted without effect: {unsupported.WITHOUT_EFFECT[name][1]}"
    default, reason = unsupported.REFUSED[name]
    instead = f", unless it is Kafka's default `{default}`" if default else ""
    return f"refused{instead}: it {reason}"


_BY_NAME: dict[str, OptionSpec] = {
    name.removeprefix(KAFKA_PREFIX): spec
    for spec in SPECS
    for name in (spec.name, *spec.aliases)
    if name.startswith(KAFKA_PREFIX)
}


def _honoured(spec: OptionSpec) -> str:
    if not spec.differs or spec.required:
        return "honoured"
    own, kafkas = (
        f"`{spec.kind.show(value)}`" if value not in (None, "") else "none"
        for value in (spec.default, spec.kafka_default)
    )
    return f"honoured; not set, it is {own} (Kafka: {kafkas})"


def _spark() -> Iterator[str]:
    yield "## Options of Spark's sink\n"
    yield "| Option | Here |"
    yield "|---|---|"
    yield from (f"| `{name.replace(', ', '`, `')}` | {what} |" for name, what in SPARK_OPTIONS.items())
    yield ""
    yield "| Spark conf | Here |"
    yield "|---|---|"
    yield from (f"| `{name}` | {what} |" for name, what in SPARK_CONFS.items())
    yield ""


def _producer() -> Iterator[str]:
    yield "## Options of Kafka's producer\n"
    yield "All under `kafka.`; what they mean is in [options.md](options.md).\n"
    yield "| Option | Here |"
    yield "|---|---|"
    names = sorted({*unsupported.WITHOUT_EFFECT, *unsupported.REFUSED, *_BY_NAME})
    yield from (f"| `{name}` | {fate(name)} |" for name in names)
    yield ""


def _further() -> Iterator[str]:
    yield "## What to look at besides\n"
    yield '- `.mode("append")` must be named for batch writes: without it Spark refuses the write itself.'
    yield "- `Trigger.Continuous` is an error; use `Trigger.ProcessingTime` or `Trigger.AvailableNow`."
    yield (
        "- Files that options name (`ssl.truststore.location`, keytabs) are read by Python on the driver and "
        "on every executor. JKS stores are converted once with `keytool`; the error names the command."
    )
    yield (
        "- Options about security that the protocol does not use, such as a password with "
        "`security.protocol=PLAINTEXT`, are errors; Java leaves them out in silence."
    )
    yield (
        "- A connection and the login are tried on the driver when the write is planned; see "
        "[troubleshooting.md](troubleshooting.md)."
    )
