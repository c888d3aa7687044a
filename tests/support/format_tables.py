"""Tables of every type that the formats encode, nested up to three deep, for comparison with other encoders.

The values are those of Arrow's storage: whole numbers for dates and times, so that values beyond Python's
years are possible. Arrays are built from buffers: below a null lie values that would be invalid if they were
read, and arrays begin in the middle of their buffers.
"""

from __future__ import annotations

import decimal
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from kafka_sink.formats import byte_columns
from kafka_sink.formats.columns import Encoder, UnfitRowsError

_TEXT = st.one_of(
    st.text(st.characters(codec="utf-8"), max_size=12),
    st.sampled_from(["", "\0", 'a"\\b\n', "\u00e4\u20ac\U0001f600", "x" * 200]),
)
_BYTES = st.one_of(st.binary(max_size=9), st.just(b"\xff" * 130))
_DAY_S = 86_400
_PER_SECOND = {"s": 1, "ms": 1000, "us": 1_000_000, "ns": 1_000_000_000}
_CONTEXT = decimal.Context(prec=60)


@dataclass(frozen=True)
class Leaf:
    """A type without children. ``junk`` is what lies in the storage of a null."""

    kind: pa.DataType
    storage: pa.DataType
    values: st.SearchStrategy[Any]
    junk: Any


def ints(low: int, high: int) -> st.SearchStrategy[int]:
    """Whole numbers from ``low`` to ``high``, often extreme, near zero or near a power of two."""
    edges = {
        low,
        high,
        *(sign * (1 << bit) + off for bit in range(64) for sign in (1, -1) for off in (-1, 0)),
    }
    near = sorted(edge for edge in edges if low <= edge <= high)
    return st.one_of(st.sampled_from(near), st.integers(low, high))


def _whole(kind: pa.DataType) -> Leaf:
    info = np.iinfo(str(kind))
    return Leaf(kind, kind, ints(int(info.min), int(info.max)), int(info.min))


def _float(width: Literal[16, 32, 64]) -> Leaf:
    kind = {16: pa.float16(), 32: pa.float32(), 64: pa.float64()}[width]
    return Leaf(kind, kind, st.floats(width=width, allow_nan=True), float("nan"))


def _decimal(kind: pa.DataType) -> Leaf:
    top = 10**kind.precision - 1
    powers = [power for bit in range(127) for power in (1 << bit, -(1 << bit)) if abs(power) <= top]
    unscaled = st.one_of(st.sampled_from([0, top, -top, *powers]), st.integers(-top, top))
    values = unscaled.map(lambda number: decimal.Decimal(number).scaleb(-kind.scale, _CONTEXT))
    return Leaf(kind, kind, values, decimal.Decimal(top).scaleb(-kind.scale, _CONTEXT))


def _temporal(kind: pa.DataType, low: int, high: int) -> Leaf:
    storage = pa.int32() if kind.bit_width == 32 else pa.int64()
    return Leaf(kind, storage, ints(low, high), int(np.iinfo(str(storage)).min))


