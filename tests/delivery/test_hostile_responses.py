"""Hostile responses through the whole producer: it reconnects and delivers, or says what was wrong."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kafka_sink.errors import DeliveryError, KafkaSinkError, MetadataTimeoutError
from kafka_sink.task.producer_cache import PRODUCERS
from tests.support.effort import tries
from tests.support.fake_broker import API_VERSIONS, INIT_PRODUCER_ID, METADATA, PRODUCE, FakeCluster
from tests.support.fake_replies import (
    SWALLOWED,
    Refuse,
    Reply,
    claimed_length,
    cut_after,
    garbage,
    wrong_correlation_id,
)
from tests.support.proxy import ProxyCluster
from tests.support.scripted_cluster import TOPIC, rows, send, sender_threads, written
from tests.support.sink_time import slow_until
from tests.support.waiting import until

APIS = {"produce": PRODUCE, "metadata": METADATA, "versions": API_VERSIONS, "id": INIT_PRODUCER_ID}
HOSTILE: dict[str, Reply] = {
    "nothing, then closed": SWALLOWED,
    "no length": cut_after(2),
    "a length only": cut_after(4),
    "half a response": cut_after(17),
    "another's correlation id": wrong_correlation_id(1),
    "a correlation id of the past": wrong_correlation_id(-1),
    "2 GiB to come": claimed_length(2**31 - 1),
    "a negative length": claimed_length(-1),
    "length 0": claimed_length(0),
    "101 MiB to come": claimed_length(101 * 2**20),
    "a TLS alert": garbage(b"\x15\x03\x03\x00\x02\x02\x46"),
    "HTTP": garbage(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"),
    "zeros": garbage(bytes(300)),
    "ones": garbage(b"\xff" * 300),
}
# Kafka's default timeouts are 30 s and more.
BOUND_S = 25.0


@pytest.fixture(autouse=True)
def _no_sender_outlives_its_producer() -> Iterator[None]:
    yield
    PRODUCERS.close()
    assert sender_threads() == []


@contextmanager
def _bounded(seconds: float = BOUND_S) -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < seconds


@pytest.mark.parametrize("api", APIS)
def test_a_hostile_response_costs_a_connection_and_no_row(api: str) -> None:
    for name, reply in HOSTILE.items():
        with FakeCluster({TOPIC: 1}) as cluster, _bounded():
            cluster.script(APIS[api], reply, reply)
            result = send(cluster, rows(0, 20), rows(20, 20), request_timeout_ms=2_000)
            assert result.records == 40, name
            assert written(cluster) == list(range(40))
            # Two had such a response. The requests after them had normal ones.
            assert len(cluster.received(APIS[api])) >= 3, name
            assert result.retries >= 2 or api != "produce", name
        PRODUCERS.close()


@pytest.mark.parametrize("api", APIS)
def test_hostile_responses_without_end_are_named_within_the_bounds(api: str) -> None:
    """Catches: a hang, a loop without backoff, and an error that does not say what was wrong."""
    bad = wrong_correlation_id(7)
    short = {"request_timeout_ms": 500, "delivery_timeout_ms": 1_000, "max_block_ms": 1_000}
    with FakeCluster({TOPIC: 1}) as cluster, _bounded():
        cluster.script(APIS[api], *[bad] * 5_000)
        ended = pytest.raises((DeliveryError, MetadataTimeoutError), match=r"correlation id")
        with slow_until(lambda: len(cluster.received(APIS[api])) >= 2), ended as caught:
            send(cluster, rows(0, 20), **short)
        assert "payload" not in str(caught.value)
        # 1 s with a backoff between 20 and 50 ms.
        assert len(cluster.received(APIS[api])) < 130


def test_a_connection_that_ends_after_any_byte_of_the_responses() -> None:
    """The cut falls into the responses to ApiVersions, Metadata, InitProducerId or Produce."""
    for count in (*range(1, 12), 20, 40, 60):
        with FakeCluster({TOPIC: 1}) as cluster, ProxyCluster(cluster.bootstrap_servers) as proxies:
            target: Any = proxies
            assert send(target, rows(0, 5)).records == 5
            proxies[0].cut_after(count, "response")
            with _bounded():
                assert send(target, rows(5, 5)).records == 5, count
            assert written(cluster) == list(range(10))


def test_a_claimed_length_costs_no_memory() -> None:
    with FakeCluster({TOPIC: 1}) as cluster:
        send(cluster, rows(0, 5))
        # 16 MiB is what a Produce response may claim.
        cluster.script(PRODUCE, claimed_length(16 * 2**20 - 1))
        tracemalloc.start()
        try:
            assert send(cluster, rows(5, 5), request_timeout_ms=300).records == 5
            assert tracemalloc.get_traced_memory()[1] < 4 * 2**20
        finally:
            tracemalloc.stop()
        assert written(cluster) == list(range(10))


REPLIES = st.one_of(
    st.sampled_from([*HOSTILE.values(), Refuse(), Reply(silent=True)]),
    st.integers(0, 80).map(cut_after),
    st.binary(max_size=80).map(garbage),
    st.integers(-5, 3_000).map(claimed_length),
    st.tuples(st.integers(8, 90), st.integers(0, 255)).map(lambda at: Reply(mangle=_changed(*at))),
)


def _changed(place: int, value: int):  # type: ignore[no-untyped-def]  # a Reply's mangle
    """One byte of the response is another, beyond length and correlation id."""

    def mangle(frame: bytes) -> bytes:
        at = place % len(frame)
        return frame if at < 8 else frame[:at] + bytes([value]) + frame[at + 1 :]

    return mangle


@settings(max_examples=tries(10), deadline=None, suppress_health_check=[HealthCheck.too_slow])
# To requests of Produce, Metadata, ApiVersions and InitProducerId.
@given(st.tuples(*(st.lists(REPLIES, max_size=size) for size in (5, 3, 2, 2))))
def test_with_any_response_no_row_is_doubled_or_reported_and_missing(
    scripts: tuple[list[Reply], ...],
) -> None:
    """A byte changed in a response may be a lie that no client can see: of an error, an offset, a leader.

    So the task may fail, with an error of the sink; but what it says was written is written, never twice.
    """
    setup = "socket_connection_setup_timeout"
    short = dict.fromkeys((f"{setup}_ms", f"{setup}_max_ms", "request_timeout_ms"), 150)
    short |= {"delivery_timeout_ms": 2_000, "max_block_ms": 2_000}
    with FakeCluster({TOPIC: 1}) as cluster, _bounded():
        for api, replies in zip(APIS.values(), scripts, strict=True):
            cluster.script(api, *replies)
        acknowledged, said = 0, ""
        try:
            acknowledged = send(cluster, rows(0, 6), rows(6, 6), **short).records
        except KafkaSinkError as error:
            said = str(error)
        assert "payload" not in said
        found = written(cluster)
        assert len(set(found)) == len(found)
        assert found == sorted(found)
        if acknowledged:
            assert (acknowledged, found) == (12, list(range(12)))
        PRODUCERS.close()
        assert sender_threads() == []


def test_brokers_that_offer_to_receive_metrics_and_drop_those_who_ask_cost_nothing() -> None:
    subscriptions = 71
    with FakeCluster({TOPIC: 1}, versions={subscriptions: (0, 0), 72: (0, 0)}) as cluster, _bounded():
        assert send(cluster, rows(0, 100), enable_metrics_push="false").records == 100
        assert not cluster.received(subscriptions)
        assert send(cluster, rows(100, 100)).records == 100
        until(lambda: cluster.received(subscriptions), "a question")
        assert send(cluster, rows(200, 100)).records == 100
        assert written(cluster) == list(range(300))
