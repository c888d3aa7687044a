"""Reads and registers schemas at planning, with the REST API of Confluent's Schema Registry."""

from __future__ import annotations

import base64
import http.client
import json
import re
import ssl
import time
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import quote

import msgspec
import pyarrow as pa

from kafka_sink.clock import RANDOM, ExponentialBackoff
from kafka_sink.errors import ConfigurationError, RegistryError, SchemaError, is_final
from kafka_sink.formats import avro_schema, json_schema, protobuf_schema, row_encoder
from kafka_sink.formats.schemas import KINDS, RegisteredSchema, Schema, message_name
from kafka_sink.options import SinkOptions
from kafka_sink.options.values import INT_MAX
from kafka_sink.printable import printable
from kafka_sink.secret import HiddenValues, Secret
from kafka_sink.security.http import HttpClient
from kafka_sink.security.settings import TokenSettings

# The schemas of a query are stored together for its micro-batches.
_MAX_SCHEMA = 256 << 10
# A response consists of little more than a schema as JSON text, in which a character may take six.
_MAX_RESPONSE = 2 << 20
_MAX_REFERENCES = 200
# The maximum number of characters of all schemas that one schema uses, with their names.
_MAX_ALL_SCHEMAS = 2 << 20
_MAX_REASON = 1000
_OK, _NOT_FOUND, _CONFLICT = 200, 404, 409
# Codes of the registry's API: the subject, its version or the schema is not registered.
_MISSING = range(40401, 40404)
# The HTTP statuses after which another attempt may succeed.
_TEMPORARY = frozenset({408, 429, *range(500, 600)})
_TRIES = 4
_BACKOFF = ExponentialBackoff(200, 2000, RANDOM.random)
_CONTENT = "application/vnd.schemaregistry.v1+json"
_BOUND = "schema.registry.timeout.ms"
_GUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


class _Reference(msgspec.Struct):
    """The name under which a schema uses another schema, and the subject and version of that schema."""

    name: str
    subject: str
    version: int


class _Response(msgspec.Struct, rename="camel"):
    """The fields of a response that are read. It is about a schema, or has the ``message`` of an error."""

    id: Annotated[int, msgspec.Meta(ge=0, le=INT_MAX)] | None = None
    version: int | None = None
    guid: str | None = None
    schema_type: str | None = None
    schema: str | None = None
    references: list[_Reference] | None = None
    message: str | None = None
    error_code: int | None = msgspec.field(default=None, name="error_code")


