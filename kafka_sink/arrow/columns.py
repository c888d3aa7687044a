"""Maps columns of Arrow data to the parts of Kafka records, and converts them if necessary.

The columns and their rules are those of the Spark sink. More types are accepted: for Spark's strings,
libraries have views or dictionaries, and they also have 64-bit integers, maps, and timestamps in other units.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_sink.arrow.pieces import decoded, is_view, may_share, pieces, views_as_binary
from kafka_sink.arrow.soundness import require_sound
from kafka_sink.dead_letters.rejected_rows import RejectedRows
from kafka_sink.dead_letters.row_rejection import HEADERS
from kafka_sink.errors import InvalidRowError, SchemaError
from kafka_sink.options import SinkOptions
from kafka_sink.printable import first_of
from kafka_sink.records.arrays import has_byte_offsets, lengths, null_mask, numbers
from kafka_sink.records.extension_types import POLARS_OBJECT, content_type, shown, with_unknown_types
from kafka_sink.rows.column_plan import MAX_NAMED, ColumnPlan, found_instead, ignored_columns

Convert = Callable[[pa.Array], pa.Array]

# The order of the columns in a converted batch.
_PARTS = ("topic", "key", "value", "headers", "partition", "timestamp")
_RENAME = "rename it to '{new}'"
_TEXT = "text or binary"
_AS_JSON = "for example as JSON with struct.json_encode() of Polars or to_json() of DuckDB"
_ACCEPTED = {
    "topic": "text",
    "key": _TEXT,
    "value": _TEXT,
    "headers": "a list of structs with the fields key (text) and value (binary), or a map",
    "partition": "an integer",
    "timestamp": "a timestamp with a time zone",
}
_REMEDIES = {
    "value": f"Convert it to text or bytes, {_AS_JSON}",
    "key": "Cast it to text",
    "topic": "Cast it to text",
    "timestamp": "Without a zone it is ambiguous: add one, for example with dt.replace_time_zone('UTC') of "
    "Polars or ::TIMESTAMPTZ of DuckDB",
}
_OF_OBJECTS = "Convert its Python objects, for example to text with map_elements(str, return_dtype=pl.String)"
_FACTORS_TO_MICROS = {"s": 1_000_000, "ms": 1000}
# Far beyond any date that makes sense. No product with the factors above overflows 64 bits.
_LAST_MICROS = 1 << 62
_MAX_INT32 = np.iinfo(np.int32).max
_MIN_INT32 = np.iinfo(np.int32).min
# The types that columns of nulls are cast to. Columns of other parts stay as they are.
_OF_NULLS = {"headers": HEADERS, "partition": pa.int32(), "timestamp": pa.timestamp("us")}


class _Column(NamedTuple):
    """The column at ``place`` for the part ``name`` of records. ``convert`` is None if it fits as it is."""

    name: str
    place: int
    convert: Convert | None
    is_view: bool


@dataclass(frozen=True)
class ArrowColumns:
    """The columns of one schema. ``plan`` describes the converted batches, which contain only the columns it
    uses."""

    plan: ColumnPlan
    schema: pa.Schema
    warnings: tuple[str, ...]
    _columns: tuple[_Column, ...]

    @classmethod
    def of(cls, schema: pa.Schema, topic: str | None = None) -> ArrowColumns:
        """Make the columns of a schema. ``topic`` is the value of the option; if it is set, a topic column is
        ignored. Raises SchemaError."""
        positions = _positions(schema, topic)
        place = {name: number for number, name in enumerate(positions)}
        plan = ColumnPlan(
            place["value"],
            topic,
            place.get("topic"),
            place.get("key"),
            place.get("headers"),
            place.get("partition"),
            place.get("timestamp"),
        )
        kinds = with_unknown_types(schema)
        columns = [
            _Column(name, at, converter(name, kinds.field(at).type), is_view(schema.field(at).type))
            for name, at in positions.items()
        ]
        warnings = tuple(ignored_columns(schema.names, topic, _PARTS, _RENAME))
        return cls(plan, schema, warnings, tuple(columns))

    def converted(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Return the batch's rows in order, with the types that ``plan`` needs. Only columns of other types
        are copied; then the rows come in several batches."""
        for column in self._columns:
            if not column.is_view:
                require_sound(batch.column(column.place), column.name)
        converted = [column.place for column in self._columns if column.convert is not None]
        row = 0
        for piece in pieces(batch, converted) if converted else (batch,):
            yield self._convert(piece, row)
            row += piece.num_rows

    def _convert(self, batch: pa.RecordBatch, first_row: int) -> pa.RecordBatch:
        converted = []
        for name, place, convert, has_views in self._columns:
            column = batch.column(place)
            if has_views:
                # Views are checked here so that a piece stays in the processor's caches until it is
                # converted.
                require_sound(column, name, first_row)
            try:
                converted.append(column if convert is None else convert(column))
            except (pa.ArrowException, OverflowError) as error:
                raise InvalidRowError(f"column '{name}' cannot be converted: {error}") from error
        return pa.RecordBatch.from_arrays(converted, names=[column.name for column in self._columns])


