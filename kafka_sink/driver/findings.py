"""What the doctor finds: at a cluster, and in a session's settings as they are now. It changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from kafka_sink.driver.command_line import Finding, note, ok, problem
from kafka_sink.driver.driver_conf import OWN_PREFIX, idle_timeout_problem
from kafka_sink.driver.planning_client import CONNECT_BOUND_MS, PlanningClient
from kafka_sink.driver.topic_preparation import TopicPreparation
from kafka_sink.driver.topics import named_topics
from kafka_sink.errors import KafkaSinkError, MissingTopicError
from kafka_sink.options import redaction
from kafka_sink.options.table import SPECS
from kafka_sink.printable import printable, printable_list
from kafka_sink.rows import hand_over

if TYPE_CHECKING:
    from kafka_sink.options import SinkOptions

# For each address and each broker, where others respond.
_ONE_BROKER_MS = 3000.0
_NEAR = 3
_MIN_ISR = "min.insync.replicas"


def of_cluster(options: SinkOptions) -> Iterator[Finding]:
    """Connect as planning does, but create nothing. Raises KafkaSinkError where no broker can be used."""
    asked = replace(options, topic_create=False, allow_auto_create_topics=False)
    usable, missing = "brokers, login and topic", []
    with PlanningClient(asked, min(CONNECT_BOUND_MS, asked.max_block_ms)) as client:
        # Without a topic, the brokers and the login alone.
        for topic, option in named_topics(asked).items() or (("", ""),):
            try:
                TopicPreparation(asked, client, {topic: option} if topic else {}).run()
            except MissingTopicError as error:
                usable = "brokers and login"
                missing.append((topic, option, error))
    dead = _dead_addresses(asked)
    yield from dead.values()
    alive = tuple(one for one in options.bootstrap_servers if one not in dead)
    try:
        yield from _looked_at(replace(options, bootstrap_servers=alive), missing)
    except Exception as error:  # noqa: BLE001 - kafka-python's own errors; what counts was tried above
        yield from (_of_missing(options, *one, ()) for one in missing)
        why = f"{type(error).__name__}: {printable(str(error))}"
        yield note(f"brokers, replicas and rights could not be looked at ({why})")
    yield ok(f"{usable}: usable")


def _dead_addresses(options: SinkOptions) -> dict[tuple[str, int], Finding]:
    """Addresses that others hide: a job starts while one of them responds."""
    dead = dict[tuple[str, int], Finding]()
    for address in options.bootstrap_servers if len(options.bootstrap_servers) > 1 else ():
        one = replace(options, bootstrap_servers=(address,))
        try:
            with PlanningClient(one, _ONE_BROKER_MS) as client:
                client.connect()
        except KafkaSinkError as error:
            dead[address] = note(f"an address of kafka.bootstrap.servers is dead: {error}")
    return dead


def _looked_at(
    options: SinkOptions, missing: Sequence[tuple[str, str, MissingTopicError]]
) -> Iterator[Finding]:
    from kafka import KafkaAdminClient

    from kafka_sink.driver.kafka_python import client_settings

    with closing(KafkaAdminClient(**client_settings(options))) as admin:
        cluster = admin.describe_cluster()
        known = admin.list_topics() if missing else []
        yield from (_of_missing(options, *one, known) for one in missing)
        brokers = cluster["brokers"]
        yield ok(f"cluster {printable(str(cluster['cluster_id']))}: {len(brokers)} brokers")
        dead = {int(broker["broker_id"]): finding for broker, finding in _dead_brokers(options, brokers)}
        yield from dead.values()
        yield from _versions(
            [one for broker in brokers if (one := int(broker["broker_id"])) not in dead], admin
        )
        absent = {topic for topic, _, _ in missing}
        for topic in (name for name in named_topics(options) if name not in absent):
            yield from _of_topic(options, topic, admin)


def _versions(brokers: Sequence[int], admin: Any) -> Iterator[Finding]:
    """The brokers' versions, guessed from the APIs that each supports: no response names them."""
    found = {broker: admin.get_broker_version_data(broker).broker_version for broker in brokers}
    named = {broker: ".".join(map(str, version)) for broker, version in found.items()}
    if len(set(named.values())) == 1:
        yield ok(f"all brokers have the APIs of Kafka {next(iter(named.values()))}")
    elif named:
        which = printable_list(f"broker {broker}: {version}" for broker, version in sorted(named.items()))
        yield note(f"brokers have the APIs of different versions of Kafka: {which}")


