"""Which columns are encoded, and by which schemas: planned on the driver, once for each job, for tasks.

Planning asks the registry for schemas, and checks that the columns fit them. What it has found is noted for
the micro-batches of a query, which ask no more and go on if the registry is down. Imports nothing heavy:
commits load it, too.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from kafka_sink import spark_application
from kafka_sink.driver import driver_log
from kafka_sink.errors import RegistryError, SchemaError
from kafka_sink.options import SinkOptions
from kafka_sink.options.table import FORMATS, SPECS
from kafka_sink.rows.column_plan import named_columns

if TYPE_CHECKING:
    import pyarrow as pa


# Of the sink itself: the parts of a record beside its value.
OWN = ("key", "topic", "headers", "partition", "timestamp")
HEADERS_TYPE = "array<struct<key:string,value:binary>>"
# Of the schema's GUID or id, as newer deserializers look for it.
ID_HEADERS = {"value": "__value_schema_id", "key": "__key_schema_id"}
# Of a derived schema, as Spark's to_avro has it.
_DERIVED_NAME = "topLevelRecord"


@dataclass(frozen=True, slots=True)
class PartFormat:
    """How the value or the key becomes bytes: ``part`` is which, ``format`` is avro, json or protobuf.

    ``schemas`` are by topic, or one under "" for all. ``column`` is the place of its column in Spark's
    batches, or the places and names of those that become a record. ``message`` names one of Protobuf's.
    """

    part: str
    format: str
    column: int | tuple[tuple[int, str], ...]
    schemas: tuple[tuple[str, RegisteredSchema], ...]
    in_header: bool = False
    message: str = ""

    def __str__(self) -> str:
        """For the summary: the format, and each subject with version and id."""
        found = sorted({str(schema) for _, schema in self.schemas})
        more = f" and {len(found) - 3:,} more" if len(found) > 3 else ""
        return f"{self.part} as {self.format} by {', '.join(found[:3])}{more}"


@dataclass(frozen=True, slots=True)
class RowEncoding:
    """``parts`` are encoded; ``kept`` are the columns that go on as they are: name, Spark's type, place."""

    parts: tuple[PartFormat, ...]
    kept: tuple[tuple[str, str, int], ...]

    @property
    def columns(self) -> list[tuple[str, str]]:
        """The columns of encoded batches, with Spark's types."""
        columns = [(part.part, "binary") for part in self.parts]
        columns += [(name, kind) for name, kind, _ in self.kept]
        if any(part.in_header for part in self.parts) and "headers" not in dict(columns):
            columns.append(("headers", HEADERS_TYPE))
        return columns


def message_name(options: SinkOptions, part: str) -> str:
    """Which message of a Protobuf schema it is; empty for its first one."""
    name = str(getattr(options, f"{part}_record_name"))
    return "" if name == _DERIVED_NAME else name


def layout(
    columns: Sequence[tuple[str, str]], formats: dict[str, str], topic: str | None
) -> tuple[dict[str, int | tuple[tuple[int, str], ...]], tuple[tuple[str, str, int], ...]]:
    """Which columns each encoded part is made of, and which go on as they are.

    ``formats``: of value and key, without those that are bytes. A part without a column is left out.
    """
    places = {name: index for index, (name, _) in enumerate(columns)}
    parts: dict[str, int | tuple[tuple[int, str], ...]] = {}
    for part in formats:
        if part in places:
            parts[part] = places[part]
        elif part == "value":
            parts[part] = tuple((index, name) for name, index in places.items() if name not in OWN)
    kept = tuple(
        (name, kind, index)
        for index, (name, kind) in enumerate(columns)
        if (name in OWN or name == "value")
        and name not in parts
        and not (name == "topic" and topic is not None)
    )
    return parts, kept


# Of schemas, by format.
KINDS = {"avro": "AVRO", "json": "JSON", "protobuf": "PROTOBUF"}
# A second's work, and far more than real schemas need.
_MAX_STEPS = 200_000


@dataclass(frozen=True, slots=True)
class Schema:
    """``kind`` is AVRO, PROTOBUF or JSON; ``references`` are (name, text) of the schemas that it uses, each
    after those that it uses itself."""

    kind: str
    text: str
    references: tuple[tuple[str, str], ...] = ()


class Steps:
    """How many steps may be spent on one schema: a short one can name its parts so often that they never
    end."""

    def __init__(self) -> None:
        self._left = _MAX_STEPS

    def take(self, count: int = 1) -> None:
        """Raise SchemaError once they are used up, from then on always."""
        self._left -= count
        if self._left < 0:
            raise SchemaError("the schema names its own parts too often to be followed: make it simpler")


@dataclass(frozen=True, slots=True)
class RegisteredSchema:
    """A schema with its id, and where it is registered: subject and version, "" and -1 where only the id is
    known. ``guid`` is empty for registries that have none."""

    schema: Schema
    id: int
    guid: str = ""
    subject: str = ""
    version: int = -1

    def __str__(self) -> str:
        version = f" version {self.version}" if self.version != -1 else ""
        return f"{self.subject}{version} (id {self.id})" if self.subject else f"schema id {self.id}"


# What Spark passes for a variant is a struct of its two binaries.
_VARIANT = re.compile(r"(?:^|[:<,])variant(?:$|[,>])")
# Beyond what is read of a note.
_MAX_NOTE = 1_000_000
Columns = Sequence[tuple[str, str]]
Schemas = tuple[tuple[str, RegisteredSchema], ...]


