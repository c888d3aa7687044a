"""Which columns are encoded, and by which schemas: made at planning, and carried out in tasks.

Imports nothing heavy: planning and commits load it, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kafka_sink.errors import SchemaError

if TYPE_CHECKING:
    from kafka_sink.options import SinkOptions


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
