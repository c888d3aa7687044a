"""The producer's id, and restarts of sequences, at exact times and without sockets."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from kafka_sink.clock import ExponentialBackoff
from kafka_sink.engine.identity import ProducerIdentity
from kafka_sink.engine.transactional_identity import TransactionalIdentity
from kafka_sink.errors import DeliveryError, KafkaSinkError
from kafka_sink.network.broker_protocol import Request
from kafka_sink.network.requests import ProducerIdResponse
from tests.support.sequences import P0, P1, acknowledge, batch, fail, identity, marks, sent

Kind = TypeVar("Kind", bound=ProducerIdentity)


class Asked:
    """A network that keeps the requests for ids."""

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.connection = SimpleNamespace(api_version=lambda _: 4)

    def connection_to_ask(self, now_ms: float, *, known_only: bool) -> tuple[object, float]:
        return self.connection, math.inf

    def send(self, connection: object, request: Request, now_ms: float) -> None:
        self.requests.append(request)


def new_identity(kind: type[Kind], asked: Any) -> Kind:
    made = kind(asked, 30_000, ExponentialBackoff(100, 1000, lambda: 0.5))
    made.fail = lambda error: pytest.fail(str(error))
    return made


def test_an_id_is_asked_for_once_and_again_after_growing_waits() -> None:
    asked = Asked()
    of = new_identity(ProducerIdentity, asked)
    assert not of.ready
    assert (of.refresh(0), of.refresh(1e9), len(asked.requests)) == (math.inf, math.inf, 1)
    asked.requests[-1].on_response(ProducerIdResponse(14, -1, -1), 1000)
    assert (of.refresh(1040), of.refresh(1099), len(asked.requests)) == (60, 1, 1)
    assert "error 14" in str(of.last_error)
    assert (of.refresh(1100), len(asked.requests)) == (math.inf, 2)
    asked.requests[-1].on_failure(ConnectionResetError("cut"), True, 2000)
    assert (of.refresh(2199), of.refresh(2200), len(asked.requests)) == (1, math.inf, 3)
    assert "cut" in str(of.last_error)
    asked.requests[-1].on_response(ProducerIdResponse(0, 5, 0), 3000)
    assert (of.ready, of.last_error) == (True, None)


@pytest.mark.parametrize("code", [31, 53, 35])
def test_final_producer_id_errors_fail_the_task(code: int) -> None:
    asked = Asked()
    failures: list[KafkaSinkError] = []
    of = new_identity(ProducerIdentity, asked)
    of.fail = failures.append
    of.refresh(0)
    asked.requests[-1].on_response(ProducerIdResponse(code, -1, -1), 0)
    (failure,) = failures
    assert isinstance(failure, DeliveryError)
    assert f"error {code}" in str(failure)
    assert "kafka.enable.idempotence=false" in str(failure)


def test_a_restart_waits_for_what_is_in_flight_and_renumbers_the_rest() -> None:
    of = identity()
    acknowledge(sent(of, batch(5)))
    one, two = sent(of, batch(3)), sent(of, batch(4))
    fail(one)
    of.request_restart(P0)
    assert of.repairable() == []
    assert not of.may_send(one, 0)
    assert not of.settled
    fail(two)
    assert of.repairable() == [P0]
    of.restart(P0)
    assert of.repairable() == []
    assert P0.restarted
    sent(of, one)
    assert marks(one) == (7, 1, 0)
    assert not of.may_send(two, 0)  # the first of an epoch goes alone
    acknowledge(one)
    sent(of, two)
    assert marks(two) == (7, 1, 3)
    assert not P0.restarted


@pytest.mark.parametrize("doubt", ["in flight", "possibly written"])
def test_a_restart_refuses_to_renumber_what_is_in_doubt(doubt: str) -> None:
    of = identity()
    one = sent(of, batch())
    if doubt == "possibly written":
        fail(one)
        one.possibly_written = True
        of.request_restart(P0)
        assert P0.unresolved == [one]
    with pytest.raises(KafkaSinkError, match="keep their sequences"):
        of.restart(P0)
    assert marks(one) == (7, 0, 0)
    assert of.producer_epoch == 0


def test_other_partitions_follow_to_the_new_epoch_when_nothing_of_theirs_is_under_way() -> None:
    of = identity()
    acknowledge(sent(of, batch(5, P1)))
    under_way = sent(of, batch(5, P1))
    fail(sent(of, batch()))
    of.request_restart(P0)
    of.restart(P0)
    old = sent(of, batch(5, P1))
    assert marks(old) == (7, 0, 10)
    acknowledge(under_way)
    acknowledge(old)
    assert marks(sent(of, batch(1, P1))) == (7, 1, 0)
    assert not of.may_send(batch(1, P1), 0)


def test_after_the_last_epoch_a_new_id_is_asked_for() -> None:
    of = identity(epoch=2**15 - 1)
    one = sent(of, batch())
    fail(one)
    of.request_restart(P0)
    of.restart(P0)
    assert not of.ready
    of.producer_id, of.producer_epoch = 8, 0
    assert marks(sent(of, one)) == (8, 0, 0)


def test_settled_means_that_every_sequence_is_acknowledged() -> None:
    of = identity()
    assert of.settled
    one = sent(of, batch())
    assert not of.settled
    fail(one)
    assert not of.settled
    one.in_request = True
    acknowledge(one)
    assert of.settled


def test_a_transactions_identity_asks_for_no_id_and_starts_sequences_with_each_transaction() -> None:
    P0.forget_sequences()
    asked = Asked()
    made = new_identity(TransactionalIdentity, asked)
    assert not made.ready
    assert (made.refresh(0), asked.requests) == (math.inf, [])
    for epoch in (3, 5):
        made.adopt("x", 8, epoch)
        assert (made.ready, made.transactional_id) == (True, "x")
        one = sent(made, batch(5))
        assert marks(one) == (8, epoch, 0)
        acknowledge(one)
    made.leave()
    assert not made.ready
    assert made.transactional_id is None
