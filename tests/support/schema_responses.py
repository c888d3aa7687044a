"""Random responses in Kafka's own format, written by its message schemas, which kafka-python brings along."""

from __future__ import annotations

import json
import random
import re
import struct
from importlib.resources import files
from typing import Any

NUMBERS = {"int8": (">b", 7), "int16": (">h", 15), "int32": (">i", 31), "int64": (">q", 63)}


# KIP-714's, which kafka-python lacks: the fields by name and type, of version 0.
_TELEMETRY = {
    "GetTelemetrySubscriptions": "ThrottleTimeMs int32, ErrorCode int16, ClientInstanceId uuid, "
    "SubscriptionId int32, AcceptedCompressionTypes []int8, PushIntervalMs int32, TelemetryMaxBytes int32, "
    "DeltaTemporality bool, RequestedMetrics []string",
    "PushTelemetry": "ThrottleTimeMs int32, ErrorCode int16",
}


def schema(name: str) -> dict[str, Any]:
    if name in _TELEMETRY:
        pairs = [field.split() for field in _TELEMETRY[name].split(", ")]
        fields = [{"name": one, "type": kind, "versions": "0+"} for one, kind in pairs]
        return {"name": f"{name}Response", "flexibleVersions": "0+", "fields": fields}
    path = files("kafka.protocol.schemas.resources") / f"{name}Response.json"
    text = re.sub(r"^\s*//.*$", "", path.read_text(), flags=re.MULTILINE)
    return dict(json.loads(text))


def list_names(name: str, version: int) -> list[str]:
    found = schema(name)
    structs = {one["name"]: one["fields"] for one in found.get("commonStructs", ())}
    names: list[str] = []

    def visit(fields: list[dict[str, Any]]) -> None:
        for field in fields:
            if covers(field["versions"], version):
                names.extend([field["name"]] if field["type"].startswith("[]") else [])
                visit(field.get("fields") or structs.get(field["type"].strip("[]"), []))

    visit(found["fields"])
    return names


def covers(versions: str | None, version: int) -> bool:
    if not versions or versions == "none":
        return False
    low, _, high = versions.rstrip("+").partition("-")
    return int(low) <= version and (versions.endswith("+") or version <= int(high or low))


def uvarint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append((value & 0x7F) | 0x80)
        value >>= 7
    return bytes([*out, value])


