"""Requests of a step that is over, by the planning that sends them."""

from __future__ import annotations

from contextlib import closing
from functools import partial

from kafka_sink.clock import WAIT_LISTENER, monotonic_ms
from kafka_sink.driver.planning_client import PlanningClient
from kafka_sink.model import Node
from kafka_sink.network import apis, requests
from tests.support.fake_broker import METADATA, FakeCluster
from tests.support.fake_replies import Reply
from tests.support.lookups import options


def test_a_request_that_was_given_up_ends_no_later_one() -> None:
    """Catches: a check of planning that is skipped in silence, as the request before failed late."""
    with FakeCluster({"t": 1}, brokers=2) as cluster:
        nodes = [Node(number, "127.0.0.1", cluster.port(number)) for number in range(2)]
        asked = options(cluster.bootstrap_servers, "t")
        offset_ms = [0.0]
        with closing(PlanningClient(asked, 9_000.0, lambda: monotonic_ms() + offset_ms[0])) as client:
            client.connect()
            client.use_advertised(nodes)
            assert all(client.reach(node.id) for node in nodes)
            cluster.freeze(0)

            def ask(node_id: int) -> object:
                encode = partial(requests.encode_metadata, topics=("t",), allow_auto_create=False)
                return client.ask(node_id, apis.METADATA, encode, 20_000.0)

            def go_on(*_: object) -> None:
                offset_ms[0] += 21_000.0

            token = WAIT_LISTENER.set(go_on)
            assert ask(0) is None
            WAIT_LISTENER.reset(token)
            cluster.script(METADATA, Reply(delay_ms=300.0), node_id=1)
            cluster.disconnect(0)
            assert ask(1) is not None
