"""DEBUG lines about requests, retries, splits, sequence restarts and expiry: they show why a job is slow."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.lifecycle_model import DELIVERY_TIMEOUT_MS, Model

NOT_LEADER = 6
REQUEST_TIMED_OUT = 7
OUT_OF_ORDER = 45


Lines = Callable[[], list[str]]


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    """The DEBUG lines so far."""
    for part in ("engine", "cluster.broker"):
        caplog.set_level(logging.DEBUG, logger=f"kafka_sink.{part}")
    return lambda: [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]


def _sent(count: int = 3, size: int = 20, max_message_bytes: int = 500) -> Model:
    """A task whose rows for partition 0 are on their way to broker 0."""
    model = Model(max_message_bytes=max_message_bytes)
    model.append([0] * count, size, lambda: None)
    model.flush()
    model.send()
    return model


def _refused(model: Model, code: int) -> None:
    model.arrive(0, code, append=False)
    model.respond(0)


def test_debug_log_has_the_requests_retries_and_expiry_of_a_batch(lines: Lines) -> None:
    """A request's broker, batches and bytes; a retry's error, attempt, backoff and whether it may be written;
    what a batch expired of."""
    model = _sent()
    (request,) = model.pending
    size = sum(len(view) for views in request.views.values() for view in views)
    assert lines() == [f"broker 0: request with 1 batch(es) of {size} bytes"]
    _refused(model, NOT_LEADER)
    refused = "t-0: attempt 1 failed with NOT_LEADER_OR_FOLLOWER (6); retry in 100 ms, not written"
    assert lines()[1:] == [refused]
    model.now += DELIVERY_TIMEOUT_MS
    model.expire()
    assert lines()[-1] == (
        "t-0: 3 record(s) expired 10000 ms after they were appended, after 1 attempt(s): "
        "t-0: NOT_LEADER_OR_FOLLOWER (error 6)"
    )


def test_a_retry_of_what_may_be_written_says_so(lines: Lines) -> None:
    model = _sent()
    _refused(model, REQUEST_TIMED_OUT)
    model.now += 1_000
    model.send()
    model.disconnect(0, unread="lost")
    first, _, second = lines()[1:]
    assert first == ("t-0: attempt 1 failed with REQUEST_TIMED_OUT (7); retry in 100 ms, possibly written")
    assert second == (
        "t-0: attempt 2 failed with ConnectionResetError('cut'); retry in 200 ms, possibly written"
    )


def test_a_split_and_a_restart_of_sequences_are_logged(lines: Lines) -> None:
    model = _sent(count=4, size=100, max_message_bytes=300)
    (request,) = model.pending
    size = sum(len(view) for view in next(iter(request.views.values())))
    model.arrive(0, 0, append=True)
    model.respond(0)
    (line,) = lines()[1:]
    pieces = [batch.size for batch in model.accumulator.unfinished()]
    assert len(pieces) > 1
    assert line == f"t-0: split a batch of {size} bytes and 4 records into {len(pieces)} of {pieces} bytes"
    _refused(_sent(), OUT_OF_ORDER)
    restart = "t-0: sequences restart once nothing is in flight: OUT_OF_ORDER_SEQUENCE_NUMBER (45)"
    assert lines()[3] == restart


def test_partitions_that_were_not_sent_cost_one_line_a_response(caplog: pytest.LogCaptureFixture) -> None:
    """Catches: 20,000 lines of WARNING from one response, with texts of the broker as they came."""
    model = _sent()
    model.arrive(0, 0, append=True)
    request = next(one for one in model.pending if one.response is not None)
    assert request.response is not None
    (row,) = request.response.partitions
    foreign = tuple(row._replace(topic="forged\nline", partition=index) for index in range(20_000))
    request.response = replace(request.response, partitions=(*foreign, row))
    model.respond(0)
    (line,) = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert "20000 partitions that were not in the request" in line
    assert line.isprintable()
    assert len(line) < 500


def test_retries_are_logged_at_debug_only(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    _refused(_sent(), NOT_LEADER)
    assert not caplog.records