class ResponseWriter:
    """Writes responses of one version with values drawn by ``chance``. ``most``: elements in a list."""

    def __init__(self, name: str, version: int, chance: random.Random, most: int = 3) -> None:
        self._schema = schema(name)
        self._structs = {one["name"]: one["fields"] for one in self._schema.get("commonStructs", ())}
        self._version = version
        self._chance = chance
        self._most = most
        self.flexible = covers(self._schema["flexibleVersions"], version)

    def response(self, **given: Any) -> tuple[dict[str, Any], bytes]:
        """The values by name, and the payload with its header. ``given``: values that are not drawn."""
        values, body = self._struct(self._schema["fields"], given)
        tagged = self.flexible and self._schema["name"] != "ApiVersionsResponse"
        return values, bytes(4) + (self._unknown_tags() if tagged else b"") + body

    def _struct(self, fields: list[dict[str, Any]], given: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        values: dict[str, Any] = {}
        body, tags = b"", {}
        for field in fields:
            if not covers(field["versions"], self._version):
                continue
            tagged = covers(field.get("taggedVersions"), self._version)
            if tagged and self._chance.random() < 0.5:
                continue
            values[field["name"]], data = self._value(field, given)
            if tagged:
                tags[field["tag"]] = data
            else:
                body += data
        return values, body + (self._unknown_tags(tags) if self.flexible else b"")

    def _unknown_tags(self, known: dict[int, bytes] | None = None) -> bytes:
        tags = dict(known or {})
        if self._chance.random() < 0.2:
            tags[self._chance.choice([70, 300])] = self._chance.randbytes(self._chance.choice([0, 3, 200]))
        parts = [uvarint(tag) + uvarint(len(data)) + data for tag, data in sorted(tags.items())]
        return uvarint(len(parts)) + b"".join(parts)

    def _value(self, field: dict[str, Any], given: dict[str, Any]) -> tuple[Any, bytes]:
        kind, name = field["type"], field["name"]
        nullable = covers(field.get("nullableVersions"), self._version)
        is_null = nullable and name not in given and self._chance.random() < 0.3
        if kind.startswith("[]"):
            if is_null:
                return None, self._length(-1)
            return self._list(field, kind[2:], given)
        if kind in NUMBERS:
            form, bits = NUMBERS[kind]
            value = given[name](self._chance) if name in given else self._number(bits)
            return value, struct.pack(form, value)
        if kind == "bool":
            truth = self._chance.random() < 0.5
            return truth, bytes([truth])
        if kind == "uuid":
            identity = self._chance.choice([bytes(16), self._chance.randbytes(16)])
            return identity, identity
        if kind in ("string", "bytes"):
            if is_null:
                return None, self._length(-1, short=kind == "string")
            text = given[name](self._chance) if name in given else self._text()
            data = text.encode()
            return (text if kind == "string" else data), self._length(
                len(data), short=kind == "string"
            ) + data
        return self._struct(field.get("fields") or self._structs[kind], given)

    def _list(self, field: dict[str, Any], kind: str, given: dict[str, Any]) -> tuple[list[Any], bytes]:
        given = self._of_list(field, kind, given)
        count = given.get(f"len({field['name']})", self._chance.randint(0, self._most))
        element = {**field, "type": kind, "nullableVersions": None}
        found = [self._value(element, given) for _ in range(count)]
        return [value for value, _ in found], self._length(count) + b"".join(data for _, data in found)

    def _of_list(self, field: dict[str, Any], kind: str, given: dict[str, Any]) -> dict[str, Any]:
        """The values given for the list and its elements."""
        return given

    def _length(self, length: int, *, short: bool = False) -> bytes:
        if self.flexible:
            return uvarint(length + 1)
        return struct.pack(">h" if short else ">i", length)

    def _number(self, bits: int) -> int:
        drawn = self._chance.randint(0, 2 ** self._chance.randint(1, bits) - 1)
        return int(self._chance.choice([-1, 0, 1, 2**bits - 1, drawn]))

    def _text(self) -> str:
        return self._chance.choice(["", "a", "é", "topic-1", "x" * 130, f"n{self._chance.randint(0, 9)}"])


class FloodWriter(ResponseWriter):
    """Writes one list of ``count`` elements that are as short as possible, and all different; the lists in
    and around this list have ``others`` elements."""

    def __init__(self, name: str, version: int, flooded: str, count: int, others: int) -> None:
        super().__init__(name, version, random.Random(1))
        self._flooded, self._count, self._others = flooded, count, others
        self._drawn = 0

    def _of_list(self, field: dict[str, Any], kind: str, given: dict[str, Any]) -> dict[str, Any]:
        count = self._count if field["name"] == self._flooded else self._others
        number = iter(range(count))
        if field["name"] == "Partitions" and kind != "int32":
            given = {**given, "PartitionIndex": lambda _: next(number)}
        return {**given, f"len({field['name']})": count}

    def _number(self, bits: int) -> int:
        self._drawn += 1
        return int(self._drawn % 2**bits)

    def _text(self) -> str:
        self._drawn += 1
        return "".join(chr(0x21 + self._drawn // 90**place % 90) for place in range(3))

    def _unknown_tags(self, known: dict[int, bytes] | None = None) -> bytes:
        parts = [uvarint(tag) + uvarint(len(data)) + data for tag, data in (known or {}).items()]
        return uvarint(len(parts)) + b"".join(parts)
