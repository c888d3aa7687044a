"""A real Apache Kafka of one or three KRaft brokers on this machine, within a ``with`` block."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from local_kafka.errors import LocalBrokerError
from local_kafka.jars import Java, Progress, find_jars, find_java, print_progress
from local_kafka.node_config import (
    BROKER_LISTENER,
    HOST,
    JVM_FLAGS,
    LOG4J,
    TOOL_FLAGS,
    NodeConfig,
    format_properties,
    meta_properties,
    plan_nodes,
    port_is_free,
    random_id,
    server_properties,
)
from local_kafka.processes import SupervisedProcesses
from local_kafka.start_cache import StartCache

_START_TRIES = 4
# How long a broker may take to end in order and to write its classes. It takes 4 s on an idle machine. If a
# slow machine did not get enough time, each later start and end would be slow again.
_KEEP_CLASSES_S = 60.0
# Properties of the caller that decide what formatting writes, or in which folder.
_FORMATTING = (
    *("log.dir", "log.dirs", "metadata.log.dir"),
    *("unstable.feature.versions.enable", "inter.broker.protocol.version"),
)
_POLL_SECONDS = 0.05


class _PortLost(Exception):
    """Another process has taken a port since it was chosen."""


class LocalBroker:
    """One or three Kafka brokers (combined KRaft mode, one JVM each) on 127.0.0.1; data is deleted at the
    end.

    Use it as a context manager. The brokers end with the block, with Ctrl-C and with this process, even if it
    is killed. Broker ids are 0 .. brokers-1, and every method takes such an id.

    ``port``: the first broker's port (the next ones follow), any free one by default. ``properties``:
    broker properties, which override the defaults here. ``extra_listeners``: listener name to security
    protocol, each on a free port (settings as ``listener.name.<lower-case name>.*`` properties, address
    from ``bootstrap_for``). ``heap``: each JVM's, as for -Xmx. ``java_options``: further JVM flags. The
    constructor and all methods raise LocalBrokerError if a broker fails.
    """

    def __init__(  # noqa: PLR0913 - each is a choice of the caller, by its name
        self,
        brokers: int = 1,
        port: int | None = None,
        properties: Mapping[str, object] | None = None,
        *,
        kafka_home: str | os.PathLike[str] | None = None,
        auto_create_topics: bool = True,
        extra_listeners: Mapping[str, str] | None = None,
        heap: str = "512m",
        java_options: Sequence[str] = (),
        start_timeout_s: float = 90.0,
        progress: Progress = print_progress,
    ) -> None:
        if brokers not in (1, 3):
            raise LocalBrokerError(f"brokers must be 1 or 3, not {brokers}")
        if port is not None and not 1 <= port <= 65535 - brokers:
            raise LocalBrokerError(f"port must be between 1 and {65535 - brokers}, not {port}")
        self._count = brokers
        self._port = port
        self._properties = {name: str(value) for name, value in (properties or {}).items()}
        self._kafka_home = kafka_home
        self._auto_create_topics = auto_create_topics
        self._extra_listeners = dict(extra_listeners or {})
        self._jvm_flags = [f"-Xmx{heap}", *JVM_FLAGS, *java_options]
        self._start_timeout_s = start_timeout_s
        self._progress = progress
        self._processes: SupervisedProcesses | None = None
        self._folder: Path | None = None
        self._nodes: list[NodeConfig] = []
        self._pids: dict[int, int] = {}
        self._java: Java | None = None
        self._jars: Path | None = None
        self._starts = StartCache(None)
        self._has_served = False

    def __enter__(self) -> LocalBroker:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> LocalBroker:
        """Start all brokers and wait until each serves clients. ``with`` does this."""
        if self._processes is not None:
            raise LocalBrokerError("this LocalBroker is already running")
        self._java = find_java()
        self._jars = find_jars(kafka_home=self._kafka_home, progress=self._progress)
        self._starts = StartCache.of(self._java, self._jars)
        for attempt in range(1, _START_TRIES + 1):
            try:
                self._open_once()
                return self
            except _PortLost as lost:
                # Another process may take a port before the JVM binds it. Choose other ports.
                self.close()
                if self._port is not None or attempt == _START_TRIES:
                    raise LocalBrokerError(f"a port was taken while the broker started: {lost}") from lost
            except BaseException:  # also on Ctrl-C: no process and no folder may remain
                self.close()
                raise
        raise AssertionError("the last attempt returns or raises")

    def _open_once(self) -> None:
        try:
            folder = Path(tempfile.mkdtemp(prefix="kafka-chunked-broker-"))
        except OSError as error:
            raise LocalBrokerError(
                f"no folder for the brokers' data: {error}; set TMPDIR to use another place"
            ) from error
        self._folder = folder
        self._nodes = plan_nodes(folder, self._count, self._port, self._extra_listeners)
        self._write_files()
        self._processes = SupervisedProcesses(folder)
        for node in self._nodes:
            self._spawn(node)
        self._await_serving(self._nodes)
        self._has_served = True

    def close(self) -> None:
        """Stop everything and delete the data. Safe to call twice."""
        try:
            self._keep_classes()
        finally:
            processes, self._processes = self._processes, None
            folder, self._folder = self._folder, None
            if processes is not None:
                processes.close()
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
            self._nodes, self._pids = [], {}

    def _keep_classes(self) -> None:
        """After a first start, let the broker end in order, and keep the classes that it then writes."""
        served, self._has_served = self._has_served, False
        if self._folder is None or not served or not self._flags_to_write_classes(self._folder):
            return
        with contextlib.suppress(LocalBrokerError):
            if self.is_running(0):
                self._progress("Keeping the classes that Kafka has loaded, for quicker starts ...")
                self.thaw(0)  # a frozen one would not end
                self.stop(0, _KEEP_CLASSES_S)
                self._starts.keep_classes(self._folder)

    def _flags_to_write_classes(self, folder: Path) -> list[str]:
        """StartCache's flags for one broker, but none for three brokers.

        Writing the classes makes a broker end more slowly, and tests with three brokers are often about how
        one ends.
        """
        return self._starts.flags_to_write_classes(folder) if self._count == 1 else []

    @property
    def bootstrap_servers(self) -> str:
        """host:port of every broker, comma separated; for ``kafka.bootstrap.servers``."""
        return self.bootstrap_for(BROKER_LISTENER)

    def bootstrap_for(self, listener: str) -> str:
        """The addresses as in ``bootstrap_servers``, for one of ``extra_listeners``."""
        self._require_open()
        return ",".join(node.address(listener) for node in self._nodes)

    @property
    def classpath(self) -> str:
        """The class path for ``java -cp``: all of Kafka's jars, clients and tools included."""
        if self._jars is None:
            raise LocalBrokerError("the broker was never started")
        return f"{self._jars}/*"

    @property
    def java(self) -> str:
        """The path of the ``java`` that the brokers run on."""
        if self._java is None:
            raise LocalBrokerError("the broker was never started")
        return self._java.path

    def pid(self, broker: int) -> int:
        """The process id of the broker's JVM."""
        self._node(broker)
        return self._pids[broker]

    def log_dir(self, broker: int) -> Path:
        """Kafka's data folder: one folder per topic-partition, with its segments."""
        return self._node(broker).data

    def is_running(self, broker: int) -> bool:
        """Whether the JVM exists. A frozen one does."""
        self._node(broker)
        return self._require_open().is_running(f"broker-{broker}")

    def kill(self, broker: int) -> None:
        """SIGKILL, and wait until the process is gone."""
        self._signal(broker, signal.SIGKILL)
        self._await_end(broker, 60.0)

    def freeze(self, broker: int) -> None:
        """SIGSTOP, and wait until all threads are stopped: sockets stay open, but the broker is silent."""
        self._signal(broker, signal.SIGSTOP)
        command = ["ps", "-o", "stat=", "-p", str(self.pid(broker))]
        deadline = time.monotonic() + 60.0
        while not subprocess.run(command, capture_output=True, text=True, check=False).stdout.startswith("T"):
            if time.monotonic() > deadline or not self.is_running(broker):
                raise LocalBrokerError(f"broker {broker} could not be frozen")
            time.sleep(_POLL_SECONDS)

    def thaw(self, broker: int) -> None:
        """SIGCONT after ``freeze``."""
        self._signal(broker, signal.SIGCONT)

    def stop(self, broker: int, timeout_s: float = 60.0) -> None:
        """SIGTERM: Kafka's controlled shutdown, which moves leaders away first. Raises if it takes longer."""
        self._signal(broker, signal.SIGTERM)
        self._await_end(broker, timeout_s)

    def start(self, broker: int) -> None:
        """Start a killed or stopped broker on its port and data, and wait until it serves."""
        node = self._node(broker)
        if self.is_running(broker):
            raise LocalBrokerError(f"broker {broker} is already running")
        for port in node.ports.values():
            if not port_is_free(port):
                raise LocalBrokerError(f"port {port} of broker {broker} was taken while it was down")
        self._spawn(node)
        try:
            self._await_serving([node])
        except _PortLost as lost:
            raise LocalBrokerError(f"a port of broker {broker} was taken while it started: {lost}") from lost

    def create_topic(
        self,
        name: str,
        partitions: int = 1,
        replication_factor: int | None = None,
        config: Mapping[str, object] | None = None,
    ) -> None:
        """Create a topic and wait until it exists. The replication factor is the cluster's default."""
        from confluent_kafka import KafkaException
        from confluent_kafka.admin import AdminClient
        from confluent_kafka.cimpl import NewTopic

        factor = min(3, self._count) if replication_factor is None else replication_factor
        values = {key: str(value) for key, value in (config or {}).items()}
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 3})
        topic = NewTopic(name, num_partitions=partitions, replication_factor=factor, config=values)
        try:
            admin.create_topics([topic], operation_timeout=30)[name].result(60)
        except KafkaException as error:
            raise LocalBrokerError(f"topic {name} was not created: {error}") from error

    def run_tool(
        self,
        main_class: str,
        *args: str,
        check: bool = True,
        timeout_s: float = 120.0,
        stdin: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a Java class of Kafka's jars and return its output.

        For instance ``org.apache.kafka.tools.DumpLogSegments``.

        Raises LocalBrokerError on an exit code other than 0, unless ``check`` is False, and on the timeout.
        """
        command = [self.java, *TOOL_FLAGS, "-cp", self.classpath, main_class, *args]
        try:
            done = subprocess.run(
                command, input=stdin or "", capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise LocalBrokerError(f"{main_class} did not end within {timeout_s:.0f} s") from error
        if check and done.returncode != 0:
            raise LocalBrokerError(
                f"{main_class} ended with {done.returncode}: {done.stderr[-2000:] or done.stdout[-2000:]}"
            )
        return done

    def _write_files(self) -> None:
        """Properties, and formatted data folders: by Kafka's tool once for these jars, else by copies.

        Only meta.properties differs between nodes and clusters, and the tool's JVM takes a second.
        """
        cluster_id = random_id()
        for node in self._nodes:
            node.folder.mkdir()
            (node.folder / "log4j2.properties").write_text(LOG4J, encoding="utf-8")
            values = server_properties(
                node,
                self._nodes,
                auto_create_topics=self._auto_create_topics,
                extra_listeners=self._extra_listeners,
                properties=self._properties,
            )
            node.properties_file.write_text(format_properties(values), encoding="utf-8")
        by_default = not any(name in self._properties for name in _FORMATTING)
        first, *others = self._nodes
        if by_default and self._starts.restore_checkpoint(first.data):
            others = self._nodes
        else:
            tool = "kafka.tools.StorageTool"
            self.run_tool(tool, "format", "-t", cluster_id, "-c", str(first.properties_file))
            if by_default:
                self._starts.keep_checkpoint(first.data)
        for node in others:
            if node is not first:
                shutil.copytree(first.data, node.data)
            (node.data / "meta.properties").write_text(
                meta_properties(cluster_id, node.node_id), encoding="ascii"
            )

    def _require_open(self) -> SupervisedProcesses:
        if self._processes is None:
            raise LocalBrokerError("the broker is not running")
        return self._processes

    def _node(self, broker: int) -> NodeConfig:
        self._require_open()
        if not 0 <= broker < len(self._nodes):
            raise LocalBrokerError(f"there is no broker {broker}: ids are 0 to {len(self._nodes) - 1}")
        return self._nodes[broker]

    def _spawn(self, node: NodeConfig) -> None:
        argv = [
            self.java,
            *(self._starts.flags_to_read_classes() or self._flags_to_write_classes(node.folder.parent)),
            *self._jvm_flags,
            f"-Dlog4j2.configurationFile={node.folder / 'log4j2.properties'}",
            *("-cp", self.classpath, "kafka.Kafka", str(node.properties_file)),
        ]
        name = f"broker-{node.node_id}"
        self._pids[node.node_id] = self._require_open().start(name, argv, log=node.log, cwd=node.folder)

    def _signal(self, broker: int, number: signal.Signals) -> None:
        self._node(broker)
        self._require_open().signal(f"broker-{broker}", number)

    def _await_end(self, broker: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while self.is_running(broker):
            if time.monotonic() > deadline:
                raise LocalBrokerError(f"broker {broker} did not end within {timeout_s:.0f} s")
            time.sleep(_POLL_SECONDS)

    def _await_serving(self, nodes: list[NodeConfig]) -> None:
        """Wait until every one of ``nodes`` listens and is listed in the metadata that it serves itself."""
        deadline = time.monotonic() + self._start_timeout_s
        for node in nodes:
            for _ in self._until(deadline, node, "did not listen"):
                with (
                    contextlib.suppress(OSError),
                    socket.create_connection((HOST, node.ports[BROKER_LISTENER]), 1),
                ):
                    break
        wanted = {node.node_id for node in nodes}
        for node in nodes:
            for _ in self._until(deadline, node, "was not registered"):
                if wanted <= _listed_brokers(node.address()):
                    break

    def _until(self, deadline: float, node: NodeConfig, what: str) -> Iterator[None]:
        """Yield at short intervals; raise when the broker ended or the deadline passed."""
        while True:
            if not self.is_running(node.node_id):
                lost = [port for port in node.ports.values() if not port_is_free(port)]
                log = self._last_lines(node)
                if lost or "BindException" in log:
                    raise _PortLost(f"broker {node.node_id}, ports {lost or sorted(node.ports.values())}")
                raise LocalBrokerError(f"broker {node.node_id} ended while it started; its log ends:\n{log}")
            yield
            if time.monotonic() > deadline:
                raise LocalBrokerError(
                    f"broker {node.node_id} {what} within {self._start_timeout_s:.0f} s; its log ends:\n"
                    f"{self._last_lines(node)}"
                )
            time.sleep(_POLL_SECONDS)

    def _last_lines(self, node: NodeConfig, lines: int = 25) -> str:
        try:
            text = node.log.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return "(no log)"
        return "\n".join(text.splitlines()[-lines:]) or "(empty)"


def _listed_brokers(address: str) -> set[int]:
    """The broker ids in the metadata of one broker; empty if it does not respond yet."""
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": address, "log_level": 0, "socket.timeout.ms": 5000})
    try:
        return set(admin.list_topics(timeout=5).brokers)
    except KafkaException:
        return set()
