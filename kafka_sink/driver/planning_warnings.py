"""Warns, when a write is planned, of settings of Spark that would end its tasks or show its secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping

from kafka_sink import spark_application
from kafka_sink.driver import driver_log, driver_process
from kafka_sink.driver.driver_conf import conf_of
from kafka_sink.options import redaction

# The settings of SQL, then those that hold where they are not set (PySpark 4.1 and 4.3).
_SECONDS = ("spark.sql.execution.pyspark.udf.idleTimeoutSeconds", "spark.python.worker.idleTimeoutSeconds")
_KILL = ("spark.sql.execution.pyspark.udf.killOnIdleTimeout", "spark.python.worker.killOnIdleTimeout")
_UNITS_S = {
    "": 1.0,
    "s": 1.0,
    "us": 1e-6,
    "ms": 1e-3,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
    "d": 86_400.0,
}


def idle_timeout_problem(conf: Callable[[str], str | None], delivery_timeout_ms: int) -> str | None:
    """What to warn of; None if there is nothing. ``conf``: the value of a setting of Spark."""
    name = next((one for one in _SECONDS if conf(one)), None)
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
    found = re.fullmatch(r"\s*(\d+)\s*([a-z]*)\s*", text.lower())
    if found is None or found.group(2) not in _UNITS_S:
        return 0.0
    return int(found.group(1)) * _UNITS_S[found.group(2)]


def warn_of_idle_timeout(delivery_timeout_ms: int) -> None:
    """Once in an application. Sees the settings that the driver was started with."""
    if not spark_application.only_once("idle timeout checked"):
        return
    driver = driver_process.find_driver_process()
    if driver is None:
        return
    line = idle_timeout_problem(conf_of(driver, os.environ).get, delivery_timeout_ms)
    if line is not None:
        driver_log.warn(f"kafka-chunked: {line}")


# Warns where Spark itself would show a secret option: in plans, exceptions, its UI, its event log.


def warn_of_shown_secrets(options: Mapping[str, str]) -> None:
    """Once in an application. Sees the settings that the driver was started with."""
    # Without any expression all secrets would be shown: most jobs have none, and need no look at the driver.
    if not redaction.shown_by_spark(
        options, dict.fromkeys(redaction.DEFAULTS, "")
    ) or not spark_application.only_once("secrets checked"):
        return
    driver = driver_process.find_driver_process()
    if driver is None:
        return
    shown = redaction.shown_by_spark(options, conf_of(driver, os.environ))
    if shown:
        driver_log.warn(f"kafka-chunked: {redaction.warning(shown)}")
