"""What planning hands to tasks: the columns of encoded batches, and a bound on the work for one schema."""

from __future__ import annotations

import pytest

from kafka_sink.errors import SchemaError
from kafka_sink.formats.schemas import PartFormat, RegisteredSchema, RowEncoding, Schema, StepBudget


def encoding(kept: tuple[tuple[str, str, int], ...], *, in_header: bool) -> RowEncoding:
    registered = RegisteredSchema(Schema("AVRO", '"string"'), 7, "", "t-value", 2)
    part = PartFormat("value", "avro", 0, (("", registered), ("b", registered)), in_header)
    return RowEncoding((part,), kept)


def test_encoded_batches_have_a_column_of_headers_only_for_an_id_in_a_header() -> None:
    assert encoding((), in_header=False).columns == [("value", "binary")]
    for kept in ((), (("headers", "array<struct<key:string,value:binary>>", 1),)):
        columns = encoding(kept, in_header=True).columns
        assert [name for name, _ in columns] == ["value", "headers"]


def test_the_summary_lists_each_schema_once() -> None:
    (part,) = encoding((), in_header=False).parts
    assert str(part) == "value as avro by t-value version 2 (id 7)"
    assert str(RegisteredSchema(Schema("AVRO", ""), 7)) == "schema id 7"


def test_a_schema_without_steps_left_stays_refused() -> None:
    budget = StepBudget()
    budget.take(200_000)
    for _ in range(2):
        with pytest.raises(SchemaError, match="refers to its own parts too often"):
            budget.take()