def _positions(schema: pa.Schema, topic: str | None) -> dict[str, int]:
    """Return the position of each part's column. As in Spark's sink, names are case-sensitive and other
    columns are ignored."""
    wanted = [name for name in _PARTS if name != "topic" or topic is None]
    positions = {name: schema.get_all_field_indices(name) for name in wanted}
    for name, indices in positions.items():
        if len(indices) > 1:
            raise SchemaError(f"There are two columns '{name}': rename or drop one.")
    if topic is None and not positions["topic"]:
        raise SchemaError(
            "topic option required when no 'topic' attribute is present. "
            f"Use the topic option for setting a topic.{found_instead(schema.names, 'topic', _RENAME)}"
        )
    if not positions["value"]:
        made = found_instead(schema.names, "value", _RENAME) or (
            f" among the columns {first_of(schema.names, MAX_NAMED)}: rename one to 'value', or create it, "
            f"{_AS_JSON}"
        )
        raise SchemaError(f"Required attribute 'value' not found{made}.")
    return {name: indices[0] for name, indices in positions.items() if indices}


def converter(name: str, kind: pa.DataType) -> Convert | None:
    """Return the conversion of a column, or None if it can be used as it is. Raises SchemaError for a type
    that cannot be used."""
    if kind == pa.null() and name in _OF_NULLS:
        return partial(pa.Array.cast, target_type=_OF_NULLS[name])
    of_part = {"headers": _headers, "partition": _partition, "timestamp": _timestamp}.get(name, _bytes)
    try:
        return of_part(kind)
    except _UnfitError:
        remedy = _OF_OBJECTS if kind == POLARS_OBJECT else _REMEDIES.get(name)
        more = f". {remedy}." if remedy else "."
        raise SchemaError(
            f"{name} attribute unsupported type {_shown(kind)}. {name} must be {_ACCEPTED[name]}{more}"
        ) from None


class _UnfitError(Exception):
    """A column's type cannot be used for its part of the record."""


def _shown(kind: pa.DataType) -> str:
    text = re.sub(r"\s+", " ", shown(kind))
    return text if len(text) <= 200 else f"{text[:200]}..."


def _then(first: Convert, second: Convert | None) -> Convert:
    return first if second is None else lambda column: second(first(column))


def _bytes(kind: pa.DataType) -> Convert | None:
    if has_byte_offsets(kind) or kind == pa.null():
        return None
    if isinstance(kind, pa.BaseExtensionType):
        content = content_type(kind)
        if content is None:
            raise _UnfitError
        return _then(lambda column: column.storage, _bytes(content))
    if pa.types.is_dictionary(kind):
        return partial(decoded, convert=_bytes(kind.value_type))
    if is_view(kind):
        return views_as_binary
    if pa.types.is_fixed_size_binary(kind):
        return partial(pa.Array.cast, target_type=pa.binary())
    raise _UnfitError


def _partition(kind: pa.DataType) -> Convert | None:
    if kind == pa.int32():
        return None
    if pa.types.is_integer(kind):
        return _as_int32
    raise _UnfitError


