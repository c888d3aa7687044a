"""Encodes Spark's Arrow batches. In the resulting batches, key and value are columns of bytes.

Rows that do not fit their schema cannot be encoded. Their dead letters contain them as JSON.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from kafka_sink.dead_letters.rejected_rows import RejectedRows
from kafka_sink.dead_letters.row_rejection import HEADERS, headers_with, rows_of_table
from kafka_sink.errors import InvalidRowError, SchemaError
from kafka_sink.formats import byte_columns, json_values
from kafka_sink.formats.byte_columns import Piece, Word
from kafka_sink.formats.columns import Encoder, UnfitRowsError, plain, present_only, reject
from kafka_sink.formats.schemas import ID_HEADERS, KINDS, PartFormat, RegisteredSchema, RowEncoding, Schema
from kafka_sink.records.arrays import (
    Int64s,
    as_binary,
    binary_of,
    indices,
    lengths,
    null_mask,
    numbers,
    strings_of,
    with_nulls,
)
from kafka_sink.rows.column_plan import ColumnPlan


def dead_letter_values(column: pa.Array) -> pa.Array:
    """Each entry as JSON, or null. Entries that JSON cannot represent, such as NaN, are Python's text."""
    column = plain(column)
    nulls = null_mask(column)
    try:
        pieces = present_only(
            column, nulls, lambda present: json_values.of_type(column.type, "").pieces(present, None)
        )
        return byte_columns.join(pieces, len(column), nulls)
    except (UnfitRowsError, SchemaError):
        # One row at a time is slow, but errors.max limits the number of such rows.
        return binary_of(
            [_shown(entry).encode(errors="replace") if entry.is_valid else None for entry in column]
        )


def _shown(entry: pa.Scalar) -> str:
    try:
        return str(entry)
    except (LookupError, OverflowError, ValueError):
        # Python's dates end with the year 9999, and this host may not know the time zone.
        return str(pa.repeat(entry, 1).to_string())


# The size of the rows that are encoded at once. More rows would not fit the CPU's caches.
_MAX_PIECE_BYTES = 4 << 20
_MAGIC_ID, _MAGIC_GUID = b"\0", b"\1"


def encoded(
    encoding: RowEncoding,
    batches: Iterator[pa.RecordBatch],
    plan: ColumnPlan,
    reject: Callable[[RejectedRows], None] | None,
) -> Iterator[pa.RecordBatch]:
    """Encode the batches. ``plan`` is the plan for encoded batches. Rows that do not fit their schema are
    passed to ``reject``. Without it, they raise InvalidRowError."""
    encoder: RowEncoder | None = None
    for batch in batches:
        if encoder is None:
            encoder = RowEncoder(encoding, batch.schema, plan, reject)
        yield from encoder.encoded(batch)


