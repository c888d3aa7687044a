"""The coordinator's breaker: invalid reports, and what many reports cost."""

from __future__ import annotations

import pytest

from kafka_sink.coordinator.server.breaker_handler import BreakerHandler
from kafka_sink.coordinator.server.breaker_votes import PartitionVotes
from kafka_sink.coordinator.wire import breaker_messages
from kafka_sink.coordinator.wire.breaker_messages import (
    BreakerReport,
    MuteReport,
    OutcomeCounts,
    decode_update,
    encode_report,
)
from kafka_sink.errors import ProtocolError
from kafka_sink.model import TopicPartition

INTERVAL = 2_000.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("responses", [[1]]),
        ("responses", [[1, -5]]),
        ("responses", [[1, float("nan")]]),
        ("rows", -1),
        ("outcomes", [["t", 0, 1, -1, False, ""]]),
        ("outcomes", [["t" * 250, 0, 1, 1, False, ""]]),
        ("outcomes", "x"),
        ("outcomes", [["t", 0, 1, 1, False, ""]] * (breaker_messages.MAX_OUTCOMES + 1)),
        ("muted", [[True, "x", 0]]),
        ("muted", [[["t"], "x", 0]]),
        ("muted", [[1, "x" * 301, 0]]),
        ("unmuted", [[1, None]]),
        ("holds", [None]),
        ("holds", {}),
    ],
)
def test_an_invalid_report_changes_nothing(name: str, value: object) -> None:
    handler = BreakerHandler(INTERVAL, PartitionVotes(1, 50), 500.0)
    body = encode_report(BreakerReport(muted=(MuteReport(1, "x"),)))
    with pytest.raises(ProtocolError):
        handler.on_message(0, 1, {**body, name: value}, 0.0)
    (reply, *_) = handler.on_message(1, 1, encode_report(BreakerReport()), 0.0)
    assert decode_update(reply.body, 10).added == {}


def test_reports_that_come_together_cost_one_walk_over_all_mutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches: a walk over hundreds of mutes for each report of a thousand tasks while votes come in,
    which kept the coordinator from sending its messages."""
    handler = BreakerHandler(INTERVAL, PartitionVotes(1, 50), 500.0, lambda: 0.5)
    partitions = [TopicPartition("t", number) for number in range(300)]
    failing = encode_report(
        BreakerReport(rows=5, outcomes=tuple(OutcomeCounts(one, 0, 5, True, "x") for one in partitions))
    )
    looks: list[float] = []
    on_time = handler.on_time
    monkeypatch.setattr(handler, "on_time", lambda now_ms: (looks.append(now_ms), on_time(now_ms))[1])
    for peer in range(200):
        handler.on_message(peer, 1, {}, 1_000.0)
    looks.clear()
    for peer in range(200):
        handler.on_message(peer, 2, failing, 2_000.0 + peer / 10)
    assert len(looks) <= 2
    assert handler.next_change_ms(2_020.0) <= 50.0
    handler.on_time(2_080.0)
    reply, *_ = handler.on_message(200, 1, {}, 2_080.0)
    assert len(decode_update(reply.body, 1_000).added) == 300
