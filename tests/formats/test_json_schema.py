"""JSON Schemas: what columns do not fit is named, and no schema costs more than a second."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from kafka_sink.errors import SchemaError
from kafka_sink.formats import json_schema

# Each has twice the parts of the one before.
_DOUBLING = {str(one): {"allOf": [{"$ref": f"#/d/{one - 1}"}] * 2} for one in range(1, 41)}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"type": "object", "required": ["y"]}, "requires field 'y', for which there is no column"),
        ({"properties": {"x": {"type": "string"}}}, "'x' has the type int64, but the schema requires string"),
        ({"additionalProperties": False, "properties": {}}, "column 'x' is not a property of the schema"),
        ({"properties": {"x": {"$ref": "#/d/n"}}, "d": {"n": {"type": "null"}}}, "column 'x'"),
        ({"properties": {"x": {"$ref": "#/definitions/n"}}, "definitions": {}}, "refers to"),
        ({"properties": {"x": {"$ref": "#/properties/x"}}}, "nested more than"),
        ({"properties": {"x": {"allOf": 5}}}, "cannot be read"),
        ({"properties": {"x": {"$ref": "#/d/40"}}, "d": {"0": {}} | _DOUBLING}, "too often"),
    ],
)
def test_planning_reports_columns_that_do_not_fit_the_schema(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(SchemaError, match=said):
        json_schema.check(json.dumps(schema), (), pa.struct([("x", pa.int64())]), "")


@pytest.mark.parametrize("kind", [pa.struct([("x", pa.int64())]), pa.map_(pa.string(), pa.int64())])
def test_a_name_that_may_match_a_pattern_is_left_to_validators(kind: pa.DataType) -> None:
    """Catches: "the schema allows no others" for the usual schema of a map."""
    schema = {"type": "object", "patternProperties": {"^x": {}}, "additionalProperties": False}
    json_schema.check(json.dumps(schema), (), kind, "")
    del schema["patternProperties"]
    with pytest.raises(SchemaError, match="allows no"):
        json_schema.check(json.dumps(schema), (), kind, "")
