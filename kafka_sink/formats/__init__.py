"""``value.format`` and ``key.format``: encode columns as Avro, Protobuf or JSON, with schemas from a
registry."""
