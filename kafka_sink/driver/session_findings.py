"""What the doctor finds in the settings of a Spark session, as they are now: planning sees only those with
which the driver was started."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kafka_sink.driver.command_line import Finding, Level
from kafka_sink.driver.driver_conf import OWN_PREFIX, idle_timeout_problem
from kafka_sink.options import redaction
from kafka_sink.options.table import SPECS
from kafka_sink.rows import hand_over

if TYPE_CHECKING:
    from kafka_sink.options import SinkOptions


def of_session(
    spark: Any,
    given: Mapping[str, str],
    options: SinkOptions,
    environ: Mapping[str, str],
    administered: Collection[str],
) -> Iterator[Finding]:
    """``spark``: a SparkSession, also of Spark Connect. ``given``: the job's options, of which ``options``
    were made. ``administered``: options that environment and session may set."""

    def conf(name: str) -> str | None:
        value = spark.conf.get(name, None)
        return None if value is None else str(value)

    yield Finding(Level.OK, f"the session is of Spark {spark.version}")
    problem = idle_timeout_problem(conf, options.delivery_timeout_ms)
    if problem is not None:
        yield Finding(Level.PROBLEM, problem)
    known = {name: found for name in redaction.DEFAULTS if (found := conf(name)) is not None}
    shown = redaction.shown_by_spark(given, known)
    if shown:
        yield Finding(Level.NOTE, redaction.warning(shown))
    yield from (Finding(Level.NOTE, text) for text in hand_over.advice(conf))
    if conf("spark.speculation") == "true" and not options.exactly_once:
        yield Finding(
            Level.NOTE,
            "spark.speculation=true runs copies of slow tasks, and each writes its rows: readers see some "
            "twice, unless delivery.guarantee=exactly-once",
        )
    for spec in SPECS:
        own, variable = OWN_PREFIX + spec.name, "KAFKA_CHUNKED_" + spec.name.upper().replace(".", "_")
        for name, value in ((variable, environ.get(variable)), (own, conf(own))):
            if value and spec.name in administered:
                yield Finding(Level.NOTE, f"{name}={value} overrides the option '{spec.name}'")
            elif value:
                # It may be a password.
                yield Finding(
                    Level.PROBLEM, f"{name} has no effect: give the option '{spec.name}' to the job"
                )
