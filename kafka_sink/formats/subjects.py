"""Which schema of which subject a part of records has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kafka_sink.errors import SchemaError
from kafka_sink.formats.registered import KINDS, RegisteredSchema, Schema
from kafka_sink.options import SinkOptions

if TYPE_CHECKING:
    import pyarrow as pa

    from kafka_sink.formats.registry import Registry

# Of a derived schema, as Spark's to_avro has it.
_DEFAULT_NAME = "topLevelRecord"


def message_name(options: SinkOptions, part: str) -> str:
    """Which message of a Protobuf schema it is; empty for its first one."""
    name = str(getattr(options, f"{part}_record_name"))
    return "" if name == _DEFAULT_NAME else name


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the options say about the schema of ``part``, whose column is ``field``."""

    options: SinkOptions
    part: str
    format_name: str
    field: pa.Field

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that have a subject each; one that is empty where they share the schema."""
        is_shared = self._strategy == "RecordNameStrategy" or self._of_part("schema_id") != -1
        if is_shared or self.options.topic is not None:
            return ("",)
        return tuple(dict.fromkeys(self.options.schema_registry_topics))

    def registered(self, registry: Registry, topic: str) -> RegisteredSchema:
        """Ask the registry. Raises RegistryError, SchemaError."""
        from kafka_sink.formats import encoders

        if (schema_id := int(self._of_part("schema_id"))) != -1:
            return registry.by_id(schema_id)
        own = self._own_schema()
        subject = self._subject(topic or self.options.topic or "", own)
        if self.options.use_latest_version:
            return registry.latest(subject)
        if (version := int(self._of_part("schema_version"))) != -1:
            return registry.version(subject, version)
        schema = own if own is not None else self._derived()
        # Whatever does not fit a given schema must not be registered first.
        encoders.encoder(self.format_name, schema, self.field.type, self.field.name, self.message)
        if self.options.auto_register_schemas:
            return registry.register(subject, schema)
        return registry.look_up(subject, schema)

    @property
    def message(self) -> str:
        """The name of a Protobuf message."""
        return message_name(self.options, self.part)

    def known(self, registry: Registry, topic: str) -> RegisteredSchema:
        """The schema that the subject has, without a look at the columns; nothing is registered."""
        if self._of_part("schema_id") != -1 or self._of_part("schema_version") != -1:
            return self.registered(registry, topic)
        return registry.latest(self._subject(topic or self.options.topic or "", self._own_schema()))

    @property
    def _strategy(self) -> str:
        return str(self._of_part("subject_name_strategy"))

    def _of_part(self, name: str) -> str | int:
        value: str | int = getattr(self.options, f"{self.part}_{name}")
        return value

    def _own_schema(self) -> Schema | None:
        text = str(self._of_part("schema"))
        return Schema(KINDS[self.format_name], text) if text else None

    def _derived(self) -> Schema:
        from kafka_sink.formats import encoders

        return encoders.derived(self.format_name, self.field, str(self._of_part("record_name")))

    def _subject(self, topic: str, own: Schema | None) -> str:
        if self._strategy == "TopicNameStrategy":
            return f"{topic}-{self.part}"
        from kafka_sink.formats import encoders

        name = str(self._of_part("record_name"))
        if own is not None:
            name = encoders.full_name(self.format_name, own, self.message)
        if not name:
            raise SchemaError(
                f"{self.part}.subject.name.strategy={self._strategy} needs a schema of a record, which has a "
                "name"
            )
        return name if self._strategy == "RecordNameStrategy" else f"{topic}-{name}"
