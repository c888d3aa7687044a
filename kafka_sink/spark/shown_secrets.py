"""Warns where Spark itself would show a secret option: in plans, exceptions, its UI, its event log."""

from __future__ import annotations

import os
from collections.abc import Mapping

from kafka_sink import application_markers, driver_log
from kafka_sink.coordinator import driver_process
from kafka_sink.coordinator.process.driver_conf import spark_conf
from kafka_sink.options import redaction


def warn_at_planning(options: Mapping[str, str]) -> None:
    """Once in an application. Sees the settings that the driver was started with."""
    # Without any expression all secrets would be shown: most jobs have none, and need no look at the driver.
    if not redaction.shown_by_spark(
        options, dict.fromkeys(redaction.DEFAULTS, "")
    ) or not application_markers.only_once("secrets checked"):
        return
    driver = driver_process.find_driver_process()
    if driver is None:
        return
    shown = redaction.shown_by_spark(options, spark_conf(driver.arguments(), os.environ))
    if shown:
        driver_log.warn(f"kafka-chunked: {redaction.warning(shown)}")
