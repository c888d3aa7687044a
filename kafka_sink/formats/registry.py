"""What planning asks a schema registry, by Confluent's REST API."""

from __future__ import annotations

import base64
import http.client
import json
import random
import re
import ssl
import threading
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar
from urllib.parse import quote

from kafka_sink.errors import ConfigurationError, KafkaSinkError, RegistryError, SchemaError
from kafka_sink.formats.planning import KINDS, RegisteredSchema, Schema, message_name
from kafka_sink.options import SinkOptions
from kafka_sink.printable import printable
from kafka_sink.secret import HiddenValues, Secret
from kafka_sink.security.http import HttpClient
from kafka_sink.security.settings import TokenSettings

if TYPE_CHECKING:
    import pyarrow as pa


# A schema is stored for the micro-batches of a query, with others.
MAX_SCHEMA = 256 << 10
# A response has a schema as a JSON text, which may take six characters for one, and little beside it.
_MAX_RESPONSE = 2 << 20
_MAX_REFERENCES = 200
# The schemas that one schema uses, and their names, in sum.
_MAX_ALL_SCHEMAS = 2 << 20
_MAX_REASON = 1000
_OK, _NOT_FOUND, _CONFLICT = 200, 404, 409
_SERVER_ERROR = 500
_MAY_PASS = frozenset({408, 429, 500, 502, 503, 504})
_TRIES = 4
# Of what may pass. The first waits are short, as the whole has a bound.
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 2.0
_CONTENT = "application/vnd.schemaregistry.v1+json"
_BOUND = "schema.registry.timeout.ms"
_GUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_T = TypeVar("_T")
Found = dict[str, Any]


class _Reference(NamedTuple):
    """Where to find a schema that another one uses, and under which name it uses it."""

    name: str
    subject: str
    version: int


