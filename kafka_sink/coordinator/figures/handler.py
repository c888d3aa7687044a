"""Receives the figures of tasks and of the driver, for the live view. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kafka_sink.coordinator.figures.messages import decode_final, decode_task
from kafka_sink.coordinator.transport.handlers import Handler, Reply, ServerMessage, TaskId

if TYPE_CHECKING:
    from kafka_sink.coordinator.figures.application_figures import ApplicationFigures


class FiguresHandler(Handler):
    """``cluster`` is the name under which the live view shows the cluster."""

    def __init__(self, cluster: str, figures: ApplicationFigures) -> None:
        self._cluster = cluster
        self._figures = figures

    def on_message(
        self, task: TaskId, request: int, body: Mapping[str, Any], now_ms: float
    ) -> Sequence[ServerMessage]:
        skipped: dict[str, Any] = {}
        if "final" in body:
            self._figures.end_write(self._cluster, decode_final(body), now_ms)
        elif body.get("end") != 0 or self._figures.takes_report(now_ms):
            self._figures.report(self._cluster, decode_task(body), now_ms)
        else:
            # After a stall or a restart thousands come together. They are totals: the next one has it all.
            skipped = {"skipped": True}
        return [Reply(task, request, {"interval": self._figures.interval_ms, **skipped})]
