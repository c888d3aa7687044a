"""Rules that involve several options. Contradictions are errors. Values that Kafka's producer adjusts are
adjusted.

The rules come from ``ProducerConfig`` and ``CommonClientConfigs`` of kafka-clients 4.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from kafka_sink.errors import ConfigurationError
from kafka_sink.model import IDEMPOTENT_IN_FLIGHT, CompressionType
from kafka_sink.options.table import BY_NAME, FORMATS, SECURITY, SPECS
from kafka_sink.options.values import INT_MAX

MAX_CHUNK = 16_384

Values = dict[str, Any]
_DEFAULTS: Mapping[str, Any] = {spec.attribute: spec.default for spec in SPECS}


def settle(given: Mapping[str, Any]) -> tuple[Values, list[str]]:
    """Apply all rules to the given values, by attribute name. Returns the values to use, including adjusted
    ones, and warnings. Raises ConfigurationError if values contradict each other."""
    values = {**_DEFAULTS, **given}
    return values, [warning for rule in _RULES for warning in rule(values, given) or ()]


def _needs(values: Values, given: Mapping[str, Any]) -> None:
    """Refuse an option that has no effect without another one, or a value of it (``OptionSpec.needs``)."""
    for spec in SPECS:
        if spec.needs and spec.attribute in given:
            name, equals, wanted = spec.needs.partition("=")
            other = BY_NAME[name.lower()]
            value = values[other.attribute]
            has_effect = value == other.kind.parse(wanted) if equals else bool(value)
            if not has_effect:
                raise ConfigurationError(
                    f"Option '{spec.name}' has no effect without {spec.needs}: also set that, or remove "
                    f"'{spec.name}'"
                )


def _rack(values: Values, _: Mapping[str, Any]) -> None:
    if values["partitioner_rack_aware"] and not values["client_rack"].strip():
        raise ConfigurationError(
            "kafka.partitioner.rack.aware=true needs kafka.client.rack: the rack or zone of executors, or "
            "${env:NAME} to read it from their environment"
        )


def _idempotence(values: Values, given: Mapping[str, Any]) -> Iterator[str]:
    in_flight = values["max_in_flight_requests_per_connection"]
    conflicts = []
    if values["acks"] != -1:
        conflicts.append((f"kafka.acks={values['acks']}", "acks=all"))
    if values["retries"] == 0:
        conflicts.append(("kafka.retries=0", "retries above 0"))
    if in_flight > IDEMPOTENT_IN_FLIGHT:
        name = "kafka.max.in.flight.requests.per.connection"
        conflicts.append((f"{name}={in_flight}", f"at most {IDEMPOTENT_IN_FLIGHT} requests in flight"))
    if not conflicts or not values["enable_idempotence"]:
        return
    against = " and ".join(conflict for conflict, _ in conflicts)
    needs = " and ".join(need for _, need in conflicts)
    if "enable_idempotence" in given:
        raise ConfigurationError(f"kafka.enable.idempotence=true needs {needs}, but {against} is set")
    values["enable_idempotence"] = False
    because = f"kafka.enable.idempotence is off because of {against} (it needs {needs})"
    yield f"{because}: retries may duplicate or reorder rows"


def _exactly_once(values: Values, _: Mapping[str, Any]) -> None:
    """Check what exactly-once requires. Runs after the rule about idempotence, which may have disabled it."""
    if values["delivery_guarantee"] != "exactly-once":
        return
    if values["acks"] != -1:
        raise ConfigurationError("delivery.guarantee=exactly-once needs kafka.acks=all")
    if not values["enable_idempotence"]:
        raise ConfigurationError(
            "delivery.guarantee=exactly-once needs idempotence: kafka.enable.idempotence=true, "
            f"kafka.retries above 0 and at most {IDEMPOTENT_IN_FLIGHT} requests in flight"
        )
    if (values["txn_app_id"] == "") != (values["txn_version"] == -1):
        missing = "txnAppId" if values["txn_app_id"] == "" else "txnVersion"
        raise ConfigurationError(f"Options 'txnAppId' and 'txnVersion' must be set together: set '{missing}'")


def _dead_letters(values: Values, _: Mapping[str, Any]) -> None:
    topic = values["errors_deadletterqueue_topic_name"]
    if topic is not None and topic == values["topic"]:
        raise ConfigurationError(
            f"Options 'topic' and 'errors.deadletterqueue.topic.name' are both '{topic}': use "
            "another topic for dead letters"
        )


def _unconfirmed(values: Values, _: Mapping[str, Any]) -> Iterator[str]:
    if values["acks"] == 0:
        yield (
            "kafka.acks=0: brokers acknowledge nothing, so rows can be lost without an error; they are "
            "reported as unconfirmed"
        )


def _delivery_timeout(values: Values, given: Mapping[str, Any]) -> Iterator[str]:
    linger, request = values["linger_ms"], values["request_timeout_ms"]
    delivery, minimum = values["delivery_timeout_ms"], min(linger + request, INT_MAX)
    if delivery >= minimum:
        return
    sum_text = f"kafka.linger.ms ({linger}) + kafka.request.timeout.ms ({request})"
    if "delivery_timeout_ms" in given:
        raise ConfigurationError(f"kafka.delivery.timeout.ms ({delivery}) must be at least {sum_text}")
    values["delivery_timeout_ms"] = minimum
    yield f"kafka.delivery.timeout.ms is raised from its default {delivery} to {minimum}: {sum_text}"


def _memory(values: Values, _: Mapping[str, Any]) -> Iterator[str]:
    batch, buffer = values["batch_size"], values["buffer_memory"]
    strategy = values["buffer_memory_allocation_strategy"]
    sizes = f"kafka.batch.size ({batch}) is larger than kafka.buffer.memory ({buffer})"
    if batch > buffer and strategy == "full":
        raise ConfigurationError(f"{sizes}: with the allocation strategy 'full' no batch could be opened")
    chunk = min(MAX_CHUNK, batch)
    if chunk > buffer:
        raise ConfigurationError(f"kafka.buffer.memory ({buffer}) is smaller than one chunk of {chunk} bytes")
    if batch > buffer:
        yield f"{sizes}: batches are closed before they are full, when the memory is used up"


def _request_size(values: Values, _: Mapping[str, Any]) -> Iterator[str]:
    batch, request = values["batch_size"], values["max_request_size"]
    if batch > request:
        yield (
            f"kafka.batch.size ({batch}) is larger than kafka.max.request.size ({request}): each full batch "
            "needs its own request, and the topic's max.message.bytes must allow it"
        )


def _compression_level(values: Values, given: Mapping[str, Any]) -> Iterator[str]:
    for codec in (CompressionType.GZIP, CompressionType.LZ4, CompressionType.ZSTD):
        name = codec.name.lower()
        if f"compression_{name}_level" in given and values["compression_type"] is not codec:
            yield f"kafka.compression.{name}.level has no effect without kafka.compression.type={name}"


def _reconnect_backoff(values: Values, given: Mapping[str, Any]) -> None:
    """The wait between attempts is constant if only the first wait is set, as in Java."""
    if "reconnect_backoff_ms" in given and "reconnect_backoff_max_ms" not in given:
        values["reconnect_backoff_max_ms"] = values["reconnect_backoff_ms"]


def _capped(values: Values, _: Mapping[str, Any]) -> Iterator[str]:
    """Reduce a wait or timeout to the maximum that another option sets."""
    for name in ("retry.backoff", "reconnect.backoff", "socket.connection.setup.timeout"):
        attribute, limit = (f"{name}{end}".replace(".", "_") for end in (".ms", ".max.ms"))
        value, maximum = values[attribute], values[limit]
        if value > maximum:
            values[attribute] = maximum
            yield (
                f"kafka.{name}.ms ({value}) is larger than kafka.{name}.max.ms ({maximum}): {maximum} is "
                "used for both"
            )


def _topic_creation(values: Values, given: Mapping[str, Any]) -> None:
    if not values["topic_create"]:
        return
    if values["topic"] is None:
        if not values["topic_create_names"]:
            raise ConfigurationError(
                "topic.create=true needs the option 'topic', or topic.create.names: topics in a column "
                "'topic' are not known in advance"
            )
        # Brokers may still create topics that this option does not list.
        return
    # Otherwise brokers would recreate a topic that is deleted during the job, with their own defaults.
    if "allow_auto_create_topics" not in given:
        values["allow_auto_create_topics"] = False


def _unused_security(values: Values, given: Mapping[str, Any]) -> None:
    """Refuse security options that the protocol does not use. Java ignores them silently."""
    protocol = values["security_protocol"]
    changed = [spec for spec in SPECS if spec.group == SECURITY and given.get(spec.attribute, spec.default)
               != spec.default]  # fmt: skip
    tls = [spec.name for spec in changed if "ssl." in spec.name]
    login = [spec.name for spec in changed if "sasl." in spec.name]
    unused = [*(tls if not protocol.endswith("SSL") else ()), *(login if "SASL" not in protocol else ())]
    if not unused:
        return
    wanted = "SASL_SSL" if login or "SASL" in protocol else "SSL"
    raise ConfigurationError(
        f"Option '{unused[0]}' has no effect with kafka.security.protocol={protocol}: set "
        f"kafka.security.protocol={wanted}, or remove {', '.join(unused)}"
    )


def _verification(values: Values, _: Mapping[str, Any]) -> Iterator[str]:
    if values["ssl_endpoint_identification_algorithm"] in ("", "none"):
        yield (
            "kafka.ssl.endpoint.identification.algorithm is switched off: any host with a certificate of a "
            "trusted authority can impersonate a broker"
        )
    if values["security_protocol"] == "SASL_PLAINTEXT":
        secret = values["sasl_mechanism"] in ("PLAIN", "OAUTHBEARER")
        what = "password or token" if secret else "proof of the login"
        yield f"kafka.security.protocol=SASL_PLAINTEXT sends rows and the {what} unencrypted"
    if values["sasl_oauthbearer_token_endpoint_url"].lower().startswith("http://"):
        yield (
            "kafka.sasl.oauthbearer.token.endpoint.url begins with http://: client secret and tokens are "
            "sent unencrypted; use https://"
        )


_SOURCES = ("schema", "schema_id", "schema_version")


def _formats(values: Values, given: Mapping[str, Any]) -> Iterator[str]:
    encoded = [part for part in ("value", "key") if values[f"{part}_format"] != "bytes"]
    for spec in SPECS:
        if spec.group != FORMATS or given.get(spec.attribute, spec.default) == spec.default:
            continue
        part = spec.name.split(".")[0]
        needed = [part] if part in ("value", "key") else ["value", "key"]
        if not set(needed) & set(encoded):
            wanted = " or ".join(f"{name}.format" for name in needed)
            raise ConfigurationError(
                f"Option '{spec.name}' has no effect without {wanted}: set that to avro, protobuf or json, "
                f"or remove '{spec.name}'"
            )
    if encoded and not values["schema_registry_url"]:
        raise ConfigurationError(
            f"{encoded[0]}.format={values[f'{encoded[0]}_format']} needs schema.registry.url"
        )
    for part in encoded:
        _schema_source(values, part)
    return _schema_login(values)


def _schema_source(values: Values, part: str) -> None:
    """Refuse more than one source for the same schema, and a missing one for Protobuf."""
    sources = [
        f"{part}.{name.replace('_', '.')}"
        for name in _SOURCES
        if values[f"{part}_{name}"] != _DEFAULTS[f"{part}_{name}"]
    ]
    sources += ["use.latest.version"] if values["use_latest_version"] else []
    if len(sources) > 1:
        raise ConfigurationError(
            f"Options '{sources[0]}' and '{sources[1]}' both select the schema: set only one of them"
        )
    if values[f"{part}_format"] == "protobuf" and not sources:
        raise ConfigurationError(
            f"{part}.format=protobuf needs a schema, because it cannot be derived from columns: set "
            f"{part}.schema, {part}.schema.id, {part}.schema.version or use.latest.version"
        )
    if (
        values["topic"] is None
        and not values["schema_registry_topics"]
        and values[f"{part}_subject_name_strategy"] != "RecordNameStrategy"
        and values[f"{part}_schema_id"] == -1
    ):
        raise ConfigurationError(
            f"{part}.format={values[f'{part}_format']} needs the topics when the write starts, to look "
            "up their subjects: set the option 'topic', list the topics of the column 'topic' in "
            f"schema.registry.topics, or set {part}.subject.name.strategy=RecordNameStrategy"
        )


def _schema_login(values: Values) -> Iterator[str]:
    logins = [
        name
        for name in ("basic.auth.user.info", "bearer.auth.token", "bearer.auth.issuer.endpoint.url")
        if values[f"schema_registry_{name.replace('.', '_')}"]
    ]
    if len(logins) > 1:
        raise ConfigurationError(
            f"Options 'schema.registry.{logins[0]}' and 'schema.registry.{logins[1]}' are two logins: set "
            "only one of them"
        )
    user = values["schema_registry_basic_auth_user_info"]
    if user and ":" not in user.reveal():
        raise ConfigurationError("Option 'schema.registry.basic.auth.user.info' is not user:password")
    has_token = bool(logins) and logins[0].startswith("bearer.")
    for name in ("bearer.auth.logical.cluster", "bearer.auth.identity.pool.id"):
        if values[f"schema_registry_{name.replace('.', '_')}"] and not has_token:
            yield f"schema.registry.{name} has no effect without a token for the registry"
    issuer = "schema.registry.bearer.auth.issuer.endpoint.url"
    urls = {"schema.registry.url": values["schema_registry_url"]} if logins else {}
    urls |= {issuer: values[issuer.replace(".", "_")]}
    for name, addresses in urls.items():
        if any(address.strip().lower().startswith("http://") for address in addresses.split(",")):
            yield f"{name} begins with http://: the login is sent unencrypted; use https://"


_EVENT_HUBS = ".servicebus.windows.net"
# Azure closes connections that are idle for 240 s, and accepts requests of at most 1,046,528 bytes.
_EVENT_HUBS_MAX: Mapping[str, int] = {
    "max_request_size": 1_000_000,
    "batch_size": 1_000_000,
    "connections_max_idle_ms": 180_000,
    "metadata_max_age_ms": 180_000,
}


def _event_hubs(values: Values, given: Mapping[str, Any]) -> Iterator[str]:
    """Lower options that were not set to Azure's limits, which are below the defaults."""
    if not any(host.lower().endswith(_EVENT_HUBS) for host, _ in values["bootstrap_servers"]):
        return
    adapted = []
    for attribute, maximum in _EVENT_HUBS_MAX.items():
        name, value = f"kafka.{attribute.replace('_', '.')}", values[attribute]
        if 0 <= value <= maximum:
            continue
        if attribute in given:
            yield f"{name}={value} exceeds the limit of Azure Event Hubs: set {maximum} or less"
        else:
            values[attribute] = maximum
            adapted.append(f"{name}={maximum}")
    if adapted:
        yield f"lowered for Azure Event Hubs: {', '.join(adapted)}"


# Each rule changes values, yields warnings or raises.
_RULES: tuple[Callable[[Values, Mapping[str, Any]], Iterable[str] | None], ...] = (
    _event_hubs,
    _unused_security,
    _verification,
    _idempotence,
    _exactly_once,
    _needs,
    _dead_letters,
    _unconfirmed,
    _delivery_timeout,
    _memory,
    _request_size,
    _compression_level,
    _reconnect_backoff,
    _capped,
    _topic_creation,
    _formats,
    _rack,
)
