"""Which extension types have values that can be written."""

from __future__ import annotations

import pyarrow as pa
import pytest

from kafka_sink.records.extension_types import content_type, with_unknown_types


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (pa.uuid(), pa.binary(16)),
        (pa.json_(pa.string()), pa.string()),
        # Only the library that made the column knows what these mean.
        (pa.opaque(pa.binary(16), "hugeint", "DuckDB"), None),
        (pa.opaque(pa.string(), "bit", "DuckDB"), None),
        (pa.bool8(), None),
    ],
)
def test_the_storage_is_the_content_if_it_is_text_or_bytes(
    kind: pa.BaseExtensionType, content: pa.DataType | None
) -> None:
    assert content_type(kind) == content


def test_extension_types_that_pyarrow_does_not_know_become_opaque() -> None:
    unknown = {"ARROW:extension:name": "its.own"}
    fields = [
        pa.field("numbers", pa.int64(), metadata=unknown),
        pa.field("text", pa.string(), metadata=unknown),
        pa.field("list", pa.list_(pa.field("item", pa.int8(), metadata=unknown))),
        pa.field("plain", pa.int64()),
    ]
    numbers, text, within, plain = with_unknown_types(pa.schema(fields)).types
    assert numbers == pa.opaque(pa.int64(), "its.own", "")
    assert (text, plain) == (pa.string(), pa.int64())
    assert within == pa.opaque(pa.list_(pa.int8()), "its.own", "")
