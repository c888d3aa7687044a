"""What planning asks a schema registry, through confluent-kafka's client."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from kafka_sink.errors import ConfigurationError, RegistryError
from kafka_sink.formats.registered import RegisteredSchema, Schema
from kafka_sink.options import SinkOptions
from kafka_sink.printable import printable

if TYPE_CHECKING:
    from confluent_kafka.schema_registry import SchemaRegistryClient

# A schema is stored for the micro-batches of a query, with others.
MAX_SCHEMA = 256 << 10
_MAX_REFERENCES = 200
_MAX_REASON = 1000
_INSTALL = "pip install 'kafka-chunked[registry]'"
_NOT_FOUND, _CONFLICT = 404, 409
_SERVER_ERROR = 500
_T = TypeVar("_T")


class Registry:
    """One connection to a registry. Calls raise RegistryError once it is schema.registry.timeout.ms old."""

    def __init__(self, options: SinkOptions, format_name: str = "") -> None:
        self._url = options.schema_registry_url
        self._timeout_s = options.schema_registry_timeout_ms / 1000
        self._deadline_s = time.monotonic() + self._timeout_s
        self._normalize = options.normalize_schemas
        # Confluent's registry gives Protobuf schemas as text otherwise.
        self._fmt = "serialized" if format_name == "protobuf" else None
        self._client = _client(options)

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def register(self, subject: str, schema: Schema) -> RegisteredSchema:
        """The schema's id, under which it is registered now if it was not before."""
        found = self._ask(
            f"register a schema under the subject '{subject}'",
            lambda: self._client.register_schema_full_response(subject, _sent(schema), self._normalize),
        )
        return self._with_version(subject, schema, found)

    def look_up(self, subject: str, schema: Schema) -> RegisteredSchema:
        """The schema's id. A schema that is not registered is an error."""
        found: Any = self._ask(
            f"look up a schema under the subject '{subject}' (auto.register.schemas=false)",
            lambda: self._client.lookup_schema(subject, _sent(schema), self._normalize),
        )
        return RegisteredSchema(schema, found.schema_id, found.guid or "", subject, found.version or -1)

    def _with_version(self, subject: str, schema: Schema, found: Any) -> RegisteredSchema:
        if found.version is None:
            # Registries before Confluent Platform 8 say only the id.
            found = self._ask(
                f"look up a schema under the subject '{subject}'",
                lambda: self._client.lookup_schema(subject, _sent(schema), self._normalize),
            )
        return RegisteredSchema(schema, found.schema_id, found.guid or "", subject, found.version or -1)

    def latest(self, subject: str) -> RegisteredSchema:
        return self._registered(
            subject,
            self._ask(
                f"read the latest version of the subject '{subject}'",
                partial(self._client.get_latest_version, subject, self._fmt),
            ),
        )

    def version(self, subject: str, version: int) -> RegisteredSchema:
        return self._registered(
            subject,
            self._ask(
                f"read version {version} of the subject '{subject}'",
                partial(self._client.get_version, subject, version, fmt=self._fmt),
            ),
        )

    def by_id(self, schema_id: int) -> RegisteredSchema:
        found = self._ask(
            f"read the schema with id {schema_id}",
            partial(self._client.get_schema, schema_id, None, self._fmt),
        )
        return RegisteredSchema(self._read(found), schema_id, getattr(found, "guid", None) or "")

    def _registered(self, subject: str, found: Any) -> RegisteredSchema:
        return RegisteredSchema(
            self._read(found.schema), found.schema_id, found.guid or "", subject, found.version or -1
        )

    def _read(self, found: Any) -> Schema:
        references: dict[str, str] = {}
        self._add_references(found, references)
        return Schema(found.schema_type or "AVRO", _checked(found.schema_str), tuple(references.items()))

    def _add_references(self, found: Any, into: dict[str, str]) -> None:
        for reference in found.references or ():
            if reference.name in into:
                continue
            if len(into) >= _MAX_REFERENCES:
                raise RegistryError(f"a schema has more than {_MAX_REFERENCES} references")
            used = self._ask(
                f"read version {reference.version} of the subject '{reference.subject}', which a schema uses",
                partial(self._client.get_version, reference.subject, reference.version, fmt=self._fmt),
            ).schema
            self._add_references(used, into)
            into[reference.name] = _checked(used.schema_str)

    def _ask(self, what: str, call: Callable[[], _T]) -> _T:
        """Run a call on a thread of its own: the client bounds each step, not all of them together."""
        answer: list[_T] = []
        failures: list[BaseException] = []

        def run() -> None:
            try:
                answer.append(call())
            except BaseException as failure:  # noqa: BLE001 - raised again below
                failures.append(failure)

        thread = threading.Thread(target=run, name="kafka-chunked-registry", daemon=True)
        thread.start()
        thread.join(max(0.0, self._deadline_s - time.monotonic()))
        if answer:
            return answer[0]
        if failures:
            raise self._explained(what, failures[0]) from None
        raise RegistryError(
            f"the schema registry at {self._url} did not respond within schema.registry.timeout.ms = "
            f"{self._timeout_s * 1000:.0f} ms. The attempt was to {what}",
            is_temporary=True,
        )

    def _explained(self, what: str, failure: BaseException) -> RegistryError | BaseException:
        from confluent_kafka.schema_registry.error import SchemaRegistryError

        if isinstance(failure, RegistryError) or not isinstance(failure, Exception):
            return failure
        where = f"the schema registry at {self._url}"
        if not isinstance(failure, SchemaRegistryError):
            return RegistryError(
                f"{where} cannot be reached: {_reason(failure)}. The attempt was to {what}", is_temporary=True
            )
        said = printable(str(failure.error_message), _MAX_REASON)
        if failure.http_status_code in (401, 403):
            return RegistryError(
                f"{where} refuses the login (HTTP {failure.http_status_code}: {said}): check "
                "schema.registry.basic.auth.user.info or schema.registry.bearer.auth.*, and that its user "
                f"may {what}"
            )
        if failure.http_status_code == _CONFLICT:
            return RegistryError(
                f"{where} refuses to {what}, because the subject's compatibility rule forbids the change: "
                f"{said}. Change the columns so that the schema stays compatible, or write with the "
                "registered schema (use.latest.version=true)"
            )
        return RegistryError(
            f"{where} does not {what}: {said} (HTTP {failure.http_status_code})",
            is_temporary=failure.http_status_code >= _SERVER_ERROR,
            is_missing=failure.http_status_code == _NOT_FOUND,
        )


