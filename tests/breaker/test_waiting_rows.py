"""Which muted targets a task has rows for."""

from __future__ import annotations

from kafka_sink.breaker.mute_control import MuteControl
from tests.support.breaker_cluster import A0, B0


def test_a_task_wants_the_partitions_that_its_free_rows_avoid(control: MuteControl) -> None:
    control.manager.mute(A0)
    control.manager.mute(B0)
    control.waiting.note_free_rows(["a"])
    assert control.waiting.wanted() == [A0]
    control.probes.may_probe(A0)
    assert control.waiting.wanted() == [], "a batch waits for it"
    control.now_ms = 2_000.0
    assert control.waiting.wanted() == [], "that was long ago"
