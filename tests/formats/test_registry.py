"""What planning asks of a real registry: TLS, logins, and what it says when there is none."""

from __future__ import annotations

import base64
import gzip
import json
import socket
import ssl
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka.schema_registry import Schema as ClientSchema
from confluent_kafka.schema_registry import SchemaRegistryClient, dual_schema_id_deserializer
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from kafka_sink import doctor
from kafka_sink.errors import ConfigurationError, RegistryError, SchemaError
from kafka_sink.formats import planning
from kafka_sink.formats import registry as registry_module
from kafka_sink.formats.registry import Registry
from kafka_sink.formats.row_encoder import RowEncoder
from kafka_sink.formats.schemas import PartFormat, RegisteredSchema, RowEncoding, Schema
from kafka_sink.options import parse
from kafka_sink.rows.column_plan import ColumnPlan
from local_kafka.schema_registry import LocalRegistry
from tests.support.http_server import Server
from tests.support.planned_formats import COLUMNS, KINDS, options, planned
from tests.support.security.certificates import Authority
from tests.support.security.token_server import TokenServer

USER, PASSWORD = "schema-user", "schema-secret"
_LOGIN = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


class RegistryGate(Server):
    """A registry behind TLS and a login, as production has them: a proxy in front of the real one. ``ca`` is
    the file that trusts it."""

    def __init__(self, registry: str, folder: Path) -> None:
        authority = Authority()
        self.ca = authority.pem_file(folder / "ca.pem")
        self._registry = registry
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(authority.issue("registry", "127.0.0.1").pem_file(folder / "gate.pem"))
        super().__init__(context)
        self.respond = self._pass_on

    def _pass_on(self, handler: BaseHTTPRequestHandler) -> tuple[int, dict[str, str], bytes]:
        method, path, headers, body = self.requests[-1]
        kind = {"Content-Type": headers.get("Content-Type", "application/json")}
        if headers.get("Authorization") != _LOGIN:
            return 401, kind, b'{"error_code": 40101, "message": "Unauthorized"}'
        request = urllib.request.Request(self._registry + path, body or None, kind, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, kind, response.read()
        except urllib.error.HTTPError as error:
            return error.code, kind, error.read()


@pytest.fixture
def gate(registry: LocalRegistry, tmp_path: Path) -> Iterator[RegistryGate]:
    with RegistryGate(registry.url, tmp_path) as running:
        yield running


def test_tls_and_a_login(gate: RegistryGate) -> None:
    given = {"schema__registry__url": gate.url, "schema__registry__ssl__ca__location": str(gate.ca)}
    login = {"schema__registry__basic__auth__user__info": f"{USER}:{PASSWORD}"}
    (part,) = planned(options(topic="secured", **given, **login)).parts
    ((topic, found),) = part.schemas
    assert topic == ""
    assert (found.subject, found.version) == ("secured-value", 1)
    wrong = {"schema__registry__basic__auth__user__info": f"{USER}:guess"}
    with pytest.raises(RegistryError, match=r"refuses the login \(HTTP 401: Unauthorized\)") as refused:
        planned(options(topic="other", **given, **wrong))
    assert "guess" not in str(refused.value)
    with pytest.raises(RegistryError, match="certificate verify failed"):
        planned(options(schema__registry__url=gate.url, topic="other", **login))


def test_a_registry_that_is_down_is_told_in_a_bound() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(RegistryError, match=r"cannot be reached: .*refused") as caught:
            planned(options(schema__registry__url=url))
        assert caught.value.is_temporary
        silent.listen()
        began = time.monotonic()
        with pytest.raises(RegistryError, match=r"schema.registry.timeout.ms"):
            planned(options(schema__registry__url=url, schema__registry__timeout__ms="300"))
        assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"schema__registry__url": ""}, "value.format=avro needs schema.registry.url"),
        ({"schema__registry__url": "http://u:p@host"}, "the login belongs in an option of its own"),
        ({"schema__registry__url": "http://host:99999"}, "port is not 1 to 65535"),
        ({"schema__registry__url": "http://host:x"}, "port is not 1 to 65535"),
        ({"schema__registry__bearer__auth__issuer__endpoint__url": "ftp://h"}, "does not begin with http://"),
        ({"value__schema": "{}", "use__latest__version": "true"}, "both select the schema"),
        ({"value__format": "protobuf"}, "value.format=protobuf needs a schema"),
        ({"value__format": "bytes"}, "has no effect without value.format or key.format"),
        ({"key__schema__id": "1"}, "has no effect without key.format"),
        ({"schema__registry__basic__auth__user__info": "nobody"}, "is not user:password"),
        ({"bearer__auth__client__secret": "x"}, "has no effect without schema.registry.bearer.auth.issuer"),
        ({"schema__registry__ssl__key__location": "/k"}, "has no effect without schema.registry.ssl.cert"),
    ],
)
def test_options_that_contradict_each_other(given: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        options(**({"schema__registry__url": "http://registry"} | given))


def test_a_column_that_a_registered_schema_forbids_is_told_at_planning(registry: LocalRegistry) -> None:
    made = options(schema__registry__url=registry.url, topic="changed")
    assert json.loads(planned(made).parts[0].schemas[0][1].schema.text)["name"] == "topLevelRecord"

    def with_added(*, nullable: bool) -> None:
        kinds = KINDS.append(pa.field("added", pa.int32(), nullable=nullable))
        planning.plan(made, [*COLUMNS, ("added", "int")], lambda: kinds, None)

    with SchemaRegistryClient({"url": registry.url}) as client:
        client.set_compatibility("changed-value", "BACKWARD")
        with pytest.raises(RegistryError, match=r"(?s)compatibility rule forbids the change.*added"):
            with_added(nullable=False)
        # A column that may be null has a default.
        with_added(nullable=True)
        assert client.get_versions("changed-value") == [1, 2]
        lookup = options(schema__registry__url=registry.url, topic="changed", auto__register__schemas="false")
        with pytest.raises(RegistryError, match="look up a schema"):
            planning.plan(lookup, [("other", "string")], lambda: pa.schema([("other", pa.string())]), None)
        fields = [{"name": "id", "type": "int"}, {"name": "name", "type": "string"}]
        schema = json.dumps({"type": "record", "name": "Row", "fields": fields})
        client.register_schema("narrow-value", ClientSchema(schema, "AVRO"))
        latest = options(schema__registry__url=registry.url, topic="narrow", use__latest__version="true")
        with pytest.raises(SchemaError, match="column 'id' has the type int64, but the schema requires int"):
            planned(latest)


def test_the_doctor_names_the_schema_or_what_is_wrong(registry: LocalRegistry) -> None:
    made = options(schema__registry__url=registry.url, topic="examined")
    (note,) = doctor.registry_findings(made)
    assert note.text == "schema registry: value as avro has no schema yet; a job registers one"
    planned(made)
    (found,) = doctor.registry_findings(made)
    assert found.level is doctor.Level.OK
    assert "value as avro by examined-value version 1 (id " in found.text
    missing = options(schema__registry__url=registry.url, topic="gone", use__latest__version="true")
    (problem,) = doctor.registry_findings(missing)
    assert problem.level is doctor.Level.PROBLEM
    assert "'gone-value'" in problem.text
    without_path = registry.url.partition("/apis")[0]
    (problem,) = doctor.registry_findings(options(schema__registry__url=without_path, topic="examined"))
    assert problem.level is doctor.Level.PROBLEM, "its 404 is not that of a missing subject"
    assert "Check schema.registry.url" in problem.text


@pytest.mark.parametrize("has_guid", [True, False])
def test_the_id_in_a_header_is_read_by_confluents_deserializer(
    registry: LocalRegistry, *, has_guid: bool
) -> None:
    """Apicurio has no GUIDs: of it, the header has the id."""
    made = options(schema__registry__url=registry.url, topic="headed", schema__id__location="header")
    schema = planned(made).parts[0].schemas[0][1]
    assert not schema.guid
    with SchemaRegistryClient.new_client({"url": "mock://" if has_guid else registry.url}) as client:
        if has_guid:
            found = client.register_schema_full_response("t-value", ClientSchema(schema.schema.text, "AVRO"))
            schema = replace(schema, id=found.schema_id or 0, guid=found.guid or "")
        headers, values = _in_headers(schema)
        content = b"\1" + uuid.UUID(schema.guid).bytes if has_guid else b"\0" + schema.id.to_bytes(4, "big")
        last = ("__value_schema_id", content)
        assert headers == [[("mine", b"1"), last], [last], [last]]
        deserialize = AvroDeserializer(client, conf={"schema.id.deserializer": dual_schema_id_deserializer})
        for number, (value, own_headers) in enumerate(zip(values, headers, strict=True)):
            context = SerializationContext("t", MessageField.VALUE, own_headers)
            assert deserialize(value, context) == {"id": number, "name": "somebody"}


def _in_headers(schema: RegisteredSchema) -> tuple[list[list[tuple[str, str | bytes | None]]], list[bytes]]:
    """Headers and values of three rows, of which the first has a header of its own."""
    part = PartFormat("value", "avro", ((0, "id"), (1, "name")), (("", schema),), in_header=True)
    encoding = RowEncoding((part,), (("headers", "", 2),))
    own = [[{"key": "mine", "value": b"1"}], None, []]
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    rows: list[dict[str, Any]] = [{"id": n, "name": "somebody"} for n in range(3)]
    batch = pa.RecordBatch.from_pylist(rows, KINDS).append_column("headers", pa.array(own, kind))
    plan = ColumnPlan.of(encoding.columns[:1], "t")
    (encoded,) = RowEncoder(encoding, batch.schema, plan, None).encoded(batch)
    headers = [
        [(one["key"], one["value"]) for one in entry] for entry in encoded.column("headers").to_pylist()
    ]
    return headers, encoded.column("value").to_pylist()


SECRET = "s3cret/+ of the registry"
LOGINS = {
    "basic": {"schema__registry__basic__auth__user__info": f"somebody:{SECRET}"},
    "token": {"schema__registry__bearer__auth__token": SECRET},
}


def says(fake: Server, body: object, status: int = 200) -> None:
    fake.respond = lambda _: (status, {}, json.dumps(body).encode())


@pytest.mark.parametrize("login", LOGINS)
def test_a_registry_that_repeats_the_login_does_not_show_it(fake: Server, login: str) -> None:
    def echo(handler: Any) -> tuple[int, dict[str, str], bytes]:
        return 400, {}, json.dumps({"message": f"bad header: {handler.headers['Authorization']}"}).encode()

    fake.respond = echo
    with pytest.raises(RegistryError, match=r"bad header: .*\[hidden\].*HTTP 400") as caught:
        planned(options(schema__registry__url=fake.url, **LOGINS[login]))
    assert SECRET not in str(caught.value)
    pair = base64.b64encode(f"somebody:{SECRET}".encode()).decode()
    assert pair not in str(caught.value)
    sent = fake.requests[0][2]["Authorization"]
    assert sent == (f"Basic {pair}" if login == "basic" else f"Bearer {SECRET}")


@pytest.mark.parametrize("login", LOGINS)
def test_a_login_in_clear_is_warned_of(login: str) -> None:
    for url, is_warned in (("https://a,http://b", True), ("https://a", False)):
        given = {"schema.registry.url": url, "value.format": "avro", "topic": "t"}
        given |= {name.replace("__", "."): value for name, value in LOGINS[login].items()}
        warnings = " ".join(parse({"kafka.bootstrap.servers": "b:1", **given}).warnings)
        assert ("schema.registry.url begins with http://" in warnings) is is_warned
        assert ("http://" in warnings) is is_warned


@pytest.mark.parametrize("login", LOGINS)
def test_options_that_accompany_a_token_are_warned_of_without_one(login: str) -> None:
    given = {"value.format": "avro", "topic": "t", "schema.registry.bearer.auth.identity.pool.id": "pool"}
    given |= {name.replace("__", "."): value for name, value in LOGINS[login].items()}
    made = parse({"kafka.bootstrap.servers": "b:1", "schema.registry.url": "https://a", **given})
    assert any("pool.id has no effect without a token" in one for one in made.warnings) is (login == "basic")


def test_tokens_are_asked_for_with_client_credentials(fake: Server) -> None:
    says(fake, {"id": 5, "version": 1})
    with TokenServer() as issuer:
        issuer.gives(lambda: "a-token")
        client = {"client__id": "me", "client__secret": SECRET, "issuer__endpoint__url": issuer.url}
        more = {"logical__cluster": "lsrc-1", "identity__pool__id": "pool-1"}
        given = {f"schema__registry__bearer__auth__{name}": value for name, value in (client | more).items()}
        planned(options(schema__registry__url=fake.url, **given))
        assert len(issuer.requests) == 1
    headers = fake.requests[0][2]
    assert headers["Authorization"] == "Bearer a-token"
    assert (headers["target-sr-cluster"], headers["Confluent-Identity-Pool-Id"]) == ("lsrc-1", "pool-1")


def test_a_registry_that_repeats_a_fetched_token_does_not_show_it(fake: Server) -> None:
    """Catches: the token was known as a secret only until it was sent."""
    fake.respond = lambda handler: (
        400,
        {},
        json.dumps({"message": handler.headers["Authorization"]}).encode(),
    )
    with TokenServer() as issuer:
        issuer.gives(lambda: "a-token")
        given = {"schema__registry__bearer__auth__issuer__endpoint__url": issuer.url}
        with pytest.raises(RegistryError, match=r"Bearer \[hidden\] \(HTTP 400"):
            planned(options(schema__registry__url=fake.url, **given))


def test_a_refused_login_at_the_token_endpoint_is_not_temporary(fake: Server) -> None:
    """Catches: a write that went on with the schemas of the one before, with a login that is refused."""
    with TokenServer() as issuer:
        issuer.responds(401, b'{"error": "invalid_client"}')
        given = {"schema__registry__bearer__auth__issuer__endpoint__url": issuer.url}
        with pytest.raises(
            RegistryError, match=r"invalid_client.*Check schema\.registry\.bearer\.auth\.\*"
        ) as caught:
            planned(options(schema__registry__url=fake.url, **given))
    assert not caught.value.is_temporary


def test_files_for_tls_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    url = {"schema__registry__url": "https://127.0.0.1:1"}
    for name, said in (
        ("ca", "'schema.registry.ssl.ca.location' is"),
        ("certificate", r"certificate.location'.* are"),
    ):
        with pytest.raises(ConfigurationError, match=f"{said} invalid: .*No such file"):
            planned(options(**url, **{f"schema__registry__ssl__{name}__location": f"{tmp_path}/none"}))


def test_registry_requests_retry_transient_errors_and_other_addresses(fake: Server) -> None:
    answers = iter([503, 500, 200])
    fake.respond = lambda _: (next(answers), {}, b'{"id": 7, "version": 2}')
    with socket.socket() as refusing:
        refusing.bind(("127.0.0.1", 0))
        dead = f"http://127.0.0.1:{refusing.getsockname()[1]}"
        (part,) = planned(options(schema__registry__url=f"{dead},{fake.url}")).parts
    assert part.schemas[0][1].id == 7
    assert len(fake.requests) == 3
    assert json.loads(fake.requests[0][3]).keys() == {"schema"}


def test_an_address_that_does_not_respond_leaves_time_for_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches: the first address had all of schema.registry.timeout.ms, so the second was never asked."""
    now_s, asked = [0.0], list[tuple[str, float]]()

    class Client:
        def __init__(self, url: str, *_: object) -> None:
            self.shown = url

        def request(self, *_: object, timeout_s: float, max_bytes: int) -> tuple[int, bytes]:
            asked.append((self.shown, timeout_s))
            if self.shown != "http://b":
                now_s[0] += timeout_s
                raise TimeoutError
            return 200, b'{"id": 5, "version": 1}'

    monkeypatch.setattr(registry_module, "HttpClient", Client)
    monkeypatch.setattr(
        registry_module, "time", SimpleNamespace(monotonic=lambda: now_s[0], sleep=now_s.append)
    )
    asking = Registry(options(schema__registry__url="http://a,http://b,http://c"))
    for _ in range(2):
        assert asking.register("s", Schema("AVRO", '"string"')).id == 5
    assert [url for url, _ in asked] == ["http://a", "http://b", "http://b"]
    assert [timeout_s for _, timeout_s in asked] == pytest.approx([10.0, 10.0, 20 / 3])


def test_responses_of_other_servers_and_invalid_ones_are_refused(fake: Server) -> None:
    for body, said in (
        (b"<html>", "not a schema registry.s: check .*schema.registry.url"),
        (b"[" * 100_000, "not a schema registry.s: check .*schema.registry.url"),
        (b"[]", "not a schema registry.s: check .*schema.registry.url"),
        (b'{"id": "5", "version": 1}', "not a schema registry.s: check .*schema.registry.url"),
        (b'{"id": 2147483648, "version": 1}', "not a schema registry.s: check .*schema.registry.url"),
        (b'{"version": 1}', "contains no id"),
        (gzip.compress(b'{"id": 5}', mtime=0), "not a schema registry.s: check .*schema.registry.url"),
        (b'{"id": 5, "x": "' + b"x" * (3 << 20) + b'"}', "the response has more than 2097152 bytes"),
    ):
        fake.respond = lambda _, body=body: (200, {}, body)
        with pytest.raises(RegistryError, match=said):
            planned(options(schema__registry__url=fake.url))


def test_invalid_references_are_refused(fake: Server) -> None:
    reference = {"name": "n", "subject": "\x1b[2Jforged\n", "version": 1}
    says(
        fake, {"id": 5, "version": 1, "schema": '"string"', "references": [{**reference, "version": "../1"}]}
    )
    given = options(schema__registry__url=fake.url, use__latest__version="true")
    with pytest.raises(RegistryError, match="not a schema registry's"):
        planned(given)
    answers = iter([{"id": 5, "version": 1, "schema": '"string"', "references": [reference]}])
    fake.respond = lambda _: (200, {}, json.dumps(next(answers, {"schema": ""})).encode())
    with pytest.raises(RegistryError, match="a schema of 0 characters"):
        planned(given)
    assert fake.requests[-1][1].startswith("/subjects/%1B%5B2Jforged%0A/versions/1")
    fake.respond = lambda _: (404, {}, b'{"message": "no\\nERROR forged"}')
    with pytest.raises(RegistryError) as caught:
        planned(given)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("kind", ["chain", "names", "characters"])
def test_references_cost_a_bounded_number_of_requests_and_bytes(fake: Server, kind: str) -> None:
    """Catches: a registry took 7.8 GiB in 30 s by responses that were kept while their references were
    followed, and ended planning with a RecursionError at 987 of them."""

    def respond(_: object) -> tuple[int, dict[str, str], bytes]:
        length, count = (9000, 200) if kind == "names" else (0, 1)
        names = [f"r{len(fake.requests)}-{index}" + "n" * length for index in range(count)]
        body = {
            "id": 5,
            "version": 1,
            "schema": f'"{"s" * 250_000}"' if kind == "characters" else '"string"',
            "references": [{"name": name, "subject": "s", "version": 1} for name in names],
            "more": [{}] * 1000,
        }
        return 200, {}, json.dumps(body).encode()

    fake.respond = respond
    with pytest.raises(RegistryError, match=r"uses more than 200 others, or .* in sum"):
        planned(options(schema__registry__url=fake.url, use__latest__version="true"))
    assert len(fake.requests) == {"chain": 202, "names": 3, "characters": 10}[kind]


def test_references_that_name_each_other_come_once_and_after_what_they_use(fake: Server) -> None:
    uses = {"root": ["a", "b"], "a": ["c", "a"], "b": ["c", "a"], "c": ["b", "a"]}

    def respond(handler: Any) -> tuple[int, dict[str, str], bytes]:
        subject = handler.path.split("/")[2]
        listed = [{"name": name, "subject": name, "version": 1} for name in uses.get(subject, uses["root"])]
        text = json.dumps({"type": "enum", "name": subject, "symbols": ["A"]})
        body = {"id": 5, "version": 1, "schema": text, "references": listed}
        return 200, {}, json.dumps(body).encode()

    fake.respond = respond
    with Registry(options(schema__registry__url=fake.url)) as registry:
        found = registry.version("root", None).schema.references
    assert [name for name, _ in found] == ["b", "c", "a"]


def test_query_of_an_address_is_not_shown(fake: Server) -> None:
    """Catches: errors, the live view and the options' repr showed the key in it."""
    says(fake, {"message": "no"}, 404)
    given = options(schema__registry__url=f"{fake.url}/path?key=s3cret", use__latest__version="true")
    with pytest.raises(RegistryError, match=r"/path failed to read") as caught:
        planned(given)
    assert "s3cret" not in str(caught.value)
    assert "Check schema.registry.url, and that this subject" in str(caught.value)
    assert given.shown()["schema.registry.url"] == f"{fake.url}/path"
    assert "s3cret" not in repr(given)


def test_schema_that_repeats_the_login_does_not_show_it(fake: Server) -> None:
    """Catches: names of a registered schema were quoted as they are."""
    name = f"{SECRET}\x1b[2J\nforged"
    says(fake, {"id": 5, "version": 1, "schema": json.dumps({"type": name})})
    login = {"schema__registry__basic__auth__user__info": f"somebody:{SECRET}"}
    with pytest.raises(SchemaError, match="uses a type") as caught:
        planned(options(schema__registry__url=fake.url, use__latest__version="true", **login))
    assert SECRET not in str(caught.value)
    assert str(caught.value).isprintable()
