"""Encodes columns as Avro, Protobuf or JSON, with the schema's id of a registry: ``value.format``, ``key.format``."""