def _dead_brokers(
    options: SinkOptions, brokers: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], Finding]]:
    for broker in brokers:
        one = replace(options, bootstrap_servers=((str(broker["host"]), int(broker["port"])),))
        try:
            with PlanningClient(one, _ONE_BROKER_MS) as client:
                client.connect()
        except KafkaSinkError as error:
            yield (
                broker,
                problem(
                    f"broker {broker['broker_id']} cannot be reached at its own address, so rows for its "
                    f"partitions wait until kafka.delivery.timeout.ms: {error}"
                ),
            )


def _of_topic(options: SinkOptions, topic: str, admin: Any) -> Iterator[Finding]:
    (found,) = admin.describe_topics([topic])
    partitions = found["partitions"]
    replicas = min((len(one["replica_nodes"]) for one in partitions), default=0)
    minimum = _min_in_sync(topic, admin)
    text = f"topic '{topic}': {len(partitions)} partitions, {replicas} replicas"
    yield ok(f"{text}, {_MIN_ISR}={minimum}" if minimum else text)
    headless = [one["partition_index"] for one in partitions if one["leader_id"] < 0]
    if headless:
        yield problem(f"topic '{topic}': no leader for partitions {printable_list(map(str, headless))}")
    short = [one["partition_index"] for one in partitions if len(one["isr_nodes"]) < (minimum or 0)]
    if short and options.acks == -1:
        yield problem(
            f"topic '{topic}': partitions {printable_list(map(str, short))} have fewer replicas in sync than "
            f"{_MIN_ISR}={minimum}, so rows with acks=all wait: start the brokers that hold them"
        )
    elif minimum and minimum > 1 and replicas == minimum and options.acks == -1:
        yield note(
            f"topic '{topic}' has as many replicas as {_MIN_ISR}={minimum}: one broker that stops holds its "
            "partitions up. Three replicas and a minimum of two bear that"
        )


def _min_in_sync(topic: str, admin: Any) -> int | None:
    """None without the right to see it."""
    from kafka.admin import ConfigResource, ConfigResourceType
    from kafka.errors import KafkaError

    try:
        found = admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)], config_filter="all")
        return int(found["topic"][topic][_MIN_ISR]["value"])
    except (KafkaError, KeyError, TypeError, ValueError):
        return None


def _of_missing(
    options: SinkOptions, topic: str, option: str, error: MissingTopicError, known: Sequence[str]
) -> Finding:
    near = get_close_matches(topic, known, n=_NEAR, cutoff=0.7)
    hint = f". There is {' and '.join(repr(one) for one in near)}" if near else ""
    what = f"Option '{option}': there is no topic '{topic}'"
    if options.topic_create:
        return note(f"{what}; a job creates it (topic.create=true){hint}")
    if options.allow_auto_create_topics:
        return note(
            f"{what}; a job fails unless brokers create it by themselves (auto.create.topics.enable). To be "
            f"sure, create it, or set topic.create=true{hint}"
        )
    return problem(f"{error}{hint}")


# -- of a session ----------------------------------------------------------------------------------------


def of_session(
    spark: Any,
    given: Mapping[str, str],
    options: SinkOptions,
    environ: Mapping[str, str],
    administered: Collection[str],
) -> Iterator[Finding]:
    """Planning sees only the settings with which the driver was started.

    ``spark``: a SparkSession, also of Spark Connect. ``given``: the job's options, of which ``options``
    were made. ``administered``: options that environment and session may set."""

    def conf(name: str) -> str | None:
        value = spark.conf.get(name, None)
        return None if value is None else str(value)

    yield ok(f"the session is of Spark {spark.version}")
    timeout_problem = idle_timeout_problem(conf, options.delivery_timeout_ms)
    if timeout_problem is not None:
        yield problem(timeout_problem)
    known = {name: found for name in redaction.DEFAULTS if (found := conf(name)) is not None}
    shown = redaction.shown_by_spark(given, known)
    if shown:
        yield note(redaction.warning(shown))
    yield from (note(text) for text in hand_over.advice(conf))
    if conf("spark.speculation") == "true" and not options.exactly_once:
        yield note(
            "spark.speculation=true runs copies of slow tasks, and each writes its rows: readers see some "
            "twice, unless delivery.guarantee=exactly-once"
        )
    for spec in SPECS:
        own, variable = OWN_PREFIX + spec.name, "KAFKA_CHUNKED_" + spec.name.upper().replace(".", "_")
        for name, value in ((variable, environ.get(variable)), (own, conf(own))):
            if value and spec.name in administered:
                yield note(f"{name}={value} overrides the option '{spec.name}'")
            elif value:
                # It may be a password.
                yield problem(f"{name} has no effect: give the option '{spec.name}' to the job")
