"""The producer's id, and restarts of sequences, at exact times and without sockets."""

from __future__ import annotations

import math

import pytest

from kafka_sink.clock import ExponentialBackoff
from kafka_sink.errors import DeliveryError, KafkaSinkError
from kafka_sink.network.requests import ProducerIdResponse
from kafka_sink.sending.producer_identity import ProducerIdentity, TransactionalIdentity
from tests.support.sequences import P0, P1, acknowledge, batch, fail, identity, marks, sent

# -- the id -------------------------------------------------------------------------------------------


def test_an_id_is_asked_for_once_and_again_after_growing_waits() -> None:
    of = ProducerIdentity(ExponentialBackoff(100, 1000, lambda: 0.5))
    assert (of.ready, of.may_request(0), of.retry_delay_ms(0)) == (False, True, 0)
    of.requested()
    assert (of.may_request(1e9), of.retry_delay_ms(0)) == (False, float("inf"))
    assert of.on_response(ProducerIdResponse(14, -1, -1), 1000) is None
    assert (of.may_request(1099), of.may_request(1100), of.retry_delay_ms(1040)) == (False, True, 60)
    assert "error 14" in str(of.last_error)
    of.on_failure(2000, ConnectionResetError("cut"))
    assert (of.may_request(2199), of.may_request(2200)) == (False, True)
    assert "cut" in str(of.last_error)
    assert of.on_response(ProducerIdResponse(0, 5, 0), 3000) is None
    assert (of.ready, of.last_error) == (True, None)


@pytest.mark.parametrize("code", [31, 53, 35])
def test_some_refusals_are_final(code: int) -> None:
    of = ProducerIdentity(ExponentialBackoff(100, 1000, lambda: 0.5))
    failure = of.on_response(ProducerIdResponse(code, -1, -1), 0)
    assert isinstance(failure, DeliveryError)
    assert f"error {code}" in str(failure)
    assert "kafka.enable.idempotence=false" in str(failure)


# -- restarts -----------------------------------------------------------------------------------------


def test_a_restart_waits_for_what_is_in_flight_and_renumbers_the_rest() -> None:
    of = identity()
    acknowledge(sent(of, batch(5)))
    one, two = sent(of, batch(3)), sent(of, batch(4))
    fail(one)
    of.request_restart(P0)
    assert of.restarts_due() == []
    assert not of.may_send(one, 0)
    assert not of.settled
    fail(two)
    assert of.restarts_due() == [P0]
    of.restart(P0)
    assert of.restarts_due() == []
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
        one.set_possibly_written()
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
    assert (of.ready, of.may_request(0)) == (False, True)
    of.requested()
    of.on_response(ProducerIdResponse(0, 8, 0), 0)
    assert marks(sent(of, one)) == (8, 0, 0)


def test_settled_means_that_every_sequence_is_acknowledged() -> None:
    of = identity()
    assert of.settled
    one = sent(of, batch())
    assert not of.settled
    fail(one)
    assert not of.settled
    one.request_references += 1
    acknowledge(one)
    assert of.settled


def test_a_transactions_identity_asks_for_no_id_and_starts_sequences_with_each_transaction() -> None:
    P0.forget_sequences()
    made = TransactionalIdentity(ExponentialBackoff(100, 1000, lambda: 0.5))
    assert not made.ready
    assert not made.may_request(0)
    assert made.retry_delay_ms(0) == math.inf
    for epoch in (3, 5):
        made.adopt("x", 8, epoch)
        assert (made.ready, made.transactional_id) == (True, "x")
        one = sent(made, batch(5))
        assert marks(one) == (8, epoch, 0)
        acknowledge(one)
    made.leave()
    assert not made.ready
    assert made.transactional_id is None