def _as_int32(column: pa.Array) -> pa.Array:
    """Cast to 32 bits. Larger numbers become the largest one, a partition that no topic has, so their rows
    are rejected."""
    sign = "i" if pa.types.is_signed_integer(column.type) else "u"
    given = numbers(column, f"{sign}{column.type.bit_width // 8}")
    low = _MIN_INT32 if given.dtype.kind == "i" else 0
    return _fixed(pa.int32(), np.clip(given, low, _MAX_INT32).astype(np.int32), column)


def _timestamp(kind: pa.DataType) -> Convert | None:
    if not pa.types.is_timestamp(kind) or kind.tz is None:
        raise _UnfitError
    return None if kind.unit == "us" else _as_micros


def _as_micros(column: pa.Array) -> pa.Array:
    ticks, unit = numbers(column, np.int64), column.type.unit
    if unit == "ns":
        # Round down, as when microseconds become Kafka's milliseconds.
        micros = ticks // 1000
    else:
        factor = _FACTORS_TO_MICROS[unit]
        micros = np.clip(ticks, -(_LAST_MICROS // factor), _LAST_MICROS // factor) * factor
    return _fixed(pa.timestamp("us", column.type.tz), micros, column)


def _fixed(kind: pa.DataType, values: npt.NDArray[np.signedinteger[Any]], column: pa.Array) -> pa.Array:
    """Return ``values`` as an array with the nulls of ``column``."""
    return pa.array(values, mask=null_mask(column)).view(kind)


def _headers(kind: pa.DataType) -> Convert | None:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    if pa.types.is_map(kind):
        lists = pa.list_(pa.struct([("key", kind.key_type), ("value", kind.item_type)]))
        return _then(lambda column: column.cast(lists), _headers(lists))
    if not is_list or not pa.types.is_struct(kind.value_type):
        raise _UnfitError
    entry = kind.value_type
    names = [entry.field(number).name for number in range(entry.num_fields)]
    if sorted(names) != ["key", "value"]:
        raise _UnfitError
    places = names.index("key"), names.index("value")
    converts = [_bytes(entry.field(place).type) for place in places]
    if places == (0, 1) and not any(converts):
        return None
    return lambda column: _as_headers(column, places, converts)


def _as_headers(
    column: pa.Array, places: tuple[int, int], converts: Sequence[Convert | None]
) -> pa.ListArray:
    """Return lists of (key, value) structs. The column's entries may have any names and order."""
    counts = lengths(column)
    entries = column.flatten()
    parts = entries.flatten()
    children = [
        parts[place] if convert is None else convert(parts[place])
        for place, convert in zip(places, converts, strict=True)
    ]
    structs = pa.StructArray.from_arrays(children, ["key", "value"], mask=pa.array(null_mask(entries)))
    ends = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)))
    return pa.LargeListArray.from_arrays(pa.array(ends), structs, mask=pa.array(null_mask(column)))


Reject = Callable[[RejectedRows, ColumnPlan], None]


def columns_of(schema: pa.Schema, options: SinkOptions, reject: Reject) -> ArrowColumns | EncodedColumns:
    """Return the columns of a schema, after asking the registry if there is a format. Raises RegistryError or
    SchemaError."""
    return check_early(schema, options) or EncodedColumns(
        schema, options, reject if options.errors_tolerance == "all" else None
    )


def check_early(schema: pa.Schema, options: SinkOptions) -> ArrowColumns | None:
    """Return the columns if they need no registry; None with a format. Raises SchemaError."""
    return None if options.has_format else ArrowColumns.of(schema, options.topic)