class _RefusedError(Exception):
    """A response that is not a success: its HTTP status, and the registry's message and error code."""

    def __init__(self, status: int, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Registry:
    """A registry, for one planning. After schema.registry.timeout.ms, all calls raise RegistryError."""

    def __init__(self, options: SinkOptions, format_name: str = "") -> None:
        self._timeout_s = options.schema_registry_timeout_ms / 1000
        self._deadline_s = time.monotonic() + self._timeout_s
        self._normalize = "true" if options.normalize_schemas else "false"
        # Without it, Confluent's registry returns Protobuf schemas as text. Apicurio always does.
        self._format = "?format=serialized" if format_name == "protobuf" else ""
        self._options = options
        self._headers: HiddenValues | None = None
        user_info = options.schema_registry_basic_auth_user_info
        # While these secrets exist, the registry's messages show neither password nor login nor token.
        self._password = None if user_info is None else Secret.known(user_info.reveal().partition(":")[2])
        self._basic = None if user_info is None else Secret.known(_base64(user_info))
        self._bearer = options.schema_registry_bearer_auth_token
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
        """Register the schema if it is not registered yet, and return it with its id."""
        path = f"{_subject(subject)}/versions?normalize={self._normalize}"
        response = self._ask(f"register a schema under the subject '{subject}'", path, schema)
        if response.version is None:
            # Registries before Confluent Platform 8 return the id only.
            return self.lookup(subject, schema, f"look up a schema under the subject '{subject}'")
        return _registered(schema, response, subject)

    def lookup(self, subject: str, schema: Schema, purpose: str = "") -> RegisteredSchema:
        """The schema with its id. Raises RegistryError if it is not registered."""
        path = f"{_subject(subject)}?normalize={self._normalize}&deleted=false"
        purpose = purpose or f"look up a schema under the subject '{subject}' (auto.register.schemas=false)"
        return _registered(schema, self._ask(purpose, path, schema), subject)

    def version(self, subject: str, version: int | None) -> RegisteredSchema:
        """The subject's schema of this version; None is the latest version."""
        place, name = ("latest", "the latest version") if version is None else (version, f"version {version}")
        path = f"{_subject(subject)}/versions/{place}{self._format}"
        response = self._ask(f"read {name} of the subject '{subject}'", path)
        return _registered(self._schema_in(response), response, subject)

    def by_id(self, schema_id: int) -> RegisteredSchema:
        response = self._ask(
            f"read the schema with id {schema_id}", f"/schemas/ids/{schema_id}{self._format}"
        )
        response.id, response.version = schema_id, None
        return _registered(self._schema_in(response), response)

    def _schema_in(self, response: _Response) -> Schema:
        texts: dict[str, str] = {}
        self._follow(response.references or [], texts, set(), _MAX_ALL_SCHEMAS)
        return Schema(printable(response.schema_type or "AVRO"), _checked(response), tuple(texts.items()))

    def _follow(self, references: list[_Reference], texts: dict[str, str], names: set[str], left: int) -> int:
        """Read the schemas to which these references refer, each after the schemas that it uses itself, and
        add them to ``texts``. ``names`` are the references that were followed already.

        The registry decides how many references there are and how deep they go. So the number of names is
        bounded, and ``left`` is the number of characters that may still be read. Returns what is left.
        """
        for reference in references:
            if reference.name in names:
                continue
            names.add(reference.name)
            text, more = self._referenced(reference)
            left -= len(text) + sum(len(used.name) + len(used.subject) for used in more)
            if len(names) > _MAX_REFERENCES or left < 0:
                raise RegistryError(
                    f"a schema uses more than {_MAX_REFERENCES} others, or others of more than "
                    f"{_MAX_ALL_SCHEMAS:,} characters in sum, which is not supported"
                )
            left = self._follow(more, texts, names, left)
            texts[reference.name] = text
        return left

    def _referenced(self, reference: _Reference) -> tuple[str, list[_Reference]]:
        """The text of a schema, and its references. The response itself is not kept, as it may be large."""
        response = self._ask(
            f"read version {reference.version} of the subject '{printable(reference.subject)}', which a "
            "schema uses",
            f"{_subject(reference.subject)}/versions/{reference.version}{self._format}",
        )
        return _checked(response), response.references or []

    def _ask(self, purpose: str, path: str, schema: Schema | None = None) -> _Response:
        """Return the response to a GET request, or to a POST request with the schema."""
        try:
            return self._try_addresses(path, None if schema is None else _body(schema))
        except Exception as failure:  # noqa: BLE001 - explained to the user, without the frames of the request
            problem = self._explained(purpose, failure)
        raise problem

    def _try_addresses(self, path: str, body: bytes | None) -> _Response:
        """Try each address, several times if the failure may be temporary."""
        for left in range(len(self._clients), 0, -1):
            # An address that does not respond must leave time for the addresses after it.
            until_s = time.monotonic() + self._left_s() / left
            for number in range(1, _TRIES + 1):
                try:
                    return self._once(self._clients[0], path, body, until_s)
                except _RefusedError as error:
                    if error.status not in _TEMPORARY:
                        raise
                    last: Exception = error
                except ssl.SSLCertVerificationError:
                    raise
                except (OSError, http.client.HTTPException) as error:
                    last = error
                if number < _TRIES:
                    time.sleep(min(_BACKOFF.delay_ms(number) / 1000, max(0.0, until_s - time.monotonic())))
                if time.monotonic() >= until_s:
                    break
            # The next request begins with the address that responds.
            self._clients.append(self._clients.pop(0))
        if self._left_s() == 0:
            raise TimeoutError from last
        raise last

    def _left_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())

    def _once(self, client: HttpClient, path: str, body: bytes | None, until_s: float) -> _Response:
        headers = self._login()
        method, timeout_s = "GET" if body is None else "POST", max(0.0, until_s - time.monotonic())
        status, content = client.request(
            method, path, headers, body, timeout_s=timeout_s, max_bytes=_MAX_RESPONSE
        )
        no_registry = (
            "its response is not a schema registry's: check the address and path of schema.registry.url"
        )
        try:
            response = msgspec.json.decode(content, type=_Response)
        except (msgspec.DecodeError, RecursionError):
            raise _RefusedError(status, no_registry) from None
        if status != _OK:
            raise _RefusedError(status, response.message or no_registry, response.error_code or 0)
        return response

    def _login(self) -> HiddenValues:
        """The headers of all requests. A token is fetched once, because it lasts longer than planning."""
        if self._headers is None:
            options = self._options
            headers = HiddenValues({"Accept": f"{_CONTENT}, application/json", "Content-Type": _CONTENT})
            if self._basic is not None:
                headers["Authorization"] = f"Basic {self._basic.reveal()}"
            elif bearer := self._bearer or self._token():
                self._bearer = bearer
                headers["Authorization"] = f"Bearer {bearer.reveal()}"
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
        from kafka_sink.security.token import TokenEndpoint

        settings = TokenSettings(
            url=url,
            client_id=options.schema_registry_bearer_auth_client_id,
            client_secret=options.schema_registry_bearer_auth_client_secret,
            scope=options.schema_registry_bearer_auth_scope,
            connect_timeout_s=self._timeout_s,
            read_timeout_s=self._left_s(),
        )
        return TokenEndpoint(settings, _BOUND).fetch().text

    def _explained(self, purpose: str, failure: Exception) -> RegistryError:
        """The error for the user about a request with this purpose."""
        where = self._where
        if isinstance(failure, TimeoutError) and self._left_s() == 0:
            return RegistryError(
                f"{where} did not respond within {_BOUND} = {self._timeout_s * 1000:.0f} ms. The attempt was "
                f"to {purpose}",
                is_temporary=True,
            )
        if not isinstance(failure, _RefusedError):
            # The errors of libraries may quote headers.
            reason = printable(str(failure) or type(failure).__name__, _MAX_REASON)
            # This error is raised if the token endpoint refuses the login or cannot prove its identity.
            is_refused = is_final(failure)
            check = "schema.registry.bearer.auth.*" if is_refused else "schema.registry.url"
            return RegistryError(
                f"{where} cannot be reached: {reason}. The attempt was to {purpose}. Check {check}",
                is_temporary=not is_refused and not isinstance(failure, ssl.SSLCertVerificationError),
            )
        status, message = failure.status, printable(str(failure), _MAX_REASON)
        if status in (401, 403):
            return RegistryError(
                f"{where} refuses the login (HTTP {status}: {message}): check "
                "schema.registry.basic.auth.user.info or schema.registry.bearer.auth.*, and that its user "
                f"may {purpose}"
            )
        if status == _CONFLICT:
            return RegistryError(
                f"{where} refuses to {purpose}, because the subject's compatibility rule forbids the change: "
                f"{message}. Change the columns so that the schema stays compatible, or write with the "
                "registered schema (use.latest.version=true)"
            )
        check = (
            ". Check schema.registry.url, and that this subject, version or id is registered: a subject is "
            "named after the topic"
        )
        return RegistryError(
            f"{where} failed to {purpose}: {message} (HTTP {status}){check if status == _NOT_FOUND else ''}",
            is_temporary=status in _TEMPORARY,
            # A server that has no such path also responds with 404, but with another code in the body.
            is_missing=failure.code in _MISSING,
        )


