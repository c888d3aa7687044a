"""``value.format`` and ``key.format``: columns as Avro, Protobuf or JSON, with their schema in a registry."""