def plan(
    options: SinkOptions, columns: Columns, arrow_schema: Callable[[], pa.Schema], query: str | None
) -> RowEncoding | None:
    """How rows are encoded; None if key and value are bytes already.

    ``arrow_schema`` gives the columns' types in Arrow. ``query`` is set for micro-batches. Raises
    RegistryError and, naming the field, SchemaError.
    """
    named = {part: getattr(options, f"{part}_format") for part in ID_HEADERS}
    formats = {part: name for part, name in named.items() if name != "bytes"}
    if not formats:
        return None
    _check(columns)
    parts, kept = layout(columns, formats, options.topic)
    if "key" in formats and "key" not in parts:
        raise SchemaError(f"key.format={formats['key']}, but there is no column 'key'")
    if "value" in parts and parts["value"] == ():
        raise SchemaError("there is no column for the value: each is another part of the record")
    schemas = _known_or_found(options, columns, parts, arrow_schema, query)
    return RowEncoding(
        tuple(
            PartFormat(
                part,
                formats[part],
                column,
                schemas[part],
                options.schema_id_location == "header",
                message_name(options, part),
            )
            for part, column in parts.items()
        ),
        kept,
    )


def _check(columns: Columns) -> None:
    """Raise SchemaError for columns that Spark does not hand over, or not as what they are."""
    for name, (_, kind) in named_columns(columns).items():
        if _VARIANT.search(kind):
            raise SchemaError(
                f"column '{name}' has the type {kind}, and variants have no schema: make it text, as in "
                f".withColumn('{name}', to_json('{name}'))"
            )


def _known_or_found(
    options: SinkOptions,
    columns: Columns,
    parts: dict[str, Any],
    arrow_schema: Callable[[], pa.Schema],
    query: str | None,
) -> dict[str, Schemas]:
    key = _key(options, columns, query)
    noted = spark_application.noted_within(key, math.inf)
    if noted is not None and query is not None:
        return _read(noted)
    try:
        found = _found(options, parts, arrow_schema())
    except RegistryError as error:
        if noted is None or not error.is_temporary:
            raise
        driver_log.warn(f"kafka-chunked: {error}. The write goes on with the schemas of the one before")
        return _read(noted)
    written = _written(found)
    if len(written) < _MAX_NOTE:
        spark_application.note(key, written)
    return found


def _key(options: SinkOptions, columns: Columns, query: str | None) -> str:
    """Of writes that use the same schemas."""
    settings = [
        (spec.name, spec.kind.show(getattr(options, spec.attribute)))
        for spec in SPECS
        if spec.group == FORMATS and not spec.secret
    ]
    text = json.dumps([settings, options.topic, list(columns), query])
    return f"schemas/{hashlib.sha256(text.encode()).hexdigest()}"


def _written(found: dict[str, Schemas]) -> str:
    """Each schema once: many topics may share one."""
    distinct = list(dict.fromkeys(one.schema for schemas in found.values() for _, one in schemas))
    parts = {
        part: [(topic, {**asdict(one), "schema": distinct.index(one.schema)}) for topic, one in schemas]
        for part, schemas in found.items()
    }
    return json.dumps({"schemas": [asdict(schema) for schema in distinct], "parts": parts})


def _read(noted: str) -> dict[str, Schemas]:
    read = json.loads(noted)
    distinct = [
        Schema(one["kind"], one["text"], tuple((name, text) for name, text in one["references"]))
        for one in read["schemas"]
    ]
    return {
        part: tuple(
            (topic, RegisteredSchema(**{**fields, "schema": distinct[fields["schema"]]}))
            for topic, fields in schemas
        )
        for part, schemas in read["parts"].items()
    }


def _found(options: SinkOptions, parts: dict[str, Any], kinds: pa.Schema) -> dict[str, Schemas]:
    from kafka_sink.formats import row_encoder
    from kafka_sink.formats.registry import Registry, Wanted

    found: dict[str, Schemas] = {}
    for part, column in parts.items():
        format_name, field = getattr(options, f"{part}_format"), _field(part, column, kinds)
        wanted = Wanted(options, part, format_name, field)
        with Registry(options, format_name) as registry:
            schemas = {topic: wanted.registered(registry, topic) for topic in wanted.topics}
        known: dict[Schema, Schema] = {}
        for topic, one in schemas.items():
            # The same object for all: tasks get it once.
            schemas[topic] = replace(one, schema=known.setdefault(one.schema, one.schema))
        for schema in known:
            row_encoder.encoder_of(format_name, schema, field.type, field.name, wanted.message)
        found[part] = tuple(schemas.items())
    return found


def _field(part: str, column: Any, kinds: pa.Schema) -> pa.Field:
    """The part as one column; of several columns a struct without a name."""
    import pyarrow as pa

    if isinstance(column, int):
        return kinds.field(column).with_name(part)
    fields = [kinds.field(place).with_name(name) for place, name in column]
    return pa.field("", pa.struct(fields), nullable=False)


def check_schemas(options: SinkOptions) -> Iterator[tuple[str, RegistryError | None]]:
    """For the doctor: each part with the schema that the registry has for it now, or the error. Nothing is
    registered."""
    import pyarrow as pa

    from kafka_sink.formats.registry import Registry, Wanted

    for part in ID_HEADERS:
        format_name = getattr(options, f"{part}_format")
        if format_name == "bytes":
            continue
        wanted = Wanted(options, part, format_name, pa.field(part, pa.null()))
        with Registry(options, format_name) as registry:
            for topic in wanted.topics:
                try:
                    yield f"{part} as {format_name} by {wanted.known(registry, topic)}", None
                except RegistryError as error:
                    yield f"{part} as {format_name}", error
