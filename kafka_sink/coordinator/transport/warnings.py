"""The warning that the coordinator cannot be used: one for each application and host."""

from __future__ import annotations

import threading

from kafka_sink import spark_application
from kafka_sink.coordinator.transport.address import CoordinatorAddress
from kafka_sink.driver import driver_log

# The marker that is renewed whenever the coordinator could not be started.
UNAVAILABLE = "kafka-chunked: no coordinator"

_warned_lock = threading.Lock()  # guards the set
_warned: set[str] = set()


def warn_of_no_coordinator(problem: str, about: str = "") -> None:
    """Warn once: for all workers that share a folder, or for each worker and ``about``."""
    key = f"no coordinator: {spark_application.folder() or about}"
    with _warned_lock:
        if key in _warned:
            return
        _warned.add(key)
    if spark_application.first_time(key):
        driver_log.warn(f"kafka-chunked: {problem}. Writes go on without it: each task asks Kafka by itself")


def warn_once(address: CoordinatorAddress, error: Exception) -> None:
    """Warn that this coordinator cannot be used: once on a host where workers share a folder."""
    where = f"{address.host}:{address.rendezvous.port}"
    warn_of_no_coordinator(
        f"the coordinator at {where} cannot be used ({error}); it is tried again. If tasks cannot reach the "
        "driver, set coordinator.port and coordinator.bind.address, or coordinator.enabled=false",
        # Planning and tasks may know its host by different names.
        about=f"port {address.rendezvous.port}",
    )
