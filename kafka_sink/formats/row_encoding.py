"""Which columns are encoded, and by which schemas: made at planning, and carried out in tasks.

Imports nothing heavy: planning and commits load it, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kafka_sink.formats.registered import RegisteredSchema

# Of the sink itself: the parts of a record beside its value.
OWN = ("key", "topic", "headers", "partition", "timestamp")
HEADERS_TYPE = "array<struct<key:string,value:binary>>"
# Of the schema's GUID or id, as newer deserializers look for it.
ID_HEADERS = {"value": "__value_schema_id", "key": "__key_schema_id"}


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
