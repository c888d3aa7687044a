"""Reads Spark's configuration, which Spark does not pass to planning workers.

Planning workers read it from the command line of the driver's JVM, which contains the settings given to
``spark-submit`` and PySpark, and from the properties files of ``spark-submit``. Settings that a program makes
later, in code, are missing. Planning warns of settings that would end a write's tasks or show its secrets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from kafka_sink import spark_application
from kafka_sink.driver import driver_log, driver_process
from kafka_sink.driver.driver_process import HostProcess
from kafka_sink.options.table import SPECS
from kafka_sink.options.values import KAFKA_PREFIX

# Spark 4.1 shows a job's options in a stream's plans: in exceptions, in its UI and REST API, and in the event
# log. It hides a value if the expression in one of these settings matches the option's name or its value
# (redact in Spark's Utils.scala, redactOptions in SQLConf.scala).
REDACTION_SETTING = "spark.redaction.regex"
# Each setting with its default (Spark 4.1 to 4.3).
REDACTION_DEFAULTS: Mapping[str, str] = {
    REDACTION_SETTING: "(?i)secret|password|token|access[.]?key",
    "spark.sql.redaction.options.regex": "(?i)url",
}
_SECRETS = frozenset(name.lower() for spec in SPECS if spec.secret for name in (spec.name, *spec.aliases))
# Options that are secret because they are long, but whose content, such as a certificate, is public.
_PUBLIC_OPTION = re.compile(r"certificate|[.]ca[.]")
# Settings without this prefix are dropped unless they are listed below, because they may be passwords.
OWN_PREFIX = "spark.kafka-chunked."
# Spark may end Python workers that neither receive nor return data for this long. The settings of SQL come
# first, then the general settings that apply if those are not set (PySpark 4.1 and 4.3).
_SECONDS = ("spark.sql.execution.pyspark.udf.idleTimeoutSeconds", "spark.python.worker.idleTimeoutSeconds")
_KILL = ("spark.sql.execution.pyspark.udf.killOnIdleTimeout", "spark.python.worker.killOnIdleTimeout")
_KEPT = (
    "spark.driver.bindAddress",
    "spark.driver.host",
    *(*_SECONDS, *_KILL),
    *REDACTION_DEFAULTS,
    "spark.master",
    "spark.cores.max",
    "spark.executor.instances",
    "spark.executor.cores",
    "spark.dynamicAllocation.maxExecutors",
    "spark.task.cpus",
)
_DEFAULTS_FILE = "spark-defaults.conf"
# The separator in a file of java.util.Properties: a colon, an equals sign or white space.
_SEPARATOR = re.compile(r"\s*[=:\s]\s*")


def conf_of_driver() -> dict[str, str] | None:
    """``conf_of`` for the driver of this process; None if the driver is not found. Reads its command line."""
    driver = driver_process.find_driver_process()
    return None if driver is None else conf_of(driver, os.environ)


def conf_of(driver: HostProcess, environ: Mapping[str, str]) -> dict[str, str]:
    """The settings of this driver's application that the coordinator uses. Never raises."""
    application = spark_application.current()
    if application is not None:
        return dict(_kept(application.conf.items()))
    return spark_conf(driver.arguments(), environ)


