"""``value.format`` and ``key.format``: columns as Avro, Protobuf or JSON by a registry's schemas."""
