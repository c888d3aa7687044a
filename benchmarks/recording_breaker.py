"""The default breaker, writing down when a worker mutes something, and when it probes."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from kafka_sink.breaker import (
    CircuitBreakManager,
    FailureRateCircuitBreaker,
    ProducerStatusContext,
)
from kafka_sink.breaker.breaker import Breaker

FOLDER = "record.folder"
# State changes are logged there once each, with the changes that other tasks found.
_LOGGER = "kafka_sink.breaker.breaker"


class _Notes(logging.Handler):
    """Appends lines of JSON to a file of this process; times are Unix seconds."""

    def __init__(self, path: Path) -> None:
        super().__init__(logging.INFO)
        self._file = path.open("a", buffering=1)

    def write(self, **fields: object) -> None:
        self._file.write(json.dumps({"at": time.time(), **fields}) + "\n")

    def emit(self, record: logging.LogRecord) -> None:
        self.write(log=record.getMessage(), own=record.levelno >= logging.WARNING)

    def close(self) -> None:
        self._file.close()
        super().close()


def _record_broker_probes(path: Path) -> None:
    """Probes of brokers carry no batch, so no breaker sees them: they are recorded where they are sent."""
    known = Breaker.on_probe
    if hasattr(known, "noted"):
        return

    def on_probe(breaker: Breaker, node_id: int, now_ms: float) -> None:
        # A worker that Spark uses again outlives the benchmark's folder.
        with suppress(FileNotFoundError), path.open("a") as file:
            file.write(json.dumps({"at": time.time(), "probe": node_id}) + "\n")
        known(breaker, node_id, now_ms)

    on_probe.noted = True  # type: ignore[attr-defined]
    Breaker.on_probe = on_probe  # type: ignore[method-assign, assignment]


class RecordingBreaker(FailureRateCircuitBreaker):
    """``record.folder``: the folder in which each worker process writes a file."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = Path()
        self._notes: _Notes | None = None
        self._mutes: CircuitBreakManager | None = None

    def configure(self, configs: Mapping[str, str]) -> None:
        self._folder = Path(configs[FOLDER])
        super().configure({name: text for name, text in configs.items() if name != FOLDER})

    def set_circuit_break_manager(self, circuit_break_manager: CircuitBreakManager) -> None:
        super().set_circuit_break_manager(circuit_break_manager)
        self._mutes = circuit_break_manager
        self._notes = _Notes(self._folder / f"{os.getpid()}.jsonl")
        logger = logging.getLogger(_LOGGER)
        logger.setLevel(logging.INFO)
        logger.addHandler(self._notes)
        _record_broker_probes(self._folder / f"{os.getpid()}.jsonl")

    def on_send(self, context: ProducerStatusContext) -> bool:
        partition, mutes, notes = context.topic_partition, self._mutes, self._notes
        if mutes is not None and notes is not None and partition is not None and mutes.is_muted(partition):
            notes.write(probe=str(partition))
        return super().on_send(context)

    def close(self) -> None:
        super().close()
        if self._notes is not None:
            logging.getLogger(_LOGGER).removeHandler(self._notes)
            self._notes.close()
