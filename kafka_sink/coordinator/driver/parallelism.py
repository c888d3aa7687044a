"""How many tasks of an application run at once, as far as planning can know: from Spark's configuration."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from kafka_sink.coordinator.driver.driver_conf import spark_conf
from kafka_sink.coordinator.wire import driver_process

# Where the configuration does not say.
UNKNOWN = 8
_LOCAL = re.compile(r"local(?:\[(\*|\d+)(?:,\s*\d+)?\])?$")


def tasks_at_once(environ: Mapping[str, str] = os.environ) -> int:
    """For this driver. Costs a read of the driver's command line."""
    driver = driver_process.find_driver_process()
    return UNKNOWN if driver is None else tasks_of(spark_conf(driver.arguments(), environ))


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