def _times() -> list[Leaf]:
    kinds = (pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"))
    return [_temporal(kind, 0, _DAY_S * _PER_SECOND[kind.unit] - 1) for kind in kinds]


def _instants() -> list[Leaf]:
    kinds = [make(unit) for unit in _PER_SECOND for make in (pa.timestamp, _zoned, pa.duration)]
    return [_temporal(kind, -(1 << 63), (1 << 63) - 1) for kind in kinds]


def _zoned(unit: str) -> pa.DataType:
    return pa.timestamp(unit, "UTC")


_JUNK_TEXT = b"\xff\xfe"
_UUIDS = st.uuids().map(lambda one: one.bytes)
LEAVES: Mapping[str, Leaf] = {
    str(leaf.kind): leaf
    for leaf in (
        Leaf(pa.null(), pa.null(), st.none(), None),
        Leaf(pa.bool_(), pa.bool_(), st.booleans(), True),
        *map(_whole, (pa.int8(), pa.int16(), pa.int32(), pa.int64())),
        *map(_whole, (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())),
        *(_float(16), _float(32), _float(64)),
        *(
            Leaf(kind, pa.binary(), _TEXT.map(str.encode), _JUNK_TEXT)
            for kind in (pa.string(), pa.large_string())
        ),
        *(Leaf(kind, pa.binary(), _BYTES, _JUNK_TEXT) for kind in (pa.binary(), pa.large_binary())),
        Leaf(pa.binary(3), pa.binary(3), st.binary(min_size=3, max_size=3), b"\xff" * 3),
        *(Leaf(pa.dictionary(key, pa.string()), pa.string(), _TEXT, None) for key in (pa.int8(), pa.int32())),
        *map(_decimal, map(pa.decimal128, (1, 5, 18, 38, 38, 38), (0, 2, 0, 0, 10, 38))),
        *map(_decimal, (pa.decimal128(3, -2), pa.decimal32(7, 2), pa.decimal64(15, 3))),
        _temporal(pa.date32(), -(1 << 31), (1 << 31) - 1),
        _temporal(pa.date64(), -(1 << 31), (1 << 31) - 1),
        *_times(),
        *_instants(),
        Leaf(pa.uuid(), pa.binary(16), _UUIDS, b"\xff" * 16),
        Leaf(pa.bool8(), pa.int8(), st.sampled_from([0, 1, -1]), 7),
    )
}
_DAY_MS = 1000 * _DAY_S
_NAMES = ("a", "b_1", "Cc", "d")


def _field(name: str, kind: pa.DataType, nullable: bool) -> pa.Field:
    return pa.field(name, kind, nullable or pa.types.is_null(kind))


def _nested(children: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    fields = st.tuples(children, st.booleans())
    element = fields.map(lambda drawn: _field("element", *drawn))
    structs = st.lists(fields, min_size=1, max_size=3).map(
        lambda drawn: pa.struct([_field(name, *one) for name, one in zip(_NAMES, drawn, strict=False)])
    )
    lists = st.tuples(
        element,
        st.sampled_from([pa.list_, pa.list_, pa.large_list, lambda field: pa.list_(field, 2)]),
    ).map(lambda drawn: drawn[1](drawn[0]))
    maps = fields.map(lambda drawn: pa.map_(pa.string(), _field("value", *drawn)))
    return st.one_of(structs, lists, maps)


def types(depth: int = 3, leaves: Sequence[str] = tuple(LEAVES)) -> st.SearchStrategy[pa.DataType]:
    """Types that are nested up to ``depth`` deep."""
    leaf = st.sampled_from([LEAVES[name].kind for name in leaves])
    kinds = leaf
    for _ in range(depth):
        kinds = st.one_of(leaf, _nested(kinds))
    return kinds


def values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Values of a type, without nulls at the top."""
    if pa.types.is_struct(kind):
        return st.fixed_dictionaries({field.name: of_field(field) for field in kind})
    if pa.types.is_map(kind):
        return st.dictionaries(_TEXT, of_field(kind.item_field), max_size=3)
    if pa.types.is_fixed_size_list(kind):
        return st.lists(of_field(kind.value_field), min_size=kind.list_size, max_size=kind.list_size)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return st.lists(of_field(kind.value_field), max_size=3)
    return LEAVES[str(kind)].values


def of_field(field: pa.Field) -> st.SearchStrategy[Any]:
    return st.one_of(st.none(), values(field.type)) if field.nullable else values(field.type)


# -- arrays ------------------------------------------------------------------------------------------------


def array(kind: pa.DataType, entries: Sequence[Any]) -> pa.Array:
    """The entries as an array that begins after another entry. Invalid values lie below its nulls."""
    return _array(kind, [None, *entries]).slice(1)


def _array(kind: pa.DataType, entries: Sequence[Any]) -> pa.Array:
    present = np.array([entry is not None for entry in entries], dtype=np.bool_)
    validity = pa.py_buffer(np.packbits(present, bitorder="little"))
    if pa.types.is_struct(kind):
        children = [
            array(field.type, [None if entry is None else entry[field.name] for entry in entries])
            for field in kind
        ]
        mask = pa.array(~present)
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)
    if pa.types.is_map(kind) or pa.types.is_nested(kind):
        return _list(kind, entries, validity)
    leaf = LEAVES[str(kind)]
    if pa.types.is_null(kind) or pa.types.is_dictionary(kind):
        return pa.array(entries, kind)
    stored = pa.array([leaf.junk if entry is None else entry for entry in entries], leaf.storage)
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, _with(validity, stored))
    if pa.types.is_date64(kind):
        days = np.frombuffer(stored.buffers()[1], np.int64, len(stored)) * _DAY_MS * present
        return pa.Array.from_buffers(kind, len(days), [validity, pa.py_buffer(np.ascontiguousarray(days))])
    stored = _with(validity, stored)
    if kind == stored.type:
        return stored
    if pa.types.is_string(kind) or leaf.storage != pa.binary():
        return stored.view(kind)
    # 64-bit offsets have other buffers, so that the values below nulls are lost.
    return stored.cast(kind)


def _with(validity: pa.Buffer, stored: pa.Array) -> pa.Array:
    return pa.Array.from_buffers(stored.type, len(stored), [validity, *stored.buffers()[1:]])


def _list(kind: pa.DataType, entries: Sequence[Any], validity: pa.Buffer) -> pa.Array:
    """A list or a map. A null spans an element, and a fixed-size list as many as it has."""
    is_map, is_fixed = pa.types.is_map(kind), pa.types.is_fixed_size_list(kind)
    size = kind.list_size if is_fixed else 1
    spans: list[list[Any]] = [
        [None] * size if entry is None else list(entry.items()) if is_map else entry for entry in entries
    ]
    flat = [element for span in spans for element in span]
    offsets = np.cumsum([0, *map(len, spans)])
    if is_map:
        pairs = [("", None) if pair is None else pair for pair in flat]
        keys = array(pa.string(), [key.encode() for key, _ in pairs])
        items = array(kind.item_type, [value for _, value in pairs])
        entry_type = pa.struct([kind.key_field, kind.item_field])
        children = pa.StructArray.from_arrays([keys, items], fields=list(entry_type))
    else:
        children = array(kind.value_type, flat)
    if is_fixed:
        return pa.Array.from_buffers(kind, len(entries), [validity], children=[children])
    width = np.int64 if pa.types.is_large_list(kind) else np.int32
    bounds = pa.py_buffer(offsets.astype(width))
    return pa.Array.from_buffers(kind, len(entries), [validity, bounds], children=[children])


Rows = list[dict[str, Any]]


@st.composite
def tables(
    draw: st.DrawFn,
    leaves: Sequence[str] = tuple(LEAVES),
    values_of: Callable[[pa.Field], st.SearchStrategy[Any]] = of_field,
) -> tuple[pa.StructArray, Rows]:
    """Rows as a struct column, and the same rows as dictionaries of stored values."""
    kinds = draw(st.lists(types(leaves=leaves), min_size=1, max_size=4))
    fields = [_field(f"f{index}", kind, draw(st.booleans())) for index, kind in enumerate(kinds)]
    row = st.fixed_dictionaries({field.name: values_of(field) for field in fields})
    rows = draw(st.lists(row, max_size=6))
    return array(pa.struct(fields), rows), rows


def is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def mapped(kind: pa.DataType, entry: Any, of_leaf: Callable[[pa.DataType, Any], Any]) -> Any:
    """The entry with ``of_leaf`` of each value that has no children; null stays None."""
    if entry is None:
        return None
    if pa.types.is_struct(kind):
        return {field.name: mapped(field.type, entry[field.name], of_leaf) for field in kind}
    if pa.types.is_map(kind):
        return {key: mapped(kind.item_type, value, of_leaf) for key, value in entry.items()}
    if is_list(kind):
        return [mapped(kind.value_type, value, of_leaf) for value in entry]
    if is_text(kind):
        return of_leaf(kind, entry.decode())
    if isinstance(kind, pa.BaseExtensionType):
        return of_leaf(kind, str(uuid.UUID(bytes=entry)) if kind == pa.uuid() else bool(entry))
    return of_leaf(kind, entry)


def encoded_rows(encoder: Encoder, column: pa.Array, fits: Sequence[bool]) -> list[bytes]:
    """The rows that fit, encoded. The encoder must report the other rows, and no row that fits."""
    left = np.flatnonzero(np.array(fits, dtype=np.bool_)).tolist()
    places = list(range(len(column)))
    while True:
        try:
            encoded: list[bytes] = byte_columns.join(encoder.pieces(column, None), len(column)).to_pylist()
            break
        except UnfitRowsError as error:
            wrong = {place for place, is_wrong in zip(places, error.rows, strict=True) if is_wrong}
            assert wrong, "no row is marked"
            assert not wrong.intersection(left), "a row is marked that fits"
            kept = pa.array(np.flatnonzero(~error.rows), pa.int32())
            places, column = [place for place in places if place not in wrong], column.take(kept)
    assert places == left, "a row does not fit and was not marked"
    return encoded