class _RefusedError(Exception):
    """The registry's status of 400 and above, and what it says."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(said)
        self.status = status


class Registry:
    """A registry. Calls raise RegistryError once it is schema.registry.timeout.ms old."""

    def __init__(self, options: SinkOptions, format_name: str = "") -> None:
        self._timeout_s = options.schema_registry_timeout_ms / 1000
        self._deadline_s = time.monotonic() + self._timeout_s
        self._normalize = "true" if options.normalize_schemas else "false"
        # Confluent's registry gives Protobuf schemas as text otherwise.
        self._format = "?format=serialized" if format_name == "protobuf" else ""
        self._options = options
        self._headers: HiddenValues | None = None
        # Known as long as this lives: what the registry says may repeat it.
        user_info = options.schema_registry_basic_auth_user_info
        self._password = None if user_info is None else Secret.known(user_info.reveal().partition(":")[2])
        self._basic = None if user_info is None else Secret.known(_encoded(user_info))
        context = _context(options)
        self._clients = [
            HttpClient(url.strip().rstrip("/"), lambda: context, self._timeout_s, _BOUND)
            for url in options.schema_registry_url.split(",")
        ]
        self._where = "the schema registry at " + ", ".join(client.shown for client in self._clients)

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients:
            client.close()

    def register(self, subject: str, schema: Schema) -> RegisteredSchema:
        """The schema's id, under which it is registered now if it was not before."""
        path = f"{_subject(subject)}/versions?normalize={self._normalize}"
        found = self._ask(f"register a schema under the subject '{subject}'", path, schema)
        if not isinstance(found.get("version"), int):
            # Registries before Confluent Platform 8 say only the id.
            found = self._looked_up(f"look up a schema under the subject '{subject}'", subject, schema)
        return _registered(schema, found, subject)

    def lookup(self, subject: str, schema: Schema) -> RegisteredSchema:
        """The schema's id. A schema that is not registered is an error."""
        what = f"look up a schema under the subject '{subject}' (auto.register.schemas=false)"
        return _registered(schema, self._looked_up(what, subject, schema), subject)

    def _looked_up(self, what: str, subject: str, schema: Schema) -> Found:
        return self._ask(what, f"{_subject(subject)}?normalize={self._normalize}&deleted=false", schema)

    def version(self, subject: str, version: int | None) -> RegisteredSchema:
        """The newest one where ``version`` is None."""
        place, what = ("latest", "the latest version") if version is None else (version, f"version {version}")
        path = f"{_subject(subject)}/versions/{place}{self._format}"
        found = self._ask(f"read {what} of the subject '{subject}'", path)
        return _registered(self._read(found), found, subject)

    def by_id(self, schema_id: int) -> RegisteredSchema:
        found = self._ask(f"read the schema with id {schema_id}", f"/schemas/ids/{schema_id}{self._format}")
        return _registered(self._read(found), {**found, "id": schema_id, "version": -1})

    def _read(self, found: Found) -> Schema:
        kind = printable(str(found.get("schemaType") or "AVRO"))
        return Schema(kind, _checked(found.get("schema")), tuple(self._references(found).items()))

    def _references(self, found: Found) -> dict[str, str]:
        """The schemas that a schema uses, by name, each after the schemas that it uses itself.

        The registry decides how many there are and how deep they go. So the number of names and the
        characters of all that is kept have a bound, and no response is kept.
        """
        texts: dict[str, str] = {}
        names, left = set[str](), _MAX_ALL_SCHEMAS
        # The schemas on the way down: name, text, and which of its references are still to be followed.
        path: list[tuple[str | None, str, list[_Reference]]] = [(None, "", _references_of(found))]
        while path:
            name, text, references = path[-1]
            if not references:
                path.pop()
                if name is not None:
                    texts[name] = text
                continue
            reference = references.pop()
            if reference.name in names:
                continue
            names.add(reference.name)
            used = self._ask(
                f"read version {reference.version} of the subject '{printable(reference.subject)}', which a "
                "schema uses",
                f"{_subject(reference.subject)}/versions/{reference.version}{self._format}",
            )
            text, its_own = _checked(used.get("schema")), _references_of(used)
            left -= len(text) + sum(len(one.name) + len(one.subject) for one in its_own)
            if len(names) > _MAX_REFERENCES or left < 0:
                raise RegistryError(
                    f"a schema uses more than {_MAX_REFERENCES} others, or others of more than "
                    f"{_MAX_ALL_SCHEMAS:,} characters in sum, which is not supported"
                )
            path.append((reference.name, text, its_own))
        return texts

    # -- requests -------------------------------------------------------------------------------------

    def _ask(self, what: str, path: str, schema: Schema | None = None) -> Found:
        """The response to a GET, or to a POST of a schema. Runs on a thread of its own, as nothing else
        bounds a look-up of names."""
        answer: Future[Found] = Future()

        def run() -> None:
            try:
                answer.set_result(self._tried(path, schema))
            except BaseException as failure:  # noqa: BLE001 - raised again below
                answer.set_exception(failure)

        threading.Thread(target=run, name="kafka-chunked-registry", daemon=True).start()
        if wait([answer], max(0.0, self._deadline_s - time.monotonic())).done:
            if failure := answer.exception():
                raise self._explained(what, failure) from None
            return answer.result()
        raise RegistryError(
            f"{self._where} did not respond within {_BOUND} = "
            f"{self._timeout_s * 1000:.0f} ms. The attempt was to {what}",
            is_temporary=True,
        )

    def _tried(self, path: str, schema: Schema | None) -> Found:
        """By each address, several times where the failure may pass."""
        headers = self._login()
        body = None if schema is None else _body(schema)
        last: Exception = OSError("there is no address")
        for client in self._clients:
            for number in range(_TRIES):
                try:
                    return self._once(client, path, headers, body)
                except _RefusedError as error:
                    if error.status not in _MAY_PASS:
                        raise
                    last = error
                except ssl.SSLCertVerificationError:
                    raise
                except (OSError, http.client.HTTPException) as error:
                    last = error
                if number < _TRIES - 1:
                    longest = min(_FIRST_WAIT_S * 2**number, _LONGEST_WAIT_S)
                    time.sleep(random.random() * longest)  # noqa: S311 - no secret depends on it
        raise last

    def _once(self, client: HttpClient, path: str, headers: HiddenValues, body: str | None) -> Found:
        left_s = max(0.001, self._deadline_s - time.monotonic())
        method = "GET" if body is None else "POST"
        status, content = client.request(
            method, path, headers, body, timeout_s=left_s, max_bytes=_MAX_RESPONSE
        )
        try:
            found = json.loads(content)
        except (ValueError, RecursionError):
            found = None
        if status == _OK and isinstance(found, dict):
            return found
        said = found.get("message") if isinstance(found, dict) else None
        raise _RefusedError(status, str(said) if said else "its response is not one of a schema registry")

    def _login(self) -> HiddenValues:
        """Headers, made once: a token lasts longer than planning."""
        if self._headers is None:
            options = self._options
            headers = HiddenValues({"Accept": f"{_CONTENT}, application/json", "Content-Type": _CONTENT})
            if self._basic is not None:
                headers["Authorization"] = f"Basic {self._basic.reveal()}"
            elif token := options.schema_registry_bearer_auth_token or self._token():
                headers["Authorization"] = f"Bearer {token.reveal()}"
                if cluster := options.schema_registry_bearer_auth_logical_cluster:
                    headers["target-sr-cluster"] = cluster
                if pool := options.schema_registry_bearer_auth_identity_pool_id:
                    headers["Confluent-Identity-Pool-Id"] = pool
            self._headers = headers
        return self._headers

    def _token(self) -> Secret | None:
        options = self._options
        url = options.schema_registry_bearer_auth_issuer_endpoint_url
        if not url:
            return None
        from kafka_sink.security.token import TokenEndpoint, TokenSource

        settings = TokenSettings(
            url=url,
            client_id=options.schema_registry_bearer_auth_client_id,
            client_secret=options.schema_registry_bearer_auth_client_secret,
            scope=options.schema_registry_bearer_auth_scope,
            connect_timeout_s=self._timeout_s,
            read_timeout_s=self._timeout_s,
        )
        return TokenSource(settings, TokenEndpoint(settings, _BOUND).fetch).get().text

    def _explained(self, what: str, failure: BaseException) -> BaseException:
        where = self._where
        if isinstance(failure, RegistryError) or not isinstance(failure, Exception):
            return failure
        if not isinstance(failure, _RefusedError):
            # What this package says is printable. Libraries may quote headers.
            own = isinstance(failure, KafkaSinkError)
            reason = str(failure) if own else printable(str(failure) or type(failure).__name__, _MAX_REASON)
            return RegistryError(
                f"{where} cannot be reached: {reason}. The attempt was to {what}", is_temporary=True
            )
        status, said = failure.status, printable(str(failure), _MAX_REASON)
        if status in (401, 403):
            return RegistryError(
                f"{where} refuses the login (HTTP {status}: {said}): check "
                "schema.registry.basic.auth.user.info or schema.registry.bearer.auth.*, and that its user "
                f"may {what}"
            )
        if status == _CONFLICT:
            return RegistryError(
                f"{where} refuses to {what}, because the subject's compatibility rule forbids the change: "
                f"{said}. Change the columns so that the schema stays compatible, or write with the "
                "registered schema (use.latest.version=true)"
            )
        return RegistryError(
            f"{where} does not {what}: {said} (HTTP {status})",
            is_temporary=status >= _SERVER_ERROR,
            is_missing=status == _NOT_FOUND,
        )


