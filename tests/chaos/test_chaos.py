"""A few rounds of chaos in every run, and the proof that a round can fail. ``make chaos`` runs many."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kafka_sink.cluster.broker import Broker
from kafka_sink.cluster.partition import Partition, ProducerBatch
from kafka_sink.engine.response_classifier import Verdict
from kafka_sink.engine.responses import ResponseHandler
from local_kafka import LocalBroker
from tests.chaos.history import Invariant
from tests.chaos.rounds import RoundReport, run_round
from tests.chaos.schedule import BACKOFFS, Event, Fault, Schedule, Worker, draw

pytestmark = pytest.mark.chaos
_PATIENT = {"request.timeout.ms": 2_000, "delivery.timeout.ms": 90_000}


@pytest.mark.parametrize("fault", [Fault.KILL, Fault.FREEZE, None], ids=lambda f: f.name if f else "WIRE")
def test_rounds_keep_every_promise(cluster3: LocalBroker, fault: Fault | None) -> None:
    schedule = draw(11, fault)
    report = run_round(cluster3, schedule, f"chaos-{fault.name if fault else 'wire'}", _PATIENT)
    assert not report.violations, str(report)
    assert not report.failures
    assert report.retries > 0, "nothing was hit"
    assert sum(report.faults.values()) == len(schedule.wire) + len(schedule.brokers)


# -- that it can fail ------------------------------------------------------------------------------------

_STEADY = Worker(
    units=100,
    unit_rows=30,
    pause_ms=10,
    options=(
        *BACKOFFS.items(),
        # A request that a busy broker answers late would be sent again, and could be written behind others.
        ("request.timeout.ms", 30_000),
        ("delivery.timeout.ms", 90_000),
        ("client.id", "proof"),
        ("linger.ms", 0),
        ("batch.size", 600),
        ("max.in.flight.requests.per.connection", 5),
    ),
)
# Each of three partitions has another leader, so broker 0 leads one.
_PROOF = Schedule(0, 3, brokers=(), wire=(), workers=(_STEADY,), strict=False)
_SWALLOWED = replace(_PROOF, wire=tuple(Event(250, Fault.SWALLOW, 0, 0, 2) for _ in range(3)))
_LOST_IN_FLIGHT = replace(_PROOF, wire=(Event(600, Fault.LOSE, 0, 500),) * 4)


def broken(report: RoundReport) -> set[Invariant]:
    assert not report.failures
    return set(report.violations.counts)


def test_without_idempotence_a_swallowed_response_doubles_rows_and_does_nothing_else(
    cluster3: LocalBroker,
) -> None:
    report = run_round(cluster3, _SWALLOWED, "proof", {"enable.idempotence": "false"})
    assert report.retries > 0
    # Of a row that is there twice, fewer offsets are reported than there are.
    found = broken(report)
    assert Invariant.ONCE in found
    assert found <= {Invariant.ONCE, Invariant.REPORTED}


def _insert_last(self: Partition, batch: ProducerBatch) -> None:
    """The bug: what comes back from a broken connection goes behind what has not been sent yet."""
    self.batches.append(batch)


def _call_it_written(
    self: ResponseHandler, batch: ProducerBatch, broker: Broker, _outcome: Verdict, now_ms: float
) -> None:
    """The bug: whatever ends a request acknowledges its batches."""
    self._succeed([(batch, -1, -1)], broker, now_ms)


@pytest.mark.parametrize(
    ("owner", "method", "bug", "found"),
    [
        (Partition, "insert", _insert_last, Invariant.ORDERED),
        (ResponseHandler, "_apply", _call_it_written, Invariant.PRESENT),
    ],
    ids=["retries go last", "failures count as written"],
)
def test_injected_bugs_are_caught(
    cluster3: LocalBroker,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    method: str,
    bug: object,
    found: Invariant,
) -> None:
    monkeypatch.setattr(owner, method, bug)
    report = run_round(cluster3, _LOST_IN_FLIGHT, f"bug-{found.name}", {"enable.idempotence": "false"})
    assert found in broken(report)
