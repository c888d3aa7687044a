"""The message schemas that the codecs are tested with are those of the newest Apache Kafka.

Other tests compare each request byte for byte with kafka-python's, and write each response by the schemas
that kafka-python includes. kafka-clients includes the schemas themselves. If both agree in a version, then
the codec agrees with Kafka in that version.
"""

from __future__ import annotations

import json
import re
import struct
import zipfile
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from kafka_sink.network import admin_requests, apis
from tests.support.response_checks import every_version
from tests.support.schema_responses import covers, schema, uvarint

Schema = dict[str, Any]
# The APIs whose newest version this client does not use, with that version and the reason.
NOT_USED = {
    "InitProducerId": (6, "there is no two-phase commit (KIP-939)"),
    "CreateTopics": (7, "nothing is read of the topic that was created"),
    "DescribeConfigs": (4, "no documentation of settings is read"),
    "OffsetFetch": (10, "it identifies topics by id, and progress markers belong to no topic that exists"),
    "TxnOffsetCommit": (6, "it identifies topics by id, as OffsetFetch does"),
    "FindCoordinator": (6, "it finds the coordinators of share groups"),
    "ApiVersions": (5, "it lets a broker check the cluster and node for which the client takes it"),
    "AddPartitionsToTxn": (5, "brokers alone use version 4 and later"),
}
# Fields that Kafka has given another name, by their names in kafka-python.
RENAMED = {"GenerationId int32": "GenerationIdOrMemberEpoch int32"}
# kafka-python lacks KIP-714. The fields of the requests, which `kafka_sink` writes for version 0 only.
TELEMETRY = {
    "GetTelemetrySubscriptions": ["ClientInstanceId uuid"],
    "PushTelemetry": [
        *("ClientInstanceId uuid", "SubscriptionId int32", "Terminating bool", "CompressionType int8"),
        "Metrics bytes",
    ],
}
EACH_API = pytest.mark.parametrize("key", apis.APIS, ids=lambda key: apis.APIS[key].name)


@pytest.fixture(scope="module")
def of_kafka(kafka_jars: Path) -> Callable[[str, str], Schema]:
    """Reads the schema of an API's "Request" or "Response" from Kafka's jar."""
    (jar,) = kafka_jars.glob("kafka-clients-*.jar")
    with zipfile.ZipFile(jar) as archive:
        folder = "common/message/"
        texts = {
            Path(name).stem: archive.read(name).decode()
            for name in archive.namelist()
            if name.startswith(folder) and name.endswith(".json")
        }
    return lambda name, kind: parsed(texts[name + kind])


def parsed(text: str) -> Schema:
    return dict(json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE)))


def of_kafka_python(name: str, kind: str) -> Schema:
    if kind == "Response":
        return schema(name)
    return parsed((files("kafka.protocol.schemas.resources") / f"{name}{kind}.json").read_text())


def fields_of(schema: Schema, version: int) -> Iterator[str]:
    """One line for each field that this version contains: its path, its type, and its tag if it has one."""
    structs = {struct["name"]: struct["fields"] for struct in schema.get("commonStructs", ())}

    def visit(path: str, fields: list[Schema]) -> Iterator[str]:
        for field in fields:
            if not covers(field["versions"], version):
                continue
            kind = field["type"].removeprefix("[]")
            inner = field.get("fields") or structs.get(kind, [])
            nullable = " nullable" * covers(field.get("nullableVersions"), version)
            is_tagged = covers(field.get("taggedVersions"), version)
            tagged = f" tag {field['tag']}" if is_tagged else ""
            shown = "[]" * field["type"].startswith("[]") + ("struct" if inner else kind)
            yield f"{path}{field['name']} {shown}{nullable}{tagged}"
            yield from visit(f"{path}{field['name']}.", inner)

    return visit("", schema["fields"])


@EACH_API
def test_the_schemas_of_kafka_python_are_those_of_kafka(
    of_kafka: Callable[[str, str], Schema], key: int
) -> None:
    api = apis.APIS[key]
    for kind in ("Request", "Response"):
        kafkas = of_kafka(api.name, kind)
        assert kafkas["apiKey"] == key
        for version in every_version(key):
            if not covers(kafkas["validVersions"], version):
                continue  # Kafka 4 has removed it; brokers before Kafka 4 need it.
            assert covers(kafkas["flexibleVersions"], version) == (version >= api.first_flexible)
            if kind == "Request" and api.name in TELEMETRY:
                expected = TELEMETRY[api.name]
            else:
                fields = fields_of(of_kafka_python(api.name, kind), version)
                expected = [RENAMED.get(field, field) for field in fields]
            assert list(fields_of(kafkas, version)) == expected, (kind, version)


@EACH_API
def test_the_newest_version_is_used_or_left_out_for_a_reason(
    of_kafka: Callable[[str, str], Schema], key: int
) -> None:
    api = apis.APIS[key]
    newest = int(of_kafka(api.name, "Request")["validVersions"].rpartition("-")[2])
    left_out, _ = NOT_USED.get(api.name, (api.versions[1], ""))
    assert newest == left_out


def test_telemetry_requests_have_their_fields_in_order() -> None:
    identity = bytes(range(16))
    assert admin_requests.encode_get_subscription(identity) == identity + b"\0"
    metrics = b"m" * 300
    push = admin_requests.encode_push(identity, 7, metrics, terminating=True)
    assert push == identity + struct.pack(">i?b", 7, True, 0) + uvarint(301) + metrics + b"\0"
