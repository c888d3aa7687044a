"""Whatever a broker does to its responses: each request ends exactly once, and the client goes on."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.effort import tries
from tests.support.fake_broker import API_VERSIONS, METADATA, PRODUCE, FakeCluster
from tests.support.fake_replies import (
    OK,
    SWALLOWED,
    Refuse,
    Reply,
    claimed_length,
    cut_after,
    garbage,
    trailing,
    wrong_correlation_id,
)
from tests.support.network_harness import Driver, Failed, Responded, batch, metadata_request, produce_request

REPLIES = st.one_of(
    st.sampled_from([OK, SWALLOWED, Refuse(), Reply(silent=True), wrong_correlation_id(), trailing(b"x")]),
    st.integers(0, 40).map(cut_after),
    st.binary(max_size=60).map(garbage),
    st.integers(-3, 500).map(claimed_length),
)
KINDS = st.lists(st.sampled_from(["produce", "fire", "metadata"]), min_size=1, max_size=12)


@settings(max_examples=tries(25))
@given(
    produced=st.lists(REPLIES, max_size=8),
    asked=st.lists(REPLIES, max_size=4),
    negotiated=st.lists(REPLIES, max_size=3),
    kinds=KINDS,
)
def test_every_request_ends_exactly_once(
    produced: list[Reply], asked: list[Reply], negotiated: list[Reply], kinds: list[str]
) -> None:
    with FakeCluster({"t": 1}) as cluster, Driver(cluster.bootstrap_servers) as driver:
        cluster.script(PRODUCE, *produced)
        cluster.script(METADATA, *asked)
        cluster.script(API_VERSIONS, *negotiated)
        waiting = list(enumerate(kinds))

        def ended() -> Counter[object]:
            found = (e for e in driver.events if isinstance(e, (Responded, Failed)))
            return Counter(event.name for event in found)

        def step() -> bool:
            while waiting and driver.ready():
                tag, kind = waiting.pop(0)
                request = (
                    metadata_request("t")
                    if kind == "metadata"
                    else produce_request(batch(1), acks=0 if kind == "fire" else -1)
                )
                driver.send(request, name=tag)
            if not driver.poll(5):
                driver.clock.now += 2_000  # silence: towards the next reconnect or timeout
            return len(ended()) == len(kinds)

        assert any(step() for _ in range(10_000)), driver.events
        for _ in range(3):
            driver.poll(1)
        assert ended() == Counter(range(len(kinds)))
        assert driver.connection().in_flight == 0
