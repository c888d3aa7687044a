"""Ports, properties and flags of the brokers: values only, apart from probing which ports are free."""

from __future__ import annotations

import base64
import random
import socket
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from local_kafka.errors import LocalBrokerError

HOST = "127.0.0.1"

# Below Linux's range of ephemeral ports (32768 and above): a client that retries a dead broker's port
# from the ephemeral range can connect to itself, and the broker could then never come back on that port.
_PORTS = (20_000, 32_000)
_PORT_TRIES = 200
_RANDOM = random.SystemRandom()

BROKER_LISTENER = "BROKER"
CONTROLLER_LISTENER = "CONTROLLER"

LOG4J = """status = error
appender.console.type = Console
appender.console.name = out
appender.console.layout.type = PatternLayout
appender.console.layout.pattern = %d %p %c{1} %m%n
rootLogger.level = warn
rootLogger.appenderRef.out.ref = out
logger.server.name = kafka.server.KafkaRaftServer
logger.server.level = info
logger.broker.name = kafka.server.BrokerServer
logger.broker.level = info
"""

# Starts fastest on two cores; heap and the rest come from the caller.
JVM_FLAGS = ("-XX:+UseSerialGC", "-XX:+ExitOnOutOfMemoryError", "-Djava.awt.headless=true")
TOOL_FLAGS = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx256m", "-Djava.awt.headless=true")


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """One combined broker and controller: its id, its folder and a port per listener."""

    node_id: int
    folder: Path
    ports: Mapping[str, int]

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def log(self) -> Path:
        return self.folder / "broker.log"

    @property
    def properties_file(self) -> Path:
        return self.folder / "server.properties"

    def address(self, listener: str = BROKER_LISTENER) -> str:
        return f"{HOST}:{self.ports[listener]}"


def port_is_free(port: int) -> bool:
    """Whether a listener could bind the port now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Java sets the same option: a port with connections in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def free_port(taken: set[int], ports: tuple[int, int] = _PORTS) -> int:
    """A free port outside the ephemeral range that is not in ``taken``; it is added there."""
    for _ in range(_PORT_TRIES):
        port = _RANDOM.randrange(*ports)
        if port not in taken and port_is_free(port):
            taken.add(port)
            return port
    raise LocalBrokerError(f"found no free port in {_PORT_TRIES} tries between {ports[0]} and {ports[1]}")


def plan_nodes(
    folder: Path, brokers: int, port: int | None, extra_listeners: Mapping[str, str]
) -> list[NodeConfig]:
    """Ports and folders of all brokers. Broker ``i`` gets ``port + i`` if ``port`` is given.

    Raises LocalBrokerError if such a port is taken.
    """
    asked = [] if port is None else [port + index for index in range(brokers)]
    for wanted in asked:
        if not port_is_free(wanted):
            raise LocalBrokerError(
                f"port {wanted} is taken by another process; choose another port, or leave it out"
            )
    taken = set(asked)
    nodes = []
    for index in range(brokers):
        ports = {BROKER_LISTENER: asked[index] if asked else free_port(taken)}
        for listener in (CONTROLLER_LISTENER, *extra_listeners):
            ports[listener] = free_port(taken)
        nodes.append(NodeConfig(index, folder / f"broker-{index}", ports))
    return nodes


def server_properties(
    node: NodeConfig,
    nodes: list[NodeConfig],
    *,
    auto_create_topics: bool,
    extra_listeners: Mapping[str, str],
    properties: Mapping[str, str],
) -> dict[str, str]:
    """The node's server.properties. The caller's ``properties`` override the other properties."""
    replicas = min(3, len(nodes))
    in_sync = max(1, replicas - 1)
    protocols = {BROKER_LISTENER: "PLAINTEXT", CONTROLLER_LISTENER: "PLAINTEXT", **extra_listeners}
    advertised = {name: port for name, port in node.ports.items() if name != CONTROLLER_LISTENER}
    values = {
        "process.roles": "broker,controller",
        "node.id": node.node_id,
        "broker.rack": f"rack-{node.node_id}",
        "controller.quorum.voters": ",".join(f"{n.node_id}@{n.address(CONTROLLER_LISTENER)}" for n in nodes),
        "controller.listener.names": CONTROLLER_LISTENER,
        "inter.broker.listener.name": BROKER_LISTENER,
        "listeners": ",".join(f"{name}://{HOST}:{port}" for name, port in node.ports.items()),
        "advertised.listeners": ",".join(f"{name}://{HOST}:{port}" for name, port in advertised.items()),
        "listener.security.protocol.map": ",".join(
            f"{name}:{protocol}" for name, protocol in protocols.items()
        ),
        "log.dirs": node.data,
        "auto.create.topics.enable": str(auto_create_topics).lower(),
        "num.partitions": 4,
        "default.replication.factor": replicas,
        "min.insync.replicas": in_sync,
        "offsets.topic.replication.factor": replicas,
        "offsets.topic.num.partitions": 4,
        "transaction.state.log.replication.factor": replicas,
        "transaction.state.log.min.isr": in_sync,
        "transaction.state.log.num.partitions": 4,
        "share.coordinator.state.topic.replication.factor": replicas,
        "share.coordinator.state.topic.min.isr": in_sync,
        "share.coordinator.state.topic.num.partitions": 4,
        "group.initial.rebalance.delay.ms": 0,
        # A killed broker can register again only after its old session has ended: 9 s by default.
        "broker.heartbeat.interval.ms": 500,
        # The active controller writes a record every half second by default, a third of the cost of idle
        # brokers.
        "metadata.max.idle.interval.ms": 5000,
        "broker.session.timeout.ms": 3000 if len(nodes) == 1 else 6000,
        # Retention follows the records' timestamps: rows with old event times would be deleted half a minute
        # after the start.
        "log.retention.ms": -1,
        # 128 MiB of the heap by default, for compaction, which a short-lived broker hardly needs.
        "log.cleaner.dedupe.buffer.size": 8 * 1024 * 1024,
        **properties,
    }
    return {name: str(value) for name, value in values.items()}


def format_properties(values: Mapping[str, str]) -> str:
    """The text for Java: backslashes doubled, line ends escaped; a name ends at its first bare ``=``."""
    lines = (_escaped(name).replace("=", "\\=") + "=" + _escaped(value) for name, value in values.items())
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    """Java reads the file as Latin-1, so other characters are written as UTF-16 escapes."""
    text = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")
    return "".join(char if " " <= char <= "~" else _utf16(char) for char in text)


def _utf16(char: str) -> str:
    data = char.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{data[at : at + 2].hex()}" for at in range(0, len(data), 2))


def random_id() -> str:
    """A Kafka Uuid as text: 16 bytes in URL-safe base64. No leading dash: tools take it for an option."""
    while True:
        text = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode("ascii").rstrip("=")
        if not text.startswith("-"):
            return text


def meta_properties(cluster_id: str, node_id: int) -> str:
    """meta.properties version 1, as Kafka's StorageTool writes it (MetaPropertiesVersion.V1)."""
    return f"version=1\ncluster.id={cluster_id}\nnode.id={node_id}\ndirectory.id={random_id()}\n"