def _reason(failure: Exception) -> str:
    """What failed, with the error below it (of TLS, say): httpx says little itself."""
    return printable(str(failure) or type(failure).__name__, _MAX_REASON)


def _checked(text: str | None) -> str:
    if not text or len(text) > MAX_SCHEMA:
        raise RegistryError(
            f"a schema of {len(text or ''):,} characters is not supported: 1 to {MAX_SCHEMA:,}"
        )
    return text


def _sent(schema: Schema) -> Any:
    from confluent_kafka.schema_registry import Schema as Sent

    return Sent(schema.text, schema.kind)


def _client(options: SinkOptions) -> SchemaRegistryClient:
    try:
        from confluent_kafka.schema_registry import SchemaRegistryClient
    except ImportError as error:
        raise ConfigurationError(
            f"a format with a schema registry needs the registry's client on the driver ({error}): {_INSTALL}"
        ) from None
    try:
        return SchemaRegistryClient(_settings(options))
    except (OSError, ValueError) as error:
        # Of its files; the values of logins are not in these texts.
        raise ConfigurationError(f"the options schema.registry.* are invalid: {error}") from None


def _settings(options: SinkOptions) -> dict[str, Any]:
    seconds = options.schema_registry_timeout_ms / 1000
    settings: dict[str, Any] = {
        "url": options.schema_registry_url,
        "timeout": seconds,
        # Of what is temporary. The first waits are short, as the whole has a bound.
        "retries.wait.ms": 200,
        "retries.max.wait.ms": 2000,
    }
    named: Sequence[str] = (
        *("ssl.ca.location", "ssl.certificate.location", "ssl.key.location", "ssl.key.password"),
        "basic.auth.user.info",
    )
    settings |= {name: text for name in named if (text := _text(options, name))}
    if _text(options, "bearer.auth.token"):
        settings["bearer.auth.credentials.source"] = "STATIC_TOKEN"
    elif _text(options, "bearer.auth.issuer.endpoint.url"):
        settings["bearer.auth.credentials.source"] = "OAUTHBEARER"
    else:
        return settings
    for name in (
        *("token", "logical.cluster", "identity.pool.id", "issuer.endpoint.url", "client.id"),
        *("client.secret", "scope"),
    ):
        if text := _text(options, f"bearer.auth.{name}"):
            settings[f"bearer.auth.{name}"] = text
    return settings


def _text(options: SinkOptions, name: str) -> str:
    value = getattr(options, f"schema_registry_{name.replace('.', '_')}")
    return value if isinstance(value, str) else value.reveal() if value else ""
