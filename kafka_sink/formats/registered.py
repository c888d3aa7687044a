"""Schemas as a registry has them."""

from __future__ import annotations

from dataclasses import dataclass

from kafka_sink.errors import SchemaError

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
