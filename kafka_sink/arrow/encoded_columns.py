"""Columns of Arrow data where value.format or key.format encodes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from kafka_sink.arrow.columns import ArrowColumns
from kafka_sink.errors import SchemaError
from kafka_sink.options import SinkOptions

if TYPE_CHECKING:
    from kafka_sink.dead_letters.refused_rows import RefusedRows
    from kafka_sink.rows.column_plan import ColumnPlan

Refuse = Callable[["RefusedRows", "ColumnPlan"], None]


def columns_of(schema: pa.Schema, options: SinkOptions, refuse: Refuse) -> ArrowColumns | EncodedColumns:
    """The columns of a schema. With a format, the registry is asked. Raises RegistryError, SchemaError."""
    if (options.value_format, options.key_format) == ("bytes", "bytes"):
        return ArrowColumns.of(schema, options.topic)
    return EncodedColumns(schema, options, refuse if options.errors_tolerance == "all" else None)


class EncodedColumns:
    """As ArrowColumns, for batches of which key or value are encoded."""

    def __init__(self, schema: pa.Schema, options: SinkOptions, refuse: Refuse | None) -> None:
        from kafka_sink.formats import planning
        from kafka_sink.formats.row_encoder import RowEncoder

        self.schema = schema
        named = [(field.name, str(field.type)) for field in schema]
        if len({name for name, _ in named}) < len(named):
            raise SchemaError("there are two columns of the same name: rename or drop one.")
        encoding = planning.plan(options, named, lambda: schema, None)
        assert encoding is not None
        kept = {name: schema.field(place) for name, _, place in encoding.kept}
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
            schema,
            self.plan,
            None if refuse is None else refuse_rows,
            lambda letters: next(self._columns.converted(letters)),
        )

    def converted(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The batch's rows in order, as ``plan`` describes them. Raises InvalidRowError."""
        for encoded in self._encoder.encoded(batch):
            yield from self._columns.converted(encoded)
