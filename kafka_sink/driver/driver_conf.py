"""Spark's configuration. Spark does not pass it to planning workers.

There it is read from the command line of the driver's JVM, which contains the settings given to
``spark-submit`` and PySpark, and from the properties files of ``spark-submit``. Settings that a program makes
later, in code, are missing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from kafka_sink import spark_application
from kafka_sink.driver import driver_process
from kafka_sink.driver.driver_process import DriverProcess
from kafka_sink.options import redaction

# Other settings are dropped, because they may be passwords.
OWN_PREFIX = "spark.kafka-chunked."
# Spark may end Python workers that neither take nor return data for so many seconds.
IDLE_TIMEOUTS = (
    "spark.python.worker.idleTimeoutSeconds",
    "spark.python.worker.killOnIdleTimeout",
    "spark.sql.execution.pyspark.udf.idleTimeoutSeconds",
    "spark.sql.execution.pyspark.udf.killOnIdleTimeout",
)
_PROGRESS = "spark.ui.showConsoleProgress"
_KEPT = (
    "spark.driver.bindAddress",
    "spark.driver.host",
    _PROGRESS,
    *IDLE_TIMEOUTS,
    *redaction.DEFAULTS,
    "spark.master",
    "spark.cores.max",
    "spark.executor.instances",
    "spark.executor.cores",
    "spark.dynamicAllocation.maxExecutors",
    "spark.task.cpus",
)
# PySpark starts its JVM with this resource, for shells and for scripts that Python runs.
_SHELL = "pyspark-shell"
_DEFAULTS_FILE = "spark-defaults.conf"
# The separator of java.util.Properties: a colon, an equals sign or white space.
_SEPARATOR = re.compile(r"\s*[=:\s]\s*")


def conf_of(driver: DriverProcess, environ: Mapping[str, str]) -> dict[str, str]:
    """The settings of this driver's application that the coordinator uses. Never raises."""
    application = spark_application.current()
    if application is not None:
        return dict(_kept(application.conf.items()))
    return spark_conf(driver.arguments(), environ)


def spark_conf(arguments: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The settings that the coordinator uses. ``arguments``: the JVM's command line. Never raises."""
    found: dict[str, str] = {}
    files = [value for option, value in pairwise(arguments) if option == "--properties-file"]
    if not files or "--load-spark-defaults" in arguments:
        files.insert(0, _defaults_file(environ))
    for file in filter(None, files):
        found.update(_kept(_properties(file)))
    found.update(_kept(one[2:].partition("=")[::2] for one in arguments if one.startswith("-D")))
    given = [value for option, value in pairwise(arguments) if option in ("--conf", "-c")]
    given += [one.partition("=")[2] for one in arguments if one.startswith("--conf=")]
    found.update(_kept(one.partition("=")[::2] for one in given))
    return found


def shows_progress(arguments: Sequence[str], conf: Mapping[str, str]) -> bool:
    """Whether Spark shows progress bars in the driver's terminal, as SparkSubmit decides."""
    value = conf.get(_PROGRESS)
    return value.lower() == "true" if value is not None else _SHELL in arguments


def _kept(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for name, value in pairs:
        if name in _KEPT or name.startswith(OWN_PREFIX):
            yield name, value.strip()


def _defaults_file(environ: Mapping[str, str]) -> str:
    folder = environ.get("SPARK_CONF_DIR")
    if not folder:
        home = environ.get("SPARK_HOME")
        folder = os.path.join(home, "conf") if home else ""
    return os.path.join(folder, _DEFAULTS_FILE) if folder else ""


def _properties(file: str) -> Iterator[tuple[str, str]]:
    try:
        text = Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in map(str.strip, text.splitlines()):
        if line and line[0] not in "#!":
            name, *value = _SEPARATOR.split(line, maxsplit=1)
            yield name, value[0] if value else ""


# Where the configuration does not say.
UNKNOWN = 8
_LOCAL = re.compile(r"local(?:\[(\*|\d+)(?:,\s*\d+)?\])?$")


def tasks_at_once(environ: Mapping[str, str] = os.environ) -> int:
    """For this driver. Costs a read of the driver's command line."""
    driver = driver_process.find_driver_process()
    return UNKNOWN if driver is None else tasks_of(conf_of(driver, environ))


def tasks_of(conf: Mapping[str, str]) -> int:
    """For these settings of Spark."""
    local = _LOCAL.match(conf.get("spark.master", ""))
    if local is not None:
        return (os.cpu_count() or 1) if local[1] == "*" else int(local[1] or 1)
    cores = _number(conf, "spark.cores.max")
    instances = _number(conf, "spark.executor.instances") or _number(
        conf, "spark.dynamicAllocation.maxExecutors"
    )
    if not cores and instances:
        # One core is the default of YARN and Kubernetes.
        cores = instances * (_number(conf, "spark.executor.cores") or 1)
    return max(1, cores // (_number(conf, "spark.task.cpus") or 1)) if cores else UNKNOWN


def _number(conf: Mapping[str, str], name: str) -> int:
    text = conf.get(name, "")
    return int(text) if text.isdecimal() else 0