def _encoded(user_info: Secret) -> str:
    return base64.b64encode(user_info.reveal().encode()).decode("ascii")


def _subject(name: str) -> str:
    return f"/subjects/{quote(name, safe='')}"


def _body(schema: Schema) -> str:
    # Registries that know nothing but Avro refuse the name of a kind.
    kind = {} if schema.kind == "AVRO" else {"schemaType": schema.kind}
    return json.dumps({"schema": schema.text, **kind})


def _registered(schema: Schema, found: Found, subject: str = "") -> RegisteredSchema:
    number, version, guid = found.get("id"), found.get("version"), found.get("guid")
    if not isinstance(number, int):
        raise RegistryError("the schema registry's response names no id")
    guid = guid if isinstance(guid, str) and _GUID.fullmatch(guid) else ""
    return RegisteredSchema(schema, number, guid, subject, version if isinstance(version, int) else -1)


def _references_of(found: Found) -> list[_Reference]:
    """The references of a schema, the last one first. Raises RegistryError."""
    listed = found.get("references") or []
    if not isinstance(listed, list) or len(listed) > _MAX_REFERENCES:
        raise RegistryError(f"a schema's references are not a list of at most {_MAX_REFERENCES}")
    references = []
    for one in reversed(listed):
        name, subject, version = map(one.get, _Reference._fields) if isinstance(one, dict) else (None,) * 3
        if not isinstance(name, str) or not isinstance(subject, str) or not isinstance(version, int):
            raise RegistryError("a schema's references cannot be read")
        references.append(_Reference(name, subject, version))
    return references


