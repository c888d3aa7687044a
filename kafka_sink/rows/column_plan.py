"""Decides at planning, by name and type, which column of a DataFrame becomes which part of a Kafka record.

The columns, their types, the order of the checks and the texts of the errors are those of Spark's own Kafka
sink (``KafkaWriter`` of spark-sql-kafka-0-10); ``timestamp`` is an addition of this sink. This module imports
nothing that is slow to import, because the driver runs it for every micro-batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from kafka_sink.errors import SchemaError
from kafka_sink.printable import first_of

HEADERS_TYPE = "array<struct<key:string,value:binary>>"
_TEXT_OR_BYTES = ("string", "binary")
_OPTIONAL = ("key", "headers", "partition", "timestamp")
# The columns of the sink itself: the parts of a record other than its value.
OWN = ("topic", *_OPTIONAL)
# How to rename a column in Spark.
_RENAME = ".withColumnRenamed('{old}', '{new}')"
# Errors list at most this many columns: wide tables have thousands, and Spark prints errors twice.
MAX_NAMED = 10
# Matches the type anywhere in a type text, as of a field or an element, but not a field's name.
_MONTHS = re.compile(r"(?:^|[:<,])(interval (?:year|month)(?: to month)?)(?:$|[,>])")


@dataclass(frozen=True)
class ColumnPlan:
    """The position of each part of a record in the Arrow batches; None for a part without a column. ``topic``
    is the option 'topic'. If it is set, a column of topics is ignored."""

    value: int
    topic: str | None = None
    topic_column: int | None = None
    key: int | None = None
    headers: int | None = None
    partition: int | None = None
    timestamp: int | None = None

    @classmethod
    def of(cls, columns: Iterable[tuple[str, str]], topic: str | None = None) -> ColumnPlan:
        """The plan for these columns: pairs of name and Spark's simple type string, in the DataFrame's order.

        As in Spark's sink, names are case-sensitive and other columns are ignored. Raises SchemaError with
        the texts of Spark's sink.
        """
        named = named_columns(columns)
        topic_column = None if topic is not None else _pick(named, "topic", ("string",))
        if topic is None and topic_column is None:
            raise SchemaError(
                "topic option required when no 'topic' attribute is present. "
                f"Use the topic option for setting a topic.{found_instead(named, 'topic')}"
            )
        key = _pick(named, "key", _TEXT_OR_BYTES)
        value = _pick(named, "value", _TEXT_OR_BYTES)
        if value is None:
            made = found_instead(named, "value") or (
                f" among the columns {first_of(named, MAX_NAMED)}: rename one to 'value', or create it, "
                "as in .selectExpr('to_json(struct(*)) AS value')"
            )
            raise SchemaError(f"Required attribute 'value' not found{made}")
        return cls(
            value,
            topic,
            topic_column,
            key,
            _pick(named, "headers", (HEADERS_TYPE,)),
            _pick(named, "partition", ("int",)),
            # timestamp_ntz is not accepted: without a time zone, Spark's cast would apply the session's.
            _pick(named, "timestamp", ("timestamp",)),
        )

    @property
    def used(self) -> tuple[int, ...]:
        """The positions of all columns that the sink reads, in ascending order."""
        return tuple(sorted(self._positions().values()))

    @property
    def parts(self) -> tuple[int | None, ...]:
        """Each part's position, in a fixed order of parts; None for a part without a column."""
        return (self.topic_column, self.key, self.value, self.headers, self.partition, self.timestamp)

    @property
    def sized(self) -> tuple[int, ...]:
        """The positions of the columns of variable width that go into a record."""
        return tuple(index for index in (self.key, self.value, self.headers) if index is not None)

    def narrowed(self) -> ColumnPlan:
        """The plan for batches that contain only the ``used`` columns, in the same order."""
        rank = {index: position for position, index in enumerate(self.used)}
        moved: dict[str, Any] = {name: rank[index] for name, index in self._positions().items()}
        return replace(self, **moved)

    def _positions(self) -> dict[str, int]:
        named = ((field.name, getattr(self, field.name)) for field in fields(self) if field.name != "topic")
        return {name: index for name, index in named if index is not None}


