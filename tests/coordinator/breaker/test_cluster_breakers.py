"""Mutes are shared within one Kafka cluster, also where a bootstrap name has moved to another."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import pytest

from kafka_sink.coordinator.breaker.cluster_breakers import Breakers, breaker_handler
from kafka_sink.coordinator.breaker.messages import (
    BreakerReport,
    MuteReport,
    UnmuteReport,
    decode_update,
    encode_report,
)
from kafka_sink.errors import ProtocolError
from kafka_sink.options import parse

BASE = {"kafka.bootstrap.servers": "h:1", "topic": "t"}
OPTIONS = parse(BASE).options
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
    assert not [one for one in handler.on_time(9_000.0) if one.task == 2], "no lease for the former cluster"
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


def test_sets_of_options_of_one_principal_share_the_mutes_of_a_cluster() -> None:
    """Catches: mutes were shared within one set of options, so that 70 jobs found out one by one."""
    shared: Breakers = WeakValueDictionary()
    same, renamed, other = (
        breaker_handler(parse({**BASE, **given}).options, lambda: None, shared)
        for given in (
            {},
            {"kafka.bootstrap.servers": "i:2", "kafka.client.id": "me"},
            {"kafka.security.protocol": "SSL"},
        )
    )
    renamed.on_message(2, 1, _report(), 1_000.0)
    same.on_message(1, 1, _report("here", MUTE), 1_000.0)
    (reply, *_) = other.on_message(3, 1, _report("here"), 1_200.0)
    assert decode_update(reply.body, 10).added == {}, "another principal may be connected elsewhere"
    (reply, *_) = renamed.on_message(2, 2, _report("here"), 1_200.0)
    assert set(decode_update(reply.body, 10).added) == {1}
    # What one set of options has found out goes to the tasks of all, once.
    over = encode_report(BreakerReport(unmuted=(UnmuteReport(1, "it responds"),)))
    (_, *told) = same.on_message(1, 2, over, 2_000.0)
    told += [push for handler in (same, renamed, other) for push in handler.on_time(2_100.0)]
    assert sorted(one.task for one in told) == [1, 2]
    renamed.on_disconnect(2, 3_000.0)
    assert not [one for one in same.on_time(9_000.0) if one.task == 2]


@pytest.mark.parametrize("cluster", [3, "", "x" * 201, ["a"]])
def test_an_invalid_cluster_id_is_refused(cluster: object) -> None:
    handler = breaker_handler(OPTIONS, lambda: None)
    with pytest.raises(ProtocolError):
        handler.on_message(1, 1, {"cluster": cluster}, 0.0)
