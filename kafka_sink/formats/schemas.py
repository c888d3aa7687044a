"""Schemas, and the parts of records that are encoded with them: what planning finds out and tasks use."""

from __future__ import annotations

from dataclasses import dataclass

from kafka_sink.errors import SchemaError
from kafka_sink.options import SinkOptions
from kafka_sink.printable import first_of, printable
from kafka_sink.rows.column_plan import HEADERS_TYPE

# The headers in which newer deserializers look for the schema's GUID or id.
ID_HEADERS = {"value": "__value_schema_id", "key": "__key_schema_id"}
# The default name of a derived schema's record, as in Spark's to_avro.
_DERIVED_NAME = "topLevelRecord"
# The registry's schema type for each format.
KINDS = {"avro": "AVRO", "json": "JSON", "protobuf": "PROTOBUF"}
# About one second of work, and far more than real schemas need.
_MAX_STEPS = 200_000


@dataclass(frozen=True, slots=True)
class Schema:
    """A schema. ``kind`` is AVRO, PROTOBUF or JSON. ``references`` are (name, text) of the schemas that it
    uses, each after those that it uses itself."""

    kind: str
    text: str
    references: tuple[tuple[str, str], ...] = ()


def not_json(kind: str, text: str) -> SchemaError:
    return SchemaError(
        f"the {kind} schema is not JSON: {printable(text, 100)}. Options 'value.schema' and 'key.schema' "
        "contain the text of a schema, not the path of its file"
    )


class StepBudget:
    """How many steps may be spent on one schema. Even a short schema can refer to its own parts so often that
    following all references would never end."""

    def __init__(self) -> None:
        self._left = _MAX_STEPS

    def take(self, count: int = 1) -> None:
        """Use up steps. Raises SchemaError when none are left, and in every later call."""
        self._left -= count
        if self._left < 0:
            raise SchemaError("the schema refers to its own parts too often: simplify it")


@dataclass(frozen=True, slots=True)
class RegisteredSchema:
    """A schema with its id, and with the subject and version under which it is registered. If only the id is
    known, they are "" and -1. ``guid`` is empty for registries that have no GUIDs."""

    schema: Schema
    id: int
    guid: str = ""
    subject: str = ""
    version: int = -1

    def __str__(self) -> str:
        version = f" version {self.version}" if self.version != -1 else ""
        return f"{self.subject}{version} (id {self.id})" if self.subject else f"schema id {self.id}"


@dataclass(frozen=True, slots=True)
class PartFormat:
    """How the value or the key becomes bytes. ``part`` is value or key, ``format`` avro, json or protobuf.

    ``schemas`` are by topic, or one schema under "" for all topics. ``column`` is the index of its column in
    Spark's batches, or the indexes and names of the columns that become a record. ``message`` is the name of
    a Protobuf message.
    """

    part: str
    format: str
    column: int | tuple[tuple[int, str], ...]
    schemas: tuple[tuple[str, RegisteredSchema], ...]
    in_header: bool = False
    message: str = ""

    def __str__(self) -> str:
        """The text for the summary: the format, and each subject with version and id."""
        texts = sorted({str(schema) for _, schema in self.schemas})
        return f"{self.part} as {self.format} by {first_of(texts, 3)}"


@dataclass(frozen=True, slots=True)
class RowEncoding:
    """``parts`` are encoded. ``kept`` columns are passed on unchanged: name, Spark's type, index."""

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
    """The name of the message in a Protobuf schema; empty for its first message."""
    name = str(getattr(options, f"{part}_record_name"))
    return "" if name == _DERIVED_NAME else name
