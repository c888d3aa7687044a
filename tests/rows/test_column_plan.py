"""The columns of a DataFrame are judged as Spark's own Kafka sink judges them, in its words."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

from kafka_sink.errors import SchemaError
from kafka_sink.rows.column_plan import HEADERS_TYPE, ColumnPlan, ignored_columns

VALUE = ("value", "string")
NO_TOPIC = (
    "topic option required when no 'topic' attribute is present. Use the topic option for setting a topic."
)
WRONG_TYPES = {
    "value": ("string or binary", ["struct<a:int,b:string>", "int", "void", "string collate UTF8_LCASE"]),
    "key": ("string or binary", ["int"]),
    "topic": ("string", ["binary"]),
    "partition": ("int", ["bigint", "smallint"]),
    "headers": (
        HEADERS_TYPE,
        [
            "map<string,binary>",
            "array<string>",
            "array<struct<key:string,value:string>>",
            "array<struct<k:string,value:binary>>",
            "array<struct<value:binary,key:string>>",
            "array<struct<key:string,value:binary,x:int>>",
        ],
    ),
    # A column of this sink's alone.
    "timestamp": ("timestamp", ["timestamp_ntz", "bigint", "date", "double"]),
}
# What spark-sql-kafka-0-10_2.13 4.1.1 said when run with these very columns.
SPARK_SAYS = [
    ([("topic", "string")], None, "Required attribute 'value' not found"),
    ([("Value", "string")], "t", "Required attribute 'value' not found"),
    ([VALUE], None, NO_TOPIC),
    *(
        (
            [(name, wrong)] if name == "value" else [VALUE, (name, wrong)],
            None if name == "topic" else "t",
            f"{name} attribute unsupported type {wrong}. {name} must be a(n) {right}",
        )
        for name, (right, types) in WRONG_TYPES.items()
        for wrong in types
    ),
    # Several things wrong at once: the order of Spark's checks.
    ([("value", "int"), ("key", "int")], None, "topic option required"),
    ([("value", "int"), ("key", "int")], "t", "key attribute"),
]


def test_refused_in_spark_sinks_words() -> None:
    for columns, topic, text in SPARK_SAYS:
        with pytest.raises(SchemaError) as caught:
            ColumnPlan.of(columns, topic)
        # Then what to do.
        assert str(caught.value).startswith(text)
        assert str(caught.value) == text or str(caught.value)[len(text)] in ": "


def test_refusals_end_with_what_to_write() -> None:
    """Catches: "must be a(n) string or binary", and the reader has to know how."""
    rename = "not found (found 'Value', and names are case-sensitive: .withColumnRenamed('Value', 'value'))"
    remedies: list[tuple[list[tuple[str, str]], str | None, str]] = [
        ([("value", "bigint")], "t", ": cast it, as in .withColumn('value', col('value').cast('string'))"),
        (
            [("value", "struct<a:int>")],
            "t",
            ": write it as JSON, as in .withColumn('value', to_json('value'))",
        ),
        ([("value", "variant")], "t", "to_json('value'))"),
        ([VALUE, ("partition", "bigint")], "t", "col('partition').cast('int'))"),
        ([VALUE, ("headers", "map<string,string>")], "t", "'value', cast(h.value AS binary)))\"))"),
        ([VALUE, ("headers", "string")], "t", "'value', cast('shop' AS binary)))\"))"),
        ([("Value", "string")], "t", rename),
        ([VALUE, ("TOPIC", "string")], None, ".withColumnRenamed('TOPIC', 'topic'))"),
        (
            [("id", "int"), ("n", "int")],
            "t",
            "or create it, as in .selectExpr('to_json(struct(*)) AS value')",
        ),
    ]
    for columns, topic, remedy in remedies:
        with pytest.raises(SchemaError) as caught:
            ColumnPlan.of(columns, topic)
        assert str(caught.value).endswith(remedy)


def test_columns_that_look_meant_and_are_ignored_are_reported() -> None:
    first, second = ignored_columns(["value", "topic", "Key", "other"], "t")
    assert first.startswith("the column 'Key' is ignored, because names are case-sensitive")
    assert second.startswith("the column 'topic' is ignored, because the option 'topic' is 't'")
    assert ignored_columns(["value", "topic", "key", "KEY"]) == []


def test_numbers_as_timestamps_are_told_the_conversion_of_milliseconds() -> None:
    """Catches: ``cast('timestamp')``, which takes Kafka's milliseconds for seconds."""
    with pytest.raises(SchemaError, match=r"timestamp_millis\('timestamp'\)") as caught:
        ColumnPlan.of([VALUE, ("timestamp", "bigint")], "t")
    assert "cast(" not in str(caught.value)


def test_positions_are_those_of_the_dataframe() -> None:
    columns = [
        ("extra", "map<string,int>"),
        ("partition", "int"),
        ("headers", HEADERS_TYPE),
        ("Key", "int"),
        ("key", "binary"),
        ("timestamp", "timestamp"),
        ("value", "binary"),
        ("topic", "string"),
    ]
    plan = ColumnPlan.of(columns)
    assert plan == ColumnPlan(6, None, topic_column=7, key=4, headers=2, partition=1, timestamp=5)
    assert plan.used == (1, 2, 4, 5, 6, 7)
    assert plan.sized == (4, 6, 2)
    narrowed = plan.narrowed()
    assert narrowed == ColumnPlan(4, None, topic_column=5, key=2, headers=1, partition=0, timestamp=3)
    assert narrowed.narrowed() == narrowed
    assert pickle.loads(pickle.dumps(plan)) == plan
    # The option wins over the column, whatever its type.
    plan = ColumnPlan.of([VALUE, ("topic", "binary")], "t")
    assert plan == ColumnPlan(0, "t")
    assert plan.used == (0,)
    # Names in headers are compared as Spark does.
    assert ColumnPlan.of([VALUE, ("headers", "array<struct<Key:string,Value:binary>>")], "t").headers == 1


def test_intervals_of_months_are_refused_before_tasks_meet_them() -> None:
    nested = "struct<a:int,b:map<int,interval year>>"
    for kind in ("interval year", "interval year to month", "array<interval month>", nested):
        said = r"^Column 'x' has the type interval (year|month)( to month)?, .*cast it"
        with pytest.raises(SchemaError, match=said):
            ColumnPlan.of([VALUE, ("x", kind)], "t")
    for kind in ("interval day to second", "struct<interval year:int>", "variant", "void"):
        assert ColumnPlan.of([("x", kind), VALUE], "t").used == (1,)


def test_planning_imports_nothing_heavy() -> None:
    script = (
        "import sys, kafka_sink.rows.column_plan, kafka_sink.options;"
        "print([name for name in ('numpy', 'pyarrow', 'pyspark', 'kafka') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_errors_about_names() -> None:
    """Catches: thousands of names in an error that Spark prints several times."""
    with pytest.raises(SchemaError) as caught:
        ColumnPlan.of([(f"column_{number}", "string") for number in range(2_000)], "t")
    assert "column_0, column_1, " in str(caught.value)
    assert "column_9 and 1,990 more: rename one to 'value'" in str(caught.value)
    assert len(str(caught.value)) < 300
    # Two of one name.
    with pytest.raises(SchemaError, match="two columns 'other'"):
        ColumnPlan.of([VALUE, ("other", "int"), ("other", "int")], "t")
