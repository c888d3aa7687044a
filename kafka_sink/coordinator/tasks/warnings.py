"""One warning for an application on each host, whatever keeps its coordinator from use and however often."""

from __future__ import annotations

import threading

from kafka_sink import application_markers, driver_log

# The key under which ``application_markers`` knows when the coordinator could not be started.
UNAVAILABLE = "kafka-chunked: no coordinator"

_warned_lock = threading.Lock()  # guards the set
_warned: set[str] = set()


def warn_of_no_coordinator(problem: str, about: str = "") -> None:
    """Where workers share a folder, only the first says it; elsewhere each says it once an ``about``."""
    key = f"no coordinator: {application_markers.folder() or about}"
    with _warned_lock:
        if key in _warned:
            return
        _warned.add(key)
    if application_markers.first_time(key):
        driver_log.warn(f"kafka-chunked: {problem}. Writes go on without it: each task asks Kafka by itself")