def _base64(user_info: Secret) -> str:
    return base64.b64encode(user_info.reveal().encode()).decode("ascii")


def _subject(name: str) -> str:
    return f"/subjects/{quote(name, safe='')}"


def _body(schema: Schema) -> bytes:
    # Registries that support only Avro reject the field schemaType.
    kind = {} if schema.kind == "AVRO" else {"schemaType": schema.kind}
    return json.dumps({"schema": schema.text, **kind}).encode()


def _registered(schema: Schema, response: _Response, subject: str = "") -> RegisteredSchema:
    if response.id is None:
        raise RegistryError("the schema registry's response contains no id")
    guid = response.guid if response.guid and _GUID.fullmatch(response.guid) else ""
    version = -1 if response.version is None else response.version
    return RegisteredSchema(schema, response.id, guid, subject, version)


def _checked(response: _Response) -> str:
    text = response.schema or ""
    if not 0 < len(text) <= _MAX_SCHEMA:
        raise RegistryError(f"a schema of {len(text):,} characters is not supported: 1 to {_MAX_SCHEMA:,}")
    return text


def _context(options: SinkOptions) -> ssl.SSLContext:
    """The TLS settings. Without schema.registry.ssl.ca.location, the system's authorities are trusted."""
    certificate = options.schema_registry_ssl_certificate_location
    key = options.schema_registry_ssl_key_location
    password = options.schema_registry_ssl_key_password
    wrong = "Option 'schema.registry.ssl.ca.location' is"
    try:
        context = ssl.create_default_context(cafile=options.schema_registry_ssl_ca_location or None)
        wrong = "Options 'schema.registry.ssl.certificate.location', '.key.location' or '.key.password' are"
        if certificate:
            # Without a function for the password, OpenSSL would ask for it on the terminal.
            context.load_cert_chain(
                certificate, key or None, lambda: "" if password is None else password.reveal()
            )
        return context
    except (OSError, ValueError) as error:
        problem = printable(str(error))
    raise ConfigurationError(f"{wrong} invalid: {problem}")