def _checked(text: object) -> str:
    if not isinstance(text, str) or not 0 < len(text) <= MAX_SCHEMA:
        size = len(text) if isinstance(text, str) else 0
        raise RegistryError(f"a schema of {size:,} characters is not supported: 1 to {MAX_SCHEMA:,}")
    return text


def _context(options: SinkOptions) -> ssl.SSLContext:
    """Trusts the system's authorities where no file is named."""
    certificate, key = (
        options.schema_registry_ssl_certificate_location,
        options.schema_registry_ssl_key_location,
    )
    password = options.schema_registry_ssl_key_password
    try:
        context = ssl.create_default_context(cafile=options.schema_registry_ssl_ca_location or None)
        if certificate:
            # OpenSSL asks on the terminal where nothing gives it a password.
            context.load_cert_chain(
                certificate, key or None, lambda: "" if password is None else password.reveal()
            )
        return context
    except (OSError, ValueError) as error:
        problem = printable(str(error))
    raise ConfigurationError(f"the options schema.registry.ssl.* are invalid: {problem}")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the options say about the schema of ``part``, whose column is ``field``."""

    options: SinkOptions
    part: str
    format_name: str
    field: pa.Field

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that have a subject each; one that is empty where they share the schema."""
        is_shared = self._strategy == "RecordNameStrategy" or self._of_part("schema_id") != -1
        if is_shared or self.options.topic is not None:
            return ("",)
        return tuple(dict.fromkeys(self.options.schema_registry_topics))

    def registered(self, registry: Registry, topic: str) -> RegisteredSchema:
        """Ask the registry. Raises RegistryError, SchemaError."""
        from kafka_sink.formats import row_encoder

        if (schema_id := int(self._of_part("schema_id"))) != -1:
            return registry.by_id(schema_id)
        own = self._own_schema()
        subject = self._subject(topic or self.options.topic or "", own)
        if self.options.use_latest_version:
            return registry.version(subject, None)
        if (version := int(self._of_part("schema_version"))) != -1:
            return registry.version(subject, version)
        schema = own if own is not None else self._derived()
        # Whatever does not fit a given schema must not be registered first.
        row_encoder.encoder_of(self.format_name, schema, self.field.type, self.field.name, self.message)
        if self.options.auto_register_schemas:
            return registry.register(subject, schema)
        return registry.lookup(subject, schema)

    @property
    def message(self) -> str:
        """The name of a Protobuf message."""
        return message_name(self.options, self.part)

    def known(self, registry: Registry, topic: str) -> RegisteredSchema:
        """The schema that the subject has, whatever the columns are; nothing is registered."""
        if self._of_part("schema_id") != -1 or self._of_part("schema_version") != -1:
            return self.registered(registry, topic)
        return registry.version(self._subject(topic or self.options.topic or "", self._own_schema()), None)

    @property
    def _strategy(self) -> str:
        return str(self._of_part("subject_name_strategy"))

    def _of_part(self, name: str) -> str | int:
        value: str | int = getattr(self.options, f"{self.part}_{name}")
        return value

    def _own_schema(self) -> Schema | None:
        text = str(self._of_part("schema"))
        return Schema(KINDS[self.format_name], text) if text else None

    def _derived(self) -> Schema:
        from kafka_sink.formats import row_encoder

        return row_encoder.derived_schema(self.format_name, self.field, str(self._of_part("record_name")))

    def _subject(self, topic: str, own: Schema | None) -> str:
        if self._strategy == "TopicNameStrategy":
            return f"{topic}-{self.part}"
        from kafka_sink.formats import row_encoder

        name = str(self._of_part("record_name"))
        if own is not None:
            name = row_encoder.record_name_of(self.format_name, own, self.message)
        if not name:
            raise SchemaError(
                f"{self.part}.subject.name.strategy={self._strategy} needs a schema of a record, which has a "
                "name"
            )
        return name if self._strategy == "RecordNameStrategy" else f"{topic}-{name}"