def named_columns(columns: Iterable[tuple[str, str]]) -> dict[str, tuple[int, str]]:
    """The position and type of each column by name. Raises SchemaError if Spark cannot hand them over."""
    named: dict[str, tuple[int, str]] = {}
    for index, (name, spark_type) in enumerate(columns):
        if name in named:
            # Otherwise Spark reports it in the tasks, for any column: DUPLICATED_FIELD_NAME_IN_ARROW_STRUCT.
            raise SchemaError(
                f"There are two columns '{name}', and Spark cannot hand such rows to a Python sink: "
                "rename or drop one."
            )
        months = _MONTHS.search(spark_type)
        if months:
            # Otherwise pyarrow raises "KeyError: 21" in the tasks, for any column.
            raise SchemaError(
                f"Column '{name}' has the type {months[1]}, which pyarrow does not have. Spark hands all "
                "columns to a Python sink: drop it or cast it to string."
            )
        named[name] = (index, spark_type)
    return named


def _pick(columns: dict[str, tuple[int, str]], name: str, types: tuple[str, ...]) -> int | None:
    if name not in columns:
        return None
    index, spark_type = columns[name]
    # Spark ignores the case of names within structs, and the case of type names has no meaning.
    if spark_type.lower() not in types:
        allowed = " or ".join(types)
        raise SchemaError(
            f"{name} attribute unsupported type {spark_type}. {name} must be a(n) {allowed}: "
            f"{_conversion(name, spark_type.lower(), types[0])}"
        )
    return index


def _conversion(name: str, spark_type: str, wanted: str) -> str:
    """Spark code that converts the column to a type that the sink accepts."""
    if name == "headers" and spark_type.startswith("map<"):
        return (
            "convert the map, as in .withColumn('headers', expr(\"transform(map_entries(headers), h -> "
            "named_struct('key', h.key, 'value', cast(h.value AS binary)))\"))"
        )
    if name == "headers" and not spark_type.startswith("array<struct<"):
        return (
            "build it, as in .withColumn('headers', expr(\"array(named_struct('key', 'source', 'value', "
            "cast('shop' AS binary)))\"))"
        )
    if name == "timestamp" and spark_type in ("bigint", "int"):
        # Spark's cast takes a number as seconds, but Kafka's timestamps are milliseconds.
        return (
            "convert it, as in .withColumn('timestamp', timestamp_millis('timestamp')) of "
            "pyspark.sql.functions for milliseconds, timestamp_seconds for seconds"
        )
    if wanted == "string" and spark_type.startswith(("struct<", "map<", "array<", "variant")):
        return f"write it as JSON, as in .withColumn('{name}', to_json('{name}'))"
    return f"cast it, as in .withColumn('{name}', col('{name}').cast('{wanted}'))"


def found_instead(names: Iterable[str], name: str, rename: str = _RENAME) -> str:
    """How to rename a column whose name differs only in case; empty if there is none."""
    near = next((given for given in names if given.lower() == name), None)
    if near is None:
        return ""
    return f" (found '{near}', and names are case-sensitive: {rename.format(old=near, new=name)})"


def ignored_columns(
    names: Sequence[str], topic: str | None = None, parts: Sequence[str] = _OPTIONAL, rename: str = _RENAME
) -> list[str]:
    """Warnings about columns that seem to be meant for the sink, but are ignored."""
    lines = [
        f"the column '{name}' is ignored, because names are case-sensitive: "
        f"use {rename.format(old=name, new=name.lower())} if it should be written"
        for name in names
        if name.lower() in parts and name.lower() not in names
    ]
    if topic is not None and "topic" in names:
        lines.append(
            f"the column 'topic' is ignored, because the option 'topic' is '{topic}'. Leave out the option "
            "to write to the topics of the column"
        )
    return lines