@dataclass(frozen=True, slots=True)
class SchemaChoice:
    """Which schema the options select for ``part`` ("value" or "key"), whose column is ``field``."""

    options: SinkOptions
    part: str
    format_name: str
    field: pa.Field

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics that have a subject each; "" alone if all topics share the schema."""
        is_shared = self._strategy == "RecordNameStrategy" or self._option("schema_id") != -1
        if is_shared or self.options.topic is not None:
            return ("",)
        return tuple(dict.fromkeys(self.options.schema_registry_topics))

    def registered(self, registry: Registry, topic: str) -> RegisteredSchema:
        """Read or register the schema. Raises RegistryError and SchemaError."""
        if (schema_id := int(self._option("schema_id"))) != -1:
            return registry.by_id(schema_id)
        schema = self._own_schema()
        subject = self._subject(topic, schema)
        version = int(self._option("schema_version"))
        if self.options.use_latest_version or version != -1:
            return registry.version(subject, None if self.options.use_latest_version else version)
        if schema is None:
            name = str(self._option("record_name"))
            schema = derived_schema(self.format_name, self.field, name)
        # Check the columns first, so that no schema is registered that they do not fit.
        row_encoder.encoder_of(self.format_name, schema, self.field.type, self.field.name, self.message)
        if self.options.auto_register_schemas:
            return registry.register(subject, schema)
        return registry.lookup(subject, schema)

    @property
    def message(self) -> str:
        """The name of a Protobuf message."""
        return message_name(self.options, self.part)

    def known(self, registry: Registry, topic: str) -> RegisteredSchema:
        """The subject's current schema, regardless of the columns. Registers nothing."""
        if self._option("schema_id") != -1 or self._option("schema_version") != -1:
            return self.registered(registry, topic)
        return registry.version(self._subject(topic, self._own_schema()), None)

    @property
    def _strategy(self) -> str:
        return str(self._option("subject_name_strategy"))

    def _option(self, name: str) -> str | int:
        value: str | int = getattr(self.options, f"{self.part}_{name}")
        return value

    def _own_schema(self) -> Schema | None:
        text = str(self._option("schema"))
        return Schema(KINDS[self.format_name], text) if text else None

    def _subject(self, topic: str, schema: Schema | None) -> str:
        topic = topic or self.options.topic or ""
        if self._strategy == "TopicNameStrategy":
            return f"{topic}-{self.part}"
        name = str(self._option("record_name"))
        if schema is not None:
            name = _record_name_of(self.format_name, schema, self.message)
        if not name:
            raise SchemaError(
                f"{self.part}.subject.name.strategy={self._strategy} needs a schema of a record, which has a "
                "name"
            )
        return name if self._strategy == "RecordNameStrategy" else f"{topic}-{name}"


def derived_schema(format_name: str, field: pa.Field, record_name: str) -> Schema:
    """Derive a schema from a column's type. Raises SchemaError, which names the column."""
    if format_name == "protobuf":
        raise SchemaError(
            "a Protobuf schema cannot be derived from columns, because its fields need lasting numbers"
        )
    derived = avro_schema.derived if format_name == "avro" else json_schema.derived
    return Schema(KINDS[format_name], derived(field, record_name))


def _record_name_of(format_name: str, schema: Schema, message: str) -> str:
    """The record's name in a schema, as used in subjects; empty if it has none."""
    if format_name == "avro":
        return avro_schema.read(schema.text, schema.references).full_name
    if format_name == "protobuf":
        return protobuf_schema.read(schema.text, schema.references).message(message).full_name
    root = json_schema.parsed(schema.text)
    return str(root.get("title", "")) if isinstance(root, dict) else ""
