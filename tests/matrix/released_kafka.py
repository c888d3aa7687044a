"""One broker of an old Apache Kafka release on 127.0.0.1, with its ZooKeeper, and jars of any release.

``local_kafka`` runs releases with KRaft; this runs the others, for checking what the sink claims about them.
Jars come from Maven Central through the Ivy that PySpark ships.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from local_kafka.jars import cache_root, find_java
from local_kafka.node_config import HOST, free_port
from local_kafka.processes import SupervisedProcesses
from tests.support.waiting import until

_START_S = 90.0
_POLL_S = 0.1
# ZooKeeper's client before 3.5.8 cannot connect on Java 14 and newer (ZOOKEEPER-3779), and Kafka before 2.4
# ships 3.4. 3.5's client serves the same API.
_ZOOKEEPER_FOR_JAVA_17 = "3.5.10"
_LOG4J1 = """log4j.rootLogger=WARN, out
log4j.appender.out=org.apache.log4j.ConsoleAppender
log4j.appender.out.layout=org.apache.log4j.PatternLayout
log4j.appender.out.layout.ConversionPattern=%d %p %c %m%n
"""


@dataclass(frozen=True)
class Release:
    """A released Kafka, for this Scala. ``zookeeper``: it needs one."""

    version: str
    scala: str
    zookeeper: bool


WITH_ZOOKEEPER = (Release("2.1.1", "2.12", True), Release("2.8.2", "2.13", True))
# The last one with transaction protocol 1.
LAST_OF_3 = Release("3.9.1", "2.13", False)
# The releases with KRaft, other than the newest, that the sink is tried with.
WITH_KRAFT = (LAST_OF_3, Release("4.3.0", "2.13", False))


class ReleasedKafka:
    """One broker of a release with ZooKeeper, for as long as a ``with`` block runs; its data goes with it.

    Raises AssertionError, with the end of its log, where the broker does not start within 90 s.
    """

    def __init__(self, release: Release) -> None:
        self._release = release
        self._folder = Path(tempfile.mkdtemp(prefix="released-kafka-"))
        self._processes: SupervisedProcesses | None = None
        taken: set[int] = set()
        self._port, self._zookeeper_port = free_port(taken), free_port(taken)

    @property
    def bootstrap_servers(self) -> str:
        return f"{HOST}:{self._port}"

    def __enter__(self) -> ReleasedKafka:
        jars = jars_of(self._release)
        self._processes = SupervisedProcesses(self._folder)
        (self._folder / "log4j.properties").write_text(_LOG4J1, encoding="ascii")
        properties = self._folder / "server.properties"
        properties.write_text("".join(f"{k}={v}\n" for k, v in self._server().items()), encoding="utf-8")
        zookeeper = "org.apache.zookeeper.server.ZooKeeperServerMain"
        try:
            place = str(self._folder / "zookeeper")
            self._start("zookeeper", jars, zookeeper, str(self._zookeeper_port), place)
            self._await("zookeeper", self._zookeeper_listens)
            self._start("broker", jars, "kafka.Kafka", str(properties))
            self._await("broker", self._broker_serves)
        except BaseException:
            self._processes.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._processes is not None:
            self._processes.close()

    def _server(self) -> dict[str, str]:
        return {
            "log.dirs": str(self._folder / "data"),
            "num.partitions": "4",
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "4",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "4",
            "group.initial.rebalance.delay.ms": "0",
            "log.retention.ms": "-1",
            "log.cleaner.dedupe.buffer.size": str(8 * 1024 * 1024),
            "broker.id": "0",
            "zookeeper.connect": f"{HOST}:{self._zookeeper_port}",
            "listeners": f"PLAINTEXT://{HOST}:{self._port}",
        }

    def _start(self, name: str, jars: Path, main_class: str, *arguments: str) -> None:
        assert self._processes is not None
        argv = [
            find_java().path,
            *("-Xmx512m", "-XX:+UseSerialGC", "-Djava.awt.headless=true"),
            *("-Dzookeeper.admin.enableServer=false", "-Dzookeeper.4lw.commands.whitelist=*"),
            f"-Dlog4j.configuration=file:{self._folder / 'log4j.properties'}",
            *("-cp", f"{jars}/*", main_class, *arguments),
        ]
        self._processes.start(name, argv, log=self._folder / f"{name}.log", cwd=self._folder)

    def _zookeeper_listens(self) -> bool:
        with contextlib.suppress(OSError), socket.create_connection((HOST, self._zookeeper_port), 1):
            return True
        return False

    def _broker_serves(self) -> bool:
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})
        with contextlib.suppress(KafkaException):
            return len(admin.list_topics(timeout=5).brokers) > 0
        return False

    def _await(self, name: str, condition: Callable[[], bool]) -> None:
        def said() -> str:
            log = (self._folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
            return f"{name} of Kafka {self._release.version} did not start: {log[-2000:]}"

        def has_started() -> bool:
            assert self._processes is not None
            assert self._processes.is_running(name), said()
            return condition()

        until(has_started, said, _START_S, _POLL_S)


def jars_of(release: Release) -> Path:
    final = cache_root() / f"matrix-kafka-{release.version}"
    if final.is_dir():
        return final
    final.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f"{final.name}.part-", dir=final.parent))
    try:
        module = staging / "ivy.xml"
        module.write_text(_ivy_module(release), encoding="utf-8")
        command = [find_java().path, "-jar", str(ivy_jar()), "-ivy", str(module), "-confs", "default"]
        command += ["-retrieve", f"{staging}/jars/[artifact]-[revision](-[classifier]).[ext]"]
        command += ["-cache", str(staging / "cache")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        if done.returncode:
            raise RuntimeError(f"Kafka {release.version} could not be downloaded: {done.stdout[-2000:]}")
        try:
            (staging / "jars").rename(final)
        except OSError:
            # Another process was faster.
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return final


def ivy_jar() -> Path:
    """The one that PySpark ships."""
    spec = importlib.util.find_spec("pyspark")
    assert spec is not None
    assert spec.origin is not None
    return max((Path(spec.origin).parent / "jars").glob("ivy-*.jar"))


def _ivy_module(release: Release) -> str:
    of = {"org.apache.kafka": (f"kafka_{release.scala}", release.version)}
    of["org.slf4j"] = ("slf4j-log4j12", "1.7.36")
    overridden = ""
    if release.zookeeper:
        of["org.apache.zookeeper"] = ("zookeeper", _ZOOKEEPER_FOR_JAVA_17)
        overridden = f'<override org="org.apache.zookeeper" rev="{_ZOOKEEPER_FOR_JAVA_17}"/>'
    dependencies = "".join(
        f'<dependency org="{organisation}" name="{name}" rev="{revision}" conf="default->default"/>'
        for organisation, (name, revision) in of.items()
    )
    return (
        '<ivy-module version="2.0"><info organisation="kafka-chunked" module="matrix"/><configurations>'
        f'<conf name="default"/></configurations><dependencies>{dependencies}{overridden}</dependencies>'
        "</ivy-module>"
    )
