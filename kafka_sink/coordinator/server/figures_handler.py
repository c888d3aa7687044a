"""Receives the figures of tasks and of the driver, for the live view. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kafka_sink.coordinator.server.handlers import Reply, ServerMessage
from kafka_sink.coordinator.wire.job_figures import decode_final, decode_task

if TYPE_CHECKING:
    from kafka_sink.coordinator.server.application_figures import ApplicationFigures


class FiguresHandler:
    """See Handler. ``cluster`` is the name under which the live view shows the cluster."""

    def __init__(self, cluster: str, figures: ApplicationFigures) -> None:
        self._cluster = cluster
        self._figures = figures

    def on_message(
        self, peer: int, request: int, body: Mapping[str, Any], now_ms: float
    ) -> Sequence[ServerMessage]:
        """See Handler."""
        if "final" in body:
            self._figures.end_write(self._cluster, decode_final(body), now_ms)
        else:
            self._figures.report(self._cluster, decode_task(body), now_ms)
        return [Reply(peer, request, {"interval": self._figures.interval_ms})]

    def on_disconnect(self, peer: int, now_ms: float) -> None:
        """See Handler. A connection is no task: a task without reports counts as silent."""

    def on_time(self, now_ms: float) -> Sequence[ServerMessage]:  # noqa: ARG002 - Handler's signature
        """See Handler."""
        return ()

    def next_change_ms(self, now_ms: float) -> float:  # noqa: ARG002 - Handler's signature
        """See Handler."""
        return math.inf

    def close(self) -> None:
        """See Handler."""
