"""Mutes are shared within one Kafka cluster, also where a bootstrap name has moved to another."""

from __future__ import annotations

from typing import Any

import pytest

from kafka_sink.coordinator.breaker.cluster_breakers import breaker_handler
from kafka_sink.coordinator.breaker.messages import (
    BreakerReport,
    MuteReport,
    decode_update,
    encode_report,
)
from kafka_sink.errors import ProtocolError
from kafka_sink.options import parse

OPTIONS = parse({"kafka.bootstrap.servers": "h:1", "topic": "t"}).options
MUTE = (MuteReport(1, "silent", 800.0),)


def _report(cluster_id: str | None = None, muted: tuple[MuteReport, ...] = ()) -> dict[str, Any]:
    return encode_report(BreakerReport(muted=muted, cluster_id=cluster_id))


def test_a_mute_of_a_broker_stays_in_its_cluster() -> None:
    """Catches: broker 1 of the cluster that a bootstrap name had moved to was muted, as the former
    cluster's broker 1 was."""
    handler = breaker_handler(OPTIONS, lambda: None)
    handler.on_message(1, 1, _report("old", MUTE), 1_000.0)
    handler.on_time(1_100.0)
    (reply, *_) = handler.on_message(2, 1, _report("new"), 2_000.0)
    assert decode_update(reply.body, 10).added == {}
    (reply, *_) = handler.on_message(3, 1, _report("old"), 2_000.0)
    assert set(decode_update(reply.body, 10).added) == {1}


def test_a_task_whose_bootstrap_name_moves_leaves_the_mutes_behind() -> None:
    """Catches: a task that went over to another cluster kept the former one's mutes."""
    handler = breaker_handler(OPTIONS, lambda: None)
    for peer in (1, 2):
        handler.on_message(peer, 1, _report("old"), 1_000.0)
    handler.on_message(1, 2, _report(muted=MUTE), 1_000.0)
    handler.on_time(1_100.0)
    (reply, *_) = handler.on_message(2, 2, _report("new"), 2_000.0)
    update = decode_update(reply.body, 10)
    assert update.whole
    assert update.added == {}
    assert not [one for one in handler.on_time(9_000.0) if one.peer == 2], "no lease for the former cluster"
    handler.on_disconnect(2, 9_000.0)
    handler.on_disconnect(1, 9_000.0)


def test_the_first_to_name_the_cluster_names_it_for_all() -> None:
    handler = breaker_handler(OPTIONS, lambda: None)
    handler.on_message(1, 1, _report(muted=MUTE), 1_000.0)
    handler.on_message(2, 1, _report(), 1_000.0)
    handler.on_time(1_100.0)
    (reply, *_) = handler.on_message(3, 1, _report("here"), 2_000.0)
    assert set(decode_update(reply.body, 10).added) == {1}
    (reply, *_) = handler.on_message(1, 2, _report("here"), 2_000.0)
    assert not reply.body, "task 1 has heard of everything"
    (reply, *_) = handler.on_message(4, 1, _report(), 2_000.0)
    assert set(decode_update(reply.body, 10).added) == {1}, "one without a name shares with those that have"


def test_clusters_without_tasks_are_forgotten_beyond_a_bound() -> None:
    handler = breaker_handler(OPTIONS, lambda: None)
    for number in range(10):
        handler.on_message(1, number, _report(str(number)), 1_000.0)
    assert len(handler._breakers) == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("cluster", [3, "", "x" * 201, ["a"]])
def test_an_invalid_cluster_id_is_refused(cluster: object) -> None:
    handler = breaker_handler(OPTIONS, lambda: None)
    with pytest.raises(ProtocolError):
        handler.on_message(1, 1, {"cluster": cluster}, 0.0)