def spark_conf(arguments: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The settings that the coordinator uses. ``arguments`` are the JVM's command line. Never raises."""
    settings: dict[str, str] = {}
    files = [value for option, value in pairwise(arguments) if option == "--properties-file"]
    if not files or "--load-spark-defaults" in arguments:
        home = environ.get("SPARK_HOME")
        folder = environ.get("SPARK_CONF_DIR") or (os.path.join(home, "conf") if home else "")
        files.insert(0, os.path.join(folder, _DEFAULTS_FILE) if folder else "")
    for file in filter(None, files):
        settings.update(_kept(_properties(file)))
    settings.update(_kept(option[2:].partition("=")[::2] for option in arguments if option.startswith("-D")))
    given = [value for option, value in pairwise(arguments) if option in ("--conf", "-c")]
    given += [argument.partition("=")[2] for argument in arguments if argument.startswith("--conf=")]
    settings.update(_kept(argument.partition("=")[::2] for argument in given))
    return settings


def _kept(pairs: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    for name, value in pairs:
        if name in _KEPT or name.startswith(OWN_PREFIX):
            yield name, value.strip()


def _properties(file: str) -> Iterator[tuple[str, str]]:
    try:
        text = Path(file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in map(str.strip, text.splitlines()):
        if line and line[0] not in "#!":
            name, *value = _SEPARATOR.split(line, maxsplit=1)
            yield name, value[0] if value else ""


# The assumed number of tasks if the configuration does not determine it.
UNKNOWN = 8
_LOCAL = re.compile(r"local(?:\[(\*|\d+)(?:,\s*\d+)?\])?$")


def tasks_of(conf: Mapping[str, str]) -> int:
    """How many tasks can run at the same time with these settings of Spark."""
    local = _LOCAL.match(conf.get("spark.master", ""))
    if local is not None:
        return (os.cpu_count() or 1) if local[1] == "*" else int(local[1] or 1)
    cores = _number(conf, "spark.cores.max")
    instances = _number(conf, "spark.executor.instances") or _number(
        conf, "spark.dynamicAllocation.maxExecutors"
    )
    if not cores and instances:
        # One core per executor is the default of YARN and Kubernetes.
        cores = instances * (_number(conf, "spark.executor.cores") or 1)
    return max(1, cores // (_number(conf, "spark.task.cpus") or 1)) if cores else UNKNOWN


def _number(conf: Mapping[str, str], name: str) -> int:
    text = conf.get(name, "")
    return int(text) if text.isdecimal() else 0


_UNITS_S = {"": 1.0, "s": 1.0, "us": 1e-6, "ms": 1e-3, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


def idle_timeout_problem(conf: Callable[[str], str | None], delivery_timeout_ms: int) -> str | None:
    """A warning about Spark's idle timeout, or None. ``conf`` returns the value of a setting of Spark."""
    name = next((setting for setting in _SECONDS if conf(setting)), None)
    kill = next((value for value in map(conf, _KILL) if value), "false")
    if name is None or kill.strip().lower() != "true":
        return None
    seconds = _seconds(conf(name) or "")
    if not 0 < seconds <= delivery_timeout_ms / 1000:
        return None
    return (
        f"{name} = {conf(name)} with killOnIdleTimeout ends tasks that wait for a broker before "
        f"kafka.delivery.timeout.ms = {delivery_timeout_ms} ms has passed, and hides the sink's error. Set "
        f"it to more than {delivery_timeout_ms / 1000:.0f} seconds, or lower kafka.delivery.timeout.ms"
    )


def _seconds(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+)\s*([a-z]*)\s*", text.lower())
    if match is None or match.group(2) not in _UNITS_S:
        return 0.0
    return int(match.group(1)) * _UNITS_S[match.group(2)]


def warn_of_idle_timeout(delivery_timeout_ms: int) -> None:
    """Warn once per application. Only settings with which the driver was started are known."""
    if not spark_application.first_time("idle timeout checked"):
        return
    line = idle_timeout_problem((conf_of_driver() or {}).get, delivery_timeout_ms)
    if line is not None:
        driver_log.warn(f"kafka-chunked: {line}")


def warn_of_shown_secrets(options: Mapping[str, str]) -> None:
    """Warn once per application. Only settings with which the driver was started are known."""
    # With empty expressions, Spark shows all secrets. Most jobs have none, and the settings are not read.
    if not shown_by_spark(options, dict.fromkeys(REDACTION_DEFAULTS, "")) or not spark_application.first_time(
        "secrets checked"
    ):
        return
    conf = conf_of_driver()
    if conf is not None and (shown := shown_by_spark(options, conf)):
        driver_log.warn(f"kafka-chunked: {redaction_warning(shown)}")


def redaction_regex() -> str:
    """Spark's default expression, extended by the secret options that it does not cover."""
    default = REDACTION_DEFAULTS[REDACTION_SETTING]
    names = sorted(name.removeprefix(KAFKA_PREFIX) for name in _SECRETS)
    uncovered = [name for name in names if not re.search(default, name)]
    shortest = [name for name in uncovered if not any(part in name and part != name for part in uncovered)]
    return "|".join([default, *(name.replace(".", "[.]") for name in shortest)])


def shown_by_spark(options: Mapping[str, str], conf: Mapping[str, str]) -> list[str]:
    """The names of secret options that Spark would show. ``conf`` are the settings that are known."""
    settings = [conf.get(name, default) for name, default in REDACTION_DEFAULTS.items()]
    try:
        expressions = [re.compile(expression) for expression in settings if expression]
    except re.error:
        # Java supports expressions that Python does not. Then it is unknown what Spark shows.
        return []
    secret = {name.strip().lower(): value for name, value in options.items()}
    return sorted(
        name
        for name, value in secret.items()
        if name in _SECRETS
        and not _PUBLIC_OPTION.search(name)
        and not any(pattern.search(text) for pattern in expressions for text in (name, value))
    )


def redaction_warning(names: Iterable[str]) -> str:
    listed = ", ".join(f"'{name}'" for name in names)
    return (
        f"Spark may show the secret option {listed} in plans, exceptions, its UI and its event log: use a "
        f"file instead (kafka.ssl.keystore.location), or start the session with "
        f"{REDACTION_SETTING}={redaction_regex()}"
    )