class RowEncoder:
    """Encodes batches of one schema. ``plan`` describes the encoded batches after ``convert``."""

    def __init__(
        self,
        encoding: RowEncoding,
        kinds: pa.Schema,
        plan: ColumnPlan,
        reject: Callable[[RejectedRows], None] | None,
        convert: Callable[[pa.RecordBatch], Iterator[pa.RecordBatch]] = lambda batch: iter((batch,)),
    ) -> None:
        self._encoding = encoding
        self._plan = plan
        self._reject = reject
        self._convert = convert
        self._parts = [PartEncoder(part, kinds) for part in encoding.parts]
        self._names = [name for name, _ in encoding.columns]
        self._topic = next((place for name, _, place in encoding.kept if name == "topic"), None)

    def encoded(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """The rows of the batch, in order, in one or more encoded batches. Raises InvalidRowError."""
        pieces = max(1, -(-batch.nbytes // _MAX_PIECE_BYTES))
        rows = max(1, -(-batch.num_rows // pieces))
        for start in range(0, max(1, batch.num_rows), rows):
            yield self._fitting(batch.slice(start, rows))

    def _fitting(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        while True:
            try:
                return self._encoded(batch)
            except UnfitRowsError as error:
                if self._reject is None:
                    raise InvalidRowError(
                        f"{error}, in {int(error.rows.sum())} of {batch.num_rows} rows",
                        error.rows,
                        str(error),
                    ) from None
                few = batch.take(indices(np.flatnonzero(error.rows)))
                self._reject(self._as_dead_letters(few, str(error)))
                batch = batch.take(indices(np.flatnonzero(~error.rows)))

    def _encoded(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        topics = None if self._topic is None else batch.column(self._topic)
        columns = [part.encoded(part.column_of(batch), topics) for part in self._parts]
        columns += [batch.column(place) for _, _, place in self._encoding.kept]
        for part in self._parts:
            if part.header is not None:
                columns = self._with_header(columns, part, topics, batch.num_rows)
        return pa.RecordBatch.from_arrays(columns, self._names)

    def _with_header(
        self, columns: list[pa.Array], part: PartEncoder, topics: pa.Array | None, rows: int
    ) -> list[pa.Array]:
        """The columns with one more header in each row whose part is not null: a tombstone has no schema."""
        place = self._names.index("headers")
        own = columns[place] if place < len(columns) else pa.nulls(rows, HEADERS)
        encoded, contents = columns[self._names.index(part.part)], part.ids(topics, rows)
        if encoded.null_count:
            contents = with_nulls(contents, null_mask(encoded))
        keys, values = own.flatten().flatten()
        counts, added = lengths(own).astype(np.int64), [((part.header or "").encode(), contents)]
        headers = headers_with(counts, keys, as_binary(values), added)
        return [*columns[:place], headers, *columns[place + 1 :]]

    def _as_dead_letters(self, rows: pa.RecordBatch, reason: str) -> RejectedRows:
        """Rows that could not be encoded. In their dead letters, the values are JSON."""
        columns = [dead_letter_values(part.column_of(rows)) for part in self._parts]
        columns += [rows.column(place) for _, _, place in self._encoding.kept]
        names = self._names[: len(columns)]
        if len(names) < len(self._names):
            columns.append(pa.nulls(rows.num_rows, HEADERS))
        table = pa.Table.from_batches(self._convert(pa.RecordBatch.from_arrays(columns, self._names)))
        every = np.ones(rows.num_rows, dtype=np.bool_)
        return rows_of_table(self._plan, table, InvalidRowError(reason, every, reason))


class PartEncoder:
    """Encodes the values or the keys of batches."""

    def __init__(self, part: PartFormat, kinds: pa.Schema) -> None:
        self.part = part.part
        self.header = ID_HEADERS[part.part] if part.in_header else None
        self._column = part.column
        kind = (
            kinds.field(part.column).type
            if isinstance(part.column, int)
            else pa.struct([kinds.field(place).with_name(name) for place, name in part.column])
        )
        registered = [schema for _, schema in part.schemas]
        self._topics = strings_of([topic for topic, _ in part.schemas])
        self._is_by_topic = part.schemas[0][0] != ""
        distinct = list(dict.fromkeys(schema.schema for schema in registered))
        path = "" if isinstance(part.column, tuple) else part.part
        self._encoders = [encoder_of(part.format, schema, kind, path, part.message) for schema in distinct]
        self._encoder_of = np.array([distinct.index(schema.schema) for schema in registered])
        indexes = [message_indexes(part.format, schema.schema, part.message) for schema in registered]
        named = [
            _name(schema, in_header=part.in_header) + own
            for schema, own in zip(registered, indexes, strict=True)
        ]
        nothing = [b""] * len(named)
        self._prefixes, self._header_values = (nothing, named) if part.in_header else (named, nothing)

    def column_of(self, batch: pa.RecordBatch) -> pa.Array:
        """The column to encode. Several columns become a struct."""
        if isinstance(self._column, int):
            return batch.column(self._column)
        arrays = [batch.column(place) for place, _ in self._column]
        return pa.StructArray.from_arrays(arrays, [name for _, name in self._column])

    def encoded(self, column: pa.Array, topics: pa.Array | None) -> pa.Array:
        """The framed bytes of each row; null where the column is null. Raises UnfitRowsError."""
        column = plain(column)
        places = self._places(topics)
        if not column.null_count:
            return byte_columns.join(self._pieces(column, places), len(column))
        nulls = null_mask(column)
        own = None if places is None else places[~nulls]
        pieces = present_only(column, nulls, lambda present: self._pieces(present, own))
        return byte_columns.join(pieces, len(column), nulls)

    def ids(self, topics: pa.Array | None, rows: int) -> pa.Array:
        """The value of each row's header with the schema's id."""
        places = self._places(topics)
        choice = np.zeros(rows, dtype=np.int32) if places is None else places
        return binary_of(self._header_values).take(indices(choice))

    def _places(self, topics: pa.Array | None) -> Int64s | None:
        """The index of each row's schema; None if all rows have the first schema."""
        if topics is None or not self._is_by_topic:
            return None
        index = pc.index_in(plain(topics), value_set=self._topics)
        missing = null_mask(index)
        # A null topic is rejected later, with its own message.
        unknown = missing & ~null_mask(topics) if topics.null_count else missing
        reject(
            unknown,
            "",
            f"the topic is not in schema.registry.topics, so there is no schema for its {self.part}",
        )
        return numbers(index.fill_null(0), np.int32).astype(np.int64)

    def _pieces(self, column: pa.Array, places: Int64s | None) -> list[Piece]:
        if places is None or len(self._prefixes) == 1:
            return [*byte_columns.constant(self._prefixes[0]), *self._encoders[0].pieces(column, None)]
        if len(self._encoders) == 1 and all(len(prefix) <= 8 for prefix in self._prefixes):
            return [self._prefix_words(places), *self._encoders[0].pieces(column, None)]
        return [self._by_schema(column, places) if len(places) else binary_of(())]

    def _prefix_words(self, places: Int64s) -> Word:
        lead = np.array([int.from_bytes(prefix, "little") for prefix in self._prefixes], dtype=np.uint64)
        sizes = np.array([len(prefix) for prefix in self._prefixes], dtype=np.int64)
        return Word(lead[places], sizes[places], int(sizes.max()))

    def _by_schema(self, column: pa.Array, places: Int64s) -> pa.Array:
        """Encode rows with the same schema together, and put all rows back into their order."""
        order = np.argsort(places, kind="stable")
        parts = []
        for place in np.unique(places):
            rows = np.flatnonzero(places == place)
            encoder = self._encoders[self._encoder_of[place]]
            try:
                own = encoder.pieces(column.take(indices(rows)), None)
            except UnfitRowsError as error:
                error.move(rows[error.rows], len(places))
                raise
            parts.append(byte_columns.join([*byte_columns.constant(self._prefixes[place]), *own], len(rows)))
        back = np.empty(len(order), dtype=np.int32)
        back[order] = np.arange(len(order), dtype=np.int32)
        return pa.concat_arrays(parts).take(indices(back))


def _name(schema: RegisteredSchema, *, in_header: bool) -> bytes:
    """The schema's id or GUID as deserializers expect it. In headers they accept both forms."""
    if in_header and schema.guid:
        return _MAGIC_GUID + uuid.UUID(schema.guid).bytes
    return _MAGIC_ID + schema.id.to_bytes(4, "big")


def encoder_of(format_name: str, schema: Schema, kind: pa.DataType, path: str, message: str = "") -> Encoder:
    """An encoder for columns of this type. ``path`` is the column's name in errors; it is empty for a record
    of columns. ``message`` is the name of a Protobuf message; without it, the schema's first message is used.
    Raises SchemaError, which names the field, if the columns do not fit the schema."""
    if schema.kind != KINDS[format_name]:
        raise SchemaError(f"the schema is {schema.kind}, but {path or 'value'}.format={format_name}")
    if format_name == "avro":
        from kafka_sink.formats import avro, avro_schema

        return avro.encoder(avro_schema.read(schema.text, schema.references), kind, path)
    if format_name == "json":
        return json_values.encoder(schema.text, schema.references, kind, path)
    from kafka_sink.formats import protobuf, protobuf_schema

    return protobuf.encoder(protobuf_schema.read(schema.text, schema.references), message, kind, path)


def message_indexes(format_name: str, schema: Schema, message: str) -> bytes:
    """The bytes after the schema's id: for Protobuf, the position of the message in the schema's file."""
    if format_name != "protobuf":
        return b""
    from kafka_sink.formats import protobuf, protobuf_schema

    return protobuf.indexes(protobuf_schema.read(schema.text, schema.references), message)
