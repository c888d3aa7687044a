"""Columns of every type with a schema, and the rows as confluent-kafka's serializer takes them."""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st


def record(*fields: Any) -> str:
    """A schema in Avro of n.Row."""
    return json.dumps({"type": "record", "name": "Row", "namespace": "n", "fields": list(fields)})


def field(name: str, kind: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, **more}


_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=30)


def _ints(bits: int) -> st.SearchStrategy[int]:
    top = 1 << (bits - 1)
    near_powers = st.integers(0, bits - 2).flatmap(
        lambda n: st.sampled_from([1 << n, -(1 << n), (1 << n) - 1])
    )
    return st.one_of(st.integers(-top, top - 1), near_powers, st.integers(-3, 3))


def _decimals(precision: int, scale: int) -> st.SearchStrategy[decimal.Decimal]:
    top = 10**precision - 1
    context = decimal.Context(prec=60)
    powers = st.integers(0, top.bit_length() - 1).flatmap(lambda n: st.sampled_from([1 << n, -(1 << n)]))
    numbers = st.one_of(st.integers(-top, top), st.integers(-300, 300), powers)
    # The number of digits as Python counts them; -0 has none.
    return numbers.map(lambda n: decimal.Decimal(n).scaleb(-scale, context))


_INSTANTS = st.datetimes(
    datetime.datetime(1900, 1, 1), datetime.datetime(2200, 1, 1), timezones=st.just(datetime.timezone.utc)
)

# Arrow type, values as Python has them.
LEAVES: Mapping[pa.DataType, st.SearchStrategy[Any]] = {
    pa.bool_(): st.booleans(),
    pa.int8(): _ints(8),
    pa.int16(): _ints(16),
    pa.int32(): _ints(32),
    pa.int64(): _ints(64),
    pa.float32(): st.floats(width=32, allow_nan=False),
    pa.float64(): st.floats(allow_nan=False),
    pa.string(): _TEXT,
    pa.large_string(): _TEXT,
    pa.binary(): st.binary(max_size=20),
    pa.date32(): st.dates(),
    pa.timestamp("us", "UTC"): _INSTANTS,
    pa.timestamp("us"): st.datetimes(datetime.datetime(1900, 1, 1), datetime.datetime(2200, 1, 1)),
    pa.decimal128(5, 2): _decimals(5, 2),
    pa.decimal128(18, 0): _decimals(18, 0),
    pa.decimal128(38, 10): _decimals(38, 10),
}


def _nested(children: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    fields = st.tuples(children, st.booleans())
    names = st.sampled_from(["a", "b_1", "Cc", "d"])
    structs = st.dictionaries(names, fields, min_size=1, max_size=4).map(
        lambda found: pa.struct([pa.field(name, kind, nullable) for name, (kind, nullable) in found.items()])
    )
    lists = fields.map(lambda one: pa.list_(pa.field("element", *one)))
    maps = fields.map(lambda one: pa.map_(pa.string(), pa.field("value", *one)))
    return st.one_of(structs, lists, maps)


TYPES = st.recursive(st.sampled_from(list(LEAVES)), _nested, max_leaves=8)


def values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Values of a type, as ``pa.array`` and fastavro both take them."""
    if pa.types.is_struct(kind):
        return st.fixed_dictionaries({field.name: of_field(field) for field in kind})
    if pa.types.is_list(kind):
        return st.lists(of_field(kind.value_field), max_size=4)
    if pa.types.is_map(kind):
        return st.dictionaries(_TEXT, of_field(kind.item_field), max_size=4)
    return LEAVES[kind]


def of_field(field: pa.Field) -> st.SearchStrategy[Any]:
    """Values of a field; they contain nulls if the field may be null."""
    return st.one_of(st.none(), values(field.type)) if field.nullable else values(field.type)


@st.composite
def tables(draw: st.DrawFn) -> tuple[pa.StructArray, list[dict[str, Any]]]:
    """Rows as a struct column, and the same rows as Python's dictionaries."""
    kinds = draw(st.lists(TYPES, min_size=1, max_size=6))
    fields = [pa.field(f"f{index}", kind, draw(st.booleans())) for index, kind in enumerate(kinds)]
    rows = draw(
        st.lists(
            st.fixed_dictionaries({field.name: of_field(field) for field in fields}), min_size=0, max_size=12
        )
    )
    skipped = draw(st.integers(0, 2))
    column = pa.array(rows, pa.struct(fields))
    return column.slice(min(skipped, len(rows))), rows[skipped:]
