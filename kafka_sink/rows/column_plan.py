"""Which column of a DataFrame becomes which part of a Kafka record: decided at planning, by name and type.

The columns, their types, the order of the checks and the texts of the errors are those of Spark's own Kafka
sink (``KafkaWriter`` of spark-sql-kafka-0-10); ``timestamp`` is this sink's addition. Imports nothing heavy:
it runs again on the driver for every micro-batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from kafka_sink.errors import SchemaError

HEADERS_TYPE = "array<struct<key:string,value:binary>>"
_TEXT_OR_BYTES = ("string", "binary")
_OPTIONAL = ("key", "headers", "partition", "timestamp")
# How Spark renames a column.
_RENAME = ".withColumnRenamed('{old}', '{new}')"
# Wide tables have thousands of columns, and Spark prints an error several times.
_MAX_NAMED = 10
# Anywhere in a type, as of a field or an element; not a field's name.
_MONTHS = re.compile(r"(?:^|[:<,])(interval (?:year|month)(?: to month)?)(?:$|[,>])")


@dataclass(frozen=True)
class ColumnPlan:
    """The position of each part of a record in the Arrow batches, None for a part without a column.

    ``topic`` is the option's; with it, a column of topics is ignored.
    """

    value: int
    topic: str | None = None
    topic_column: int | None = None
    key: int | None = None
    headers: int | None = None
    partition: int | None = None
    timestamp: int | None = None

    @classmethod
    def of(cls, columns: Iterable[tuple[str, str]], topic: str | None = None) -> ColumnPlan:
        """Plan for columns given as (name, Spark's simple type string), in the DataFrame's order.

        Names are case-sensitive and other columns are ignored, as in Spark's sink. Raises SchemaError with
        its texts.
        """
        found = named_columns(columns)
        topic_column = None if topic is not None else _pick(found, "topic", ("string",))
        if topic is None and topic_column is None:
            raise SchemaError(
                "topic option required when no 'topic' attribute is present. "
                f"Use the topic option for setting a topic.{found_instead(found, 'topic')}"
            )
        key = _pick(found, "key", _TEXT_OR_BYTES)
        value = _pick(found, "value", _TEXT_OR_BYTES)
        if value is None:
            made = found_instead(found, "value") or (
                f" among the columns {some_of(list(found))}: rename one to 'value', or make it, as in "
                ".selectExpr('to_json(struct(*)) AS value')"
            )
            raise SchemaError(f"Required attribute 'value' not found{made}")
        return cls(
            value,
            topic,
            topic_column,
            key,
            _pick(found, "headers", (HEADERS_TYPE,)),
            _pick(found, "partition", ("int",)),
            # No timestamp_ntz: without a zone it names no instant, and Spark's own cast takes the session's.
            _pick(found, "timestamp", ("timestamp",)),
        )

    @property
    def used(self) -> tuple[int, ...]:
        """Positions of all columns that the sink reads, ascending."""
        return tuple(sorted(self._positions().values()))

    @property
    def parts(self) -> tuple[int | None, ...]:
        """Positions by part of a record, always in the same order; None for a part without a column."""
        return (self.topic_column, self.key, self.value, self.headers, self.partition, self.timestamp)

    @property
    def sized(self) -> tuple[int, ...]:
        """Positions of the columns whose values have no fixed width and go into a record."""
        return tuple(index for index in (self.key, self.value, self.headers) if index is not None)

    def narrowed(self) -> ColumnPlan:
        """The plan for batches that hold the ``used`` columns only, in their order."""
        rank = {index: position for position, index in enumerate(self.used)}
        moved: dict[str, Any] = {name: rank[index] for name, index in self._positions().items()}
        return replace(self, **moved)

    def _positions(self) -> dict[str, int]:
        named = ((field.name, getattr(self, field.name)) for field in fields(self) if field.name != "topic")
        return {name: index for name, index in named if index is not None}


def named_columns(columns: Iterable[tuple[str, str]]) -> dict[str, tuple[int, str]]:
    """Position and type of each column by its name. Raises SchemaError for what Spark does not hand over."""
    found: dict[str, tuple[int, str]] = {}
    for index, (name, spark_type) in enumerate(columns):
        if name in found:
            # Else Spark says so in the tasks, whatever the column: DUPLICATED_FIELD_NAME_IN_ARROW_STRUCT.
            raise SchemaError(
                f"There are two columns '{name}', and Spark does not hand such rows to a Python sink: "
                "rename or drop one."
            )
        months = _MONTHS.search(spark_type)
        if months:
            # Else pyarrow's "KeyError: 21" in the tasks, whatever the column.
            raise SchemaError(
                f"Column '{name}' has the type {months[1]}, which pyarrow lacks, and Spark hands all "
                "columns to a Python sink: drop it or cast it to string."
            )
        found[name] = (index, spark_type)
    return found


def _pick(found: dict[str, tuple[int, str]], name: str, types: tuple[str, ...]) -> int | None:
    if name not in found:
        return None
    index, spark_type = found[name]
    # Spark compares the names inside of structs without their case, and type names have none.
    if spark_type.lower() not in types:
        allowed = " or ".join(types)
        raise SchemaError(
            f"{name} attribute unsupported type {spark_type}. {name} must be a(n) {allowed}: "
            f"{_conversion(name, spark_type.lower(), types[0])}"
        )
    return index


def _conversion(name: str, spark_type: str, wanted: str) -> str:
    """What to write in Spark to have the column in a type that the sink takes."""
    if name == "headers" and spark_type.startswith("map<"):
        return (
            "make it of the map, as in .withColumn('headers', expr(\"transform(map_entries(headers), h -> "
            "named_struct('key', h.key, 'value', cast(h.value AS binary)))\"))"
        )
    if name == "timestamp" and spark_type in ("bigint", "int"):
        # Spark's cast takes a number for seconds; Kafka counts milliseconds.
        return (
            "convert it, as in .withColumn('timestamp', timestamp_millis('timestamp')) of "
            "pyspark.sql.functions for milliseconds, timestamp_seconds for seconds"
        )
    if wanted == "string" and spark_type.startswith(("struct<", "map<", "array<", "variant")):
        return f"write it as JSON, as in .withColumn('{name}', to_json('{name}'))"
    return f"cast it, as in .withColumn('{name}', col('{name}').cast('{wanted}'))"


def some_of(names: Sequence[str]) -> str:
    """For an error: the first of them, and how many more there are."""
    more = f" and {len(names) - _MAX_NAMED:,} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def found_instead(found: Iterable[str], name: str, rename: str = _RENAME) -> str:
    """How to rename a column whose name differs only in its case, if there is one."""
    near = next((one for one in found if one.lower() == name), None)
    if near is None:
        return ""
    return f" (found '{near}', and names are case-sensitive: {rename.format(old=near, new=name)})"


def ignored_columns(
    names: Sequence[str], topic: str | None = None, parts: Sequence[str] = _OPTIONAL, rename: str = _RENAME
) -> list[str]:
    """What to warn of: columns that look as if they were meant for the sink, and are ignored."""
    lines = [
        f"the column '{name}' is ignored, because names are case-sensitive: "
        f"{rename.format(old=name, new=name.lower())} if it is meant"
        for name in names
        if name.lower() in parts and name.lower() not in names
    ]
    if topic is not None and "topic" in names:
        lines.append(
            f"the column 'topic' is ignored, because the option 'topic' is '{topic}'. Leave out the option "
            "to write to the topics of the column"
        )
    return lines