class EncodedColumns:
    """The counterpart of ArrowColumns for batches whose key or value is encoded."""

    def __init__(self, schema: pa.Schema, options: SinkOptions, reject: Reject | None) -> None:
        from kafka_sink.formats import planning
        from kafka_sink.formats.row_encoder import RowEncoder

        self.schema = schema
        named = [(field.name, str(field.type)) for field in schema]
        if len({name for name, _ in named}) < len(named):
            raise SchemaError("there are two columns of the same name: rename or drop one.")
        kinds = with_unknown_types(schema)
        # The positions of the columns whose rows may share bytes.
        self._shared = tuple(place for place, field in enumerate(schema) if may_share(field.type))
        self._converts = tuple(_converts(kinds))
        for place, convert in self._converts:
            field = kinds.field(place)
            kinds = kinds.set(place, field.with_type(convert(pa.nulls(0, field.type)).type))
        encoding = planning.plan(options, named, lambda: kinds, None)
        assert encoding is not None
        of_parts = (part.column for part in encoding.parts)
        places = [[part] if isinstance(part, int) else [place for place, _ in part] for part in of_parts]
        self._used = (*chain(*places), *(place for _, _, place in encoding.kept))
        kept = {name: kinds.field(place) for name, _, place in encoding.kept}
        added = {"key": pa.binary(), "value": pa.binary(), "headers": HEADERS}
        encoded = pa.schema([kept.get(name) or pa.field(name, added[name]) for name, _ in encoding.columns])
        self._columns = ArrowColumns.of(encoded, options.topic)
        self.plan, self.warnings = self._columns.plan, self._columns.warnings
        # Descriptions of the schemas, for the summary.
        self.schemas = tuple(map(str, encoding.parts))

        of_plan = None if reject is None else lambda rows: reject(rows, self.plan)
        self._encoder = RowEncoder(encoding, kinds, self.plan, of_plan, self._columns.converted)

    def converted(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Return the batch's rows in order, as ``plan`` describes them. Raises InvalidRowError."""
        for place in self._used:
            require_sound(batch.column(place), self.schema.names[place])
        try:
            for piece in pieces(batch, self._shared) if self._shared or self._converts else (batch,):
                for place, convert in self._converts:
                    piece = piece.set_column(place, self.schema.names[place], convert(piece.column(place)))
                for encoded in self._encoder.encoded(piece):
                    yield from self._columns.converted(encoded)
        except (pa.ArrowException, OverflowError) as error:
            raise InvalidRowError(f"rows cannot be encoded: {error}") from error


def _converts(schema: pa.Schema) -> Iterator[tuple[int, Convert]]:
    """Return the conversions that columns need before they are encoded. Raises SchemaError for a wrong type
    of headers."""
    for place, field in enumerate(schema):
        kind = field.type
        if field.name == "headers":
            convert = converter("headers", kind)
        elif pa.types.is_dictionary(kind):
            convert = partial(decoded, convert=_offsets_for_views(kind.value_type))
        elif isinstance(kind, pa.BaseExtensionType) and content_type(kind) in _OF_VIEWS:
            # pyarrow's cast of an extension type over views reads beyond the column's memory.
            convert = _then(lambda column: column.storage, _offsets_for_views(kind.storage_type))
        else:
            convert = _offsets_for_views(kind)
        if convert is not None:
            yield place, convert


def _offsets_for_views(kind: pa.DataType) -> Convert | None:
    wanted = _without_views(kind)
    return None if wanted == kind else partial(pa.Array.cast, target_type=wanted)


_OF_VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}


def _without_views(kind: pa.DataType) -> pa.DataType:  # noqa: PLR0911 - one a type
    """Return the type with offsets instead of views, at any depth, because Arrow cannot take entries of
    views."""
    if kind in _OF_VIEWS:
        return _OF_VIEWS[kind]
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _without_views(kind.value_type), kind.ordered)
    if pa.types.is_struct(kind):
        return pa.struct([_field_without_views(field) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(_field_without_views(kind.key_field), _field_without_views(kind.item_field))
    if pa.types.is_list(kind):
        return pa.list_(_field_without_views(kind.value_field))
    if pa.types.is_large_list(kind):
        return pa.large_list(_field_without_views(kind.value_field))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_field_without_views(kind.value_field), kind.list_size)
    return kind


def _field_without_views(field: pa.Field) -> pa.Field:
    return field.with_type(_without_views(field.type))
