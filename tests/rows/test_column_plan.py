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
# What spark-sql-kafka-0-10_2.13 4.1.1 said when run with these very columns.
SPARK_SAYS = [
    ([("topic", "string")], None, "Required attribute 'value' not found"),
    ([("Value", "string")], "t", "Required attribute 'value' not found"),
    (
        [VALUE],
        None,
        NO_TOPIC,
    ),
    (
        [("value", "struct<a:int,b:string>")],
        "t",
        "value attribute unsupported type struct<a:int,b:string>. value must be a(n) string or binary",
    ),
    ([("value", "int")], "t", "value attribute unsupported type int. value must be a(n) string or binary"),
    ([("value", "void")], "t", "value attribute unsupported type void. value must be a(n) string or binary"),
    (
        [("value", "string collate UTF8_LCASE")],
        "t",
        "value attribute unsupported type string collate UTF8_LCASE. value must be a(n) string or binary",
    ),
    (
        [VALUE, ("topic", "binary")],
        None,
        "topic attribute unsupported type binary. topic must be a(n) string",
    ),
    ([VALUE, ("key", "int")], "t", "key attribute unsupported type int. key must be a(n) string or binary"),
    (
        [VALUE, ("partition", "bigint")],
        "t",
        "partition attribute unsupported type bigint. partition must be a(n) int",
    ),
    (
        [VALUE, ("partition", "smallint")],
        "t",
        "partition attribute unsupported type smallint. partition must be a(n) int",
    ),
    *(
        (
            [VALUE, ("headers", wrong)],
            "t",
            f"headers attribute unsupported type {wrong}. headers must be a(n) {HEADERS_TYPE}",
        )
        for wrong in (
            "map<string,binary>",
            "array<string>",
            "array<struct<key:string,value:string>>",
            "array<struct<k:string,value:binary>>",
            "array<struct<value:binary,key:string>>",
            "array<struct<key:string,value:binary,x:int>>",
        )
    ),
    # Several things wrong at once: the order of Spark's checks.
]


@pytest.mark.parametrize(("columns", "topic", "text"), SPARK_SAYS)
def test_refused_in_spark_sinks_words(columns: list[tuple[str, str]], topic: str | None, text: str) -> None:
    with pytest.raises(SchemaError) as caught:
        ColumnPlan.of(columns, topic)
    # Then what to do.
    assert str(caught.value).startswith(text)
    assert str(caught.value) == text or str(caught.value)[len(text)] in ": "


@pytest.mark.parametrize(
    ("columns", "topic", "remedy"),
    [
        ([("value", "bigint")], "t", ": cast it, as in .withColumn('value', col('value').cast('string'))"),
        (
            [("value", "struct<a:int>")],
            "t",
            ": write it as JSON, as in .withColumn('value', to_json('value'))",
        ),
        ([("value", "variant")], "t", "to_json('value'))"),
        ([VALUE, ("partition", "bigint")], "t", "col('partition').cast('int'))"),
        ([VALUE, ("headers", "map<string,string>")], "t", "'value', cast(h.value AS binary)))\"))"),
        (
            [("Value", "string")],
            "t",
            "not found (found 'Value', and names are case-sensitive: .withColumnRenamed('Value', 'value'))",
        ),
        ([VALUE, ("TOPIC", "string")], None, ".withColumnRenamed('TOPIC', 'topic'))"),
        (
            [("id", "int"), ("n", "int")],
            "t",
            "or make it, as in .selectExpr('to_json(struct(*)) AS value')",
        ),
    ],
)
def test_refusals_end_with_what_to_write(
    columns: list[tuple[str, str]], topic: str | None, remedy: str
) -> None:
    """Catches: "must be a(n) string or binary", and the reader has to know how."""
    with pytest.raises(SchemaError) as caught:
        ColumnPlan.of(columns, topic)
    assert str(caught.value).endswith(remedy)


def test_columns_that_look_meant_and_are_ignored_are_reported() -> None:
    first, second = ignored_columns(["value", "topic", "Key", "other"], "t")
    assert first.startswith("the column 'Key' is ignored, because names are case-sensitive")
    assert second.startswith("the column 'topic' is ignored, because the option 'topic' is 't'")
    assert ignored_columns(["value", "topic", "key", "KEY"]) == []


def test_several_wrongs_are_found_in_sparks_order() -> None:
    wrong = [("value", "int"), ("key", "int")]
    with pytest.raises(SchemaError, match=r"^topic option required"):
        ColumnPlan.of(wrong)
    with pytest.raises(SchemaError, match=r"^key attribute"):
        ColumnPlan.of(wrong, "t")


def test_numbers_as_timestamps_are_told_the_conversion_of_milliseconds() -> None:
    """Catches: ``cast('timestamp')``, which takes Kafka's milliseconds for seconds."""
    with pytest.raises(SchemaError, match=r"timestamp_millis\('timestamp'\)") as caught:
        ColumnPlan.of([VALUE, ("timestamp", "bigint")], "t")
    assert "cast(" not in str(caught.value)


@pytest.mark.parametrize("wrong", ["timestamp_ntz", "bigint", "date", "double"])
def test_timestamp_is_an_instant(wrong: str) -> None:
    with pytest.raises(
        SchemaError, match=rf"^timestamp attribute unsupported type {wrong}\. timestamp must be a\(n\) "
    ):
        ColumnPlan.of([VALUE, ("timestamp", wrong)], "t")


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


def test_option_wins_over_the_column_whatever_its_type() -> None:
    plan = ColumnPlan.of([VALUE, ("topic", "binary")], "t")
    assert plan == ColumnPlan(0, "t")
    assert plan.used == (0,)


def test_names_in_headers_are_compared_as_spark_does() -> None:
    assert ColumnPlan.of([VALUE, ("headers", "array<struct<Key:string,Value:binary>>")], "t").headers == 1


def test_two_columns_of_one_name_are_refused() -> None:
    with pytest.raises(SchemaError, match="two columns 'other'"):
        ColumnPlan.of([VALUE, ("other", "int"), ("other", "int")], "t")


@pytest.mark.parametrize(
    "spark_type",
    [
        "interval year",
        "interval year to month",
        "array<interval month>",
        "struct<a:int,b:map<int,interval year>>",
    ],
)
def test_intervals_of_months_are_refused_before_tasks_meet_them(spark_type: str) -> None:
    with pytest.raises(
        SchemaError, match=r"^Column 'x' has the type interval (year|month)( to month)?, .*cast it"
    ):
        ColumnPlan.of([VALUE, ("x", spark_type)], "t")


@pytest.mark.parametrize(
    "spark_type", ["interval day to second", "struct<interval year:int>", "variant", "void"]
)
def test_other_columns_may_have_any_other_type(spark_type: str) -> None:
    assert ColumnPlan.of([("x", spark_type), VALUE], "t").used == (1,)


def test_planning_imports_nothing_heavy() -> None:
    script = (
        "import sys, kafka_sink.rows.column_plan, kafka_sink.options;"
        "print([name for name in ('numpy', 'pyarrow', 'pyspark', 'kafka') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_the_error_of_a_wide_table_names_a_few_of_its_columns() -> None:
    """Catches: thousands of names in an error that Spark prints several times."""
    with pytest.raises(SchemaError) as caught:
        ColumnPlan.of([(f"column_{number}", "string") for number in range(2_000)], "t")
    assert "column_0, column_1, " in str(caught.value)
    assert "column_9 and 1,990 more: rename one to 'value'" in str(caught.value)
    assert len(str(caught.value)) < 300
