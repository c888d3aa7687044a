"""Arrow's extension types: which of them have values that can be written.

An extension type gives its storage a meaning. If only the library that made a column knows that meaning, the
storage must not be written: DuckDB's HUGEINT are 16 bytes that no consumer could read as a number.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

UUID, BOOL8, _OPAQUE = "arrow.uuid", "arrow.bool8", "arrow.opaque"
# Libraries put the name of an extension type here. pyarrow reads it for the types that it knows.
_NAME = b"ARROW:extension:name"
# Python objects. Their addresses are what Polars hands over.
POLARS_OBJECT = pa.opaque(pa.binary(8), "Object", "Polars")


def content_type(kind: pa.BaseExtensionType) -> pa.DataType | None:
    """The storage type if the text or bytes in the storage are the values; None for other types."""
    storage = kind.storage_type
    if kind.extension_name == UUID:
        return storage
    return storage if kind.extension_name != _OPAQUE and _is_content(storage) else None


def _is_content(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_content(kind.value_type)
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    is_bytes = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)
    return bool(is_text or is_bytes)


def with_unknown_types(schema: pa.Schema) -> pa.Schema:
    """The schema, with arrow.opaque as the type of each column of an extension type that pyarrow does not
    know: else its storage would be taken for its values."""
    for place, field in enumerate(schema):
        name = next(_unknown_names(field), None)
        if name is not None:
            schema = schema.set(place, field.with_type(pa.opaque(field.type, name, "")))
    return schema


def _unknown_names(field: pa.Field) -> Iterator[str]:
    kind, name = field.type, (field.metadata or {}).get(_NAME)
    if isinstance(kind, pa.BaseExtensionType):
        return
    if name is not None and not _is_content(kind):
        yield name.decode(errors="replace")
    children: list[pa.Field] = []
    if pa.types.is_struct(kind):
        children = list(kind)
    elif pa.types.is_map(kind):
        children = [kind.key_field, kind.item_field]
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        children = [kind.value_field]
    for child in children:
        yield from _unknown_names(child)


def shown(kind: pa.DataType) -> str:
    """A type's name for an error."""
    if not isinstance(kind, pa.BaseExtensionType):
        return str(kind)
    if kind.extension_name != _OPAQUE:
        return str(kind.extension_name)
    return f"{kind.type_name} of {kind.vendor_name}" if kind.vendor_name else str(kind.type_name)
