"""The driver's report of a write's final figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from kafka_sink.coordinator.figures import channel as figures_channel
from kafka_sink.coordinator.figures.channel import report_final
from kafka_sink.coordinator.figures.messages import FinalFigures
from kafka_sink.coordinator.transport.address import CoordinatorAddress, Rendezvous
from kafka_sink.errors import ProtocolError
from tests.support.coordinator_harness import SECRET


@pytest.mark.parametrize(
    ("error", "timeouts_ms"),
    [
        (TimeoutError("frozen"), [5000.0, 500.0]),
        (ProtocolError("no greeting within 5000 ms"), [5000.0, 500.0]),
        (ConnectionRefusedError("another one will start"), [5000.0, 5000.0]),
    ],
)
def test_a_coordinator_that_was_silent_holds_up_no_further_write_for_long(
    error: Exception, timeouts_ms: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: beside a frozen coordinator, each micro-batch took 5 s longer."""
    waits_ms: list[float] = []

    def connect(_: CoordinatorAddress, silence_ms: float, *__: object) -> None:
        waits_ms.append(silence_ms)
        raise error

    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))
    monkeypatch.setattr(figures_channel, "CoordinatorConnection", connect)
    for number in range(2):
        final = FinalFigures(f"write-{number}", "committed", "q-1", number)
        report_final(CoordinatorAddress("127.0.0.1", Rendezvous(1, "key", SECRET)), final)
    assert waits_ms == timeouts_ms
