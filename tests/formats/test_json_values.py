"""JSON's texts are those of json.dumps, and mean the rows."""

from __future__ import annotations

import json
import math

import pyarrow as pa
import pytest

from kafka_sink.formats import byte_columns, json_schema, json_values
from kafka_sink.formats.columns import UnfitRowsError
from kafka_sink.formats.row_encoder import dead_letter_values


def _encoded(schema: str, column: pa.Array) -> list[bytes]:
    encoder = json_values.encoder(schema, (), column.type, "")
    joined: list[bytes] = byte_columns.join(encoder.pieces(column, None), len(column)).to_pylist()
    return joined


def _derived(column: pa.Array) -> str:
    return json_schema.derived(pa.field("", column.type, nullable=False), "Row")


def test_texts_are_those_of_json_dumps() -> None:
    """Catches: control characters that readers refuse."""
    controls = "".join(map(chr, range(32)))
    texts = ["", "plain", 'quo"te', "back\\slash", "\n\r\t\b\f", controls, "\u00e4\U0001f600", "\\n\x7f"]
    column = pa.array([{"t": text, "n": number, "b": bool(number)} for number, text in enumerate(texts)])
    schema = _derived(column)
    expected = [json.dumps(row, separators=(",", ":"), ensure_ascii=False) for row in column.to_pylist()]
    assert [text.decode() for text in _encoded(schema, column)] == expected


def test_a_column_of_nothing_but_nulls_beside_a_null_row() -> None:
    """Catches: an object with nothing behind a name, which is not JSON."""
    nothings = pa.list_(pa.struct([("n", pa.null())]))
    kind = pa.struct([("n", pa.null()), ("a", nothings)])
    pieces = json_values.of_type(kind, "").pieces(
        pa.array([{"n": None, "a": [{"n": None}]}, None], kind), None
    )
    assert byte_columns.join(pieces, 2).to_pylist() == [b'{"n":null,"a":[{"n":null}]}', b"null"]


@pytest.mark.parametrize("kind", [pa.date32(), pa.date64(), pa.timestamp("us", "UTC"), pa.timestamp("s")])
def test_dates_that_the_formats_have_not(kind: pa.DataType) -> None:
    """Catches: Arrow's text for what it cannot print, and years that no reader takes."""
    day = {"day": 1, "ms": 86_400_000, "us": 86_400_000_000, "s": 86_400}
    unit = day["day" if kind == pa.date32() else "ms" if kind == pa.date64() else kind.unit]
    width = pa.int32() if kind == pa.date32() else pa.int64()
    bounds = pa.array([-719_162 * unit, 2_932_896 * unit], width)
    first, last = _encoded("true", bounds.cast(kind))
    assert (first[:11], last[:11]) == (b'"0001-01-01', b'"9999-12-31')
    for wrong in (-719_163, 2_932_897, 20_000_000):
        with pytest.raises(UnfitRowsError, match="outside the years 1 to 9999") as caught:
            _encoded("true", pa.array([wrong * unit, 0], width).cast(kind))
        assert caught.value.rows.tolist() == [True, False]
        # Its dead letter has what there is.
        row = pa.StructArray.from_arrays([pa.array([wrong * unit], width).cast(kind)], ["x"])
        assert dead_letter_values(row)[0].as_py()


def test_a_dead_letter_of_a_host_that_does_not_know_the_time_zone() -> None:
    """Catches: a row that JSON cannot represent failed the task, instead of becoming a dead letter."""
    times = pa.array([0]).view(pa.timestamp("us", "Nowhere/City"))
    row = pa.StructArray.from_arrays([times, pa.array([math.nan])], ["time", "number"])
    assert b"1970-01-01" in dead_letter_values(row)[0].as_py()


def test_a_number_that_json_has_not_is_an_error_of_its_row() -> None:
    column = pa.array([{"x": [1.0]}, {"x": [2.0, math.nan]}, {"x": []}, {"x": [math.inf]}])
    schema = _derived(column)
    with pytest.raises(UnfitRowsError, match=r"field 'x\[\]' is NaN or infinite") as caught:
        _encoded(schema, column)
    assert caught.value.rows.tolist() == [False, True, False, True]
