"""A Spark standalone cluster on this machine: a master, and workers on loopback addresses of their own.

    with StandaloneCluster(workers=2, cores=2) as cluster:
        SparkSession.builder.master(cluster.url).config("spark.driver.host", "127.0.0.1")

Each worker runs an application's executor as a JVM of its own with Python workers of its own, so what
executors share with the driver goes over sockets, and between hosts. It leaves out: a file system that hosts
do not share, and networks that are slow or lose packets.

Everything ends with the block, and when this process dies, however it dies.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path

from local_kafka.jars import find_java
from local_kafka.processes import SupervisedProcesses
from tests.support.jvms import SPARK_VARIABLE
from tests.support.ports import free_port
from tests.support.waiting import until, within

# These JVMs are small and start quickly: they only start other JVMs.
_JVM = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
# This is PySpark 4's only Scala version; workers look for a build of Spark if nothing sets it.
_SCALA = "2.13"
_DEPLOY = "org.apache.spark.deploy"
_START_S = 120.0
_END_S = 10.0
_POLL_S = 0.05


class StandaloneCluster:
    """One master on 127.0.0.1, ``workers`` on 127.0.0.2 and following, with ``cores`` each.

    ``environ``: of the workers, and so of executors; it should set ``PYSPARK_PYTHON``, and the folders of the
    sink in ``PYTHONPATH``. If the cluster does not start, the error contains the log.
    """

    def __init__(self, workers: int = 2, cores: int = 2, environ: Mapping[str, str] = os.environ) -> None:
        self.hosts = tuple(f"127.0.0.{number}" for number in range(2, 2 + workers))
        self._cores = cores
        taken = ("PYTHONPATH", "PYSPARK_PYTHON", SPARK_VARIABLE)
        self._environ = {name: environ[name] for name in taken if name in environ}
        self._processes: SupervisedProcesses | None = None
        self._folder = Path()
        self._port = 0

    @property
    def url(self) -> str:
        return f"spark://127.0.0.1:{self._port}"

    @property
    def folder(self) -> Path:
        """Logs: ``master``, one per worker host, and ``<host>.work/<application>/<executor>/stderr``."""
        return self._folder

    def __enter__(self) -> StandaloneCluster:
        self._folder = Path(tempfile.mkdtemp(prefix="kafka-chunked-spark-"))
        self._processes = SupervisedProcesses(self._folder)
        try:
            self._port = free_port()
            ui = ("--webui-port", "0")
            self._start("master", "master.Master", "--host", "127.0.0.1", "--port", str(self._port), *ui)
            # A worker whose master is not there yet asks again after seconds.
            self._await("master", "Starting Spark master at")
            for host in self.hosts:
                size = ("--cores", str(self._cores), "--memory", "1g")
                work = ("--work-dir", str(self._folder / f"{host}.work"))
                self._start(host, "worker.Worker", "--host", host, *size, *ui, *work, self.url)
            for host in self.hosts:
                self._await(host, "Successfully registered with master")
        except BaseException:  # on Ctrl-C also: no process may stay behind
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers, executors with them, and the master; delete all files. Safe to call twice."""
        processes, self._processes = self._processes, None
        if processes is None:
            return
        # Asked politely a worker ends its executors; killed, it leaves them to find out by themselves.
        names = [name for name in self.hosts if (self._folder / name).exists()]
        for name in names:
            processes.signal(name, signal.SIGTERM)
        within(lambda: not any(map(processes.is_running, names)), _END_S, _POLL_S)
        processes.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self, name: str, main: str, *args: str) -> None:
        import pyspark

        home = Path(pyspark.__file__).resolve().parent
        # If SPARK_LOCAL_IP were set, a worker would announce that address in place of its host.
        environ = ["env", "-u", "SPARK_LOCAL_IP", f"SPARK_HOME={home}", f"SPARK_SCALA_VERSION={_SCALA}"]
        environ += [f"{key}={value}" for key, value in self._environ.items()]
        # This is the command of bin/spark-class, without the JVM that it starts to find out how. A driver's
        # kept classes are read if the class path is a driver's.
        (slf4j,) = home.glob("jars/slf4j-api-*.jar")
        jvm = [*_JVM, *self._environ.get(SPARK_VARIABLE, "").split()]
        class_path = f"{home}/conf:{slf4j}:{home}/jars/*"
        command = [find_java().path, *jvm, "-cp", class_path, f"{_DEPLOY}.{main}", *args]
        assert self._processes is not None
        self._processes.start(name, environ + command, log=self._folder / name, cwd=self._folder)

    def _await(self, name: str, text: str) -> None:
        assert self._processes is not None
        running = self._processes

        def said() -> str:
            return f"{name} of Spark; its log ends:\n{log()[-2000:]}"

        def log() -> str:
            return (self._folder / name).read_text(errors="replace")

        def has_started() -> bool:
            assert running.is_running(name), said()
            return text in log()

        until(has_started, said, _START_S, _POLL_S)
