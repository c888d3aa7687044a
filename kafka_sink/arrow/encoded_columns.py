"""Columns of Arrow data where value.format or key.format encodes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa

from kafka_sink.arrow.columns import CONVERTED_ROWS, ArrowColumns, Convert, converter
from kafka_sink.errors import SchemaError
from kafka_sink.options import SinkOptions

if TYPE_CHECKING:
    from kafka_sink.dead_letters.refused_rows import RefusedRows
    from kafka_sink.rows.column_plan import ColumnPlan

Refuse = Callable[["RefusedRows", "ColumnPlan"], None]


def columns_of(schema: pa.Schema, options: SinkOptions, refuse: Refuse) -> ArrowColumns | EncodedColumns:
    """The columns of a schema. With a format, the registry is asked. Raises RegistryError, SchemaError."""
    return check_early(schema, options) or EncodedColumns(
        schema, options, refuse if options.errors_tolerance == "all" else None
    )


def check_early(schema: pa.Schema, options: SinkOptions) -> ArrowColumns | None:
    """The columns, as far as they need no registry: None with a format. Raises SchemaError."""
    if (options.value_format, options.key_format) == ("bytes", "bytes"):
        return ArrowColumns.of(schema, options.topic)
    return None


class EncodedColumns:
    """As ArrowColumns, for batches of which key or value are encoded."""

    def __init__(self, schema: pa.Schema, options: SinkOptions, refuse: Refuse | None) -> None:
        from kafka_sink.formats import planning
        from kafka_sink.formats.row_encoder import RowEncoder

        self.schema = schema
        named = [(field.name, str(field.type)) for field in schema]
        if len({name for name, _ in named}) < len(named):
            raise SchemaError("there are two columns of the same name: rename or drop one.")
        self._converts = tuple(_converts(schema))
        kinds = schema
        for place, convert in self._converts:
            field = schema.field(place)
            kinds = kinds.set(place, field.with_type(convert(pa.nulls(0, field.type)).type))
        encoding = planning.plan(options, named, lambda: schema, None)
        assert encoding is not None
        kept = {name: kinds.field(place) for name, _, place in encoding.kept}
        headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
        added = {"key": pa.binary(), "value": pa.binary(), "headers": headers}
        encoded = pa.schema([kept.get(name) or pa.field(name, added[name]) for name, _ in encoding.columns])
        self._columns = ArrowColumns.of(encoded, options.topic)
        self.plan, self.warnings = self._columns.plan, self._columns.warnings
        # For the summary.
        self.schemas = tuple(map(str, encoding.parts))

        def refuse_rows(rows: RefusedRows) -> None:
            assert refuse is not None
            refuse(rows, self.plan)

        self._encoder = RowEncoder(
            encoding,
            kinds,
            self.plan,
            None if refuse is None else refuse_rows,
            self._columns.converted,
        )

    def converted(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The batch's rows in order, as ``plan`` describes them. Raises InvalidRowError."""
        rows = CONVERTED_ROWS if self._converts else batch.num_rows
        for start in range(0, max(1, batch.num_rows), max(1, rows)):
            piece = batch.slice(start, rows)
            for place, convert in self._converts:
                piece = piece.set_column(place, self.schema.names[place], convert(piece.column(place)))
            for encoded in self._encoder.encoded(piece):
                yield from self._columns.converted(encoded)


def _converts(schema: pa.Schema) -> Iterator[tuple[int, Convert]]:
    """What columns need before they are encoded. Raises SchemaError for headers of another type."""
    for place, field in enumerate(schema):
        wanted = _without_views(field.type)
        if field.name == "headers":
            if (convert := converter("headers", field.type)) is not None:
                yield place, convert
        elif wanted != field.type:
            yield place, partial(pa.Array.cast, target_type=wanted)


_OF_VIEWS = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}


def _without_views(kind: pa.DataType) -> pa.DataType:  # noqa: PLR0911 - one a type
    """The type with offsets in place of views, of which Arrow takes no entries, at any depth."""
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
