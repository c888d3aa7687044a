"""A connection's states as a table, its backoff and its deadlines, on a fake clock."""

from __future__ import annotations

import dataclasses
import itertools
import math
import socket
from functools import partial
from typing import Any

import pytest

from kafka_sink.model import Node
from kafka_sink.network.broker_connection import BrokerConnection, ConnectionState, RequestTimeoutError
from kafka_sink.network.broker_protocol import Phase
from kafka_sink.network.transport import Lookup, start_lookup
from tests.support.network_harness import OPTIONS, batch, metadata_request, produce_request

ALLOWED = {
    ("idle", "resolving"), ("idle", "preparing"), ("idle", "connecting"), ("resolving", "preparing"),
    ("resolving", "connecting"), ("resolving", "idle"), ("preparing", "connecting"), ("preparing", "idle"),
    ("connecting", "handshaking"), ("connecting", "idle"), ("handshaking", "negotiating"),
    ("handshaking", "idle"), ("negotiating", "authenticating"), ("negotiating", "ready"),
    ("negotiating", "idle"), ("authenticating", "ready"), ("authenticating", "idle"),
    ("ready", "reauthenticating"), ("ready", "idle"), ("reauthenticating", "ready"),
    ("reauthenticating", "idle"),
}  # fmt: skip


class DeafTransport:
    """Takes every byte and sends nothing."""

    wants_write = False
    buffered = False

    def __init__(self, address: Any, settings: Any) -> None:
        self.address = address

    def connected(self) -> None:
        """At once."""

    def handshake(self) -> bool:
        """Nothing to do."""
        return True

    def flush(self) -> None:
        """Nothing to do."""

    def send(self, buffers: Any) -> int:
        """All of it."""
        return sum(map(len, buffers))

    def receive_into(self, buffer: memoryview) -> int | None:
        """Never anything."""
        return None

    def close(self) -> None:
        """Nothing to do."""

    def abort(self) -> None:
        """Nothing to do."""


def link(
    random: float = 0.5, lookup: Any = start_lookup, plaintext: Any = DeafTransport, **changes: Any
) -> BrokerConnection:
    """To a numeric address, so that nothing is looked up."""
    options = dataclasses.replace(OPTIONS, **changes)
    node = Node(3, "127.0.0.1", 9092)
    return BrokerConnection(node, options, lambda: random, lambda: None, lookup=lookup, plaintext=plaintext)


def connected(now_ms: float = 0.0, failures: int = 0, **changes: Any) -> BrokerConnection:
    """Up to the ApiVersions request, which stays without a response; after some attempts that failed."""
    one = link(**changes)
    for _ in range(failures):
        one.close(now_ms, OSError("no"))
    one.open(now_ms)
    one.writable(now_ms)
    one.flush()
    assert one.state is ConnectionState.NEGOTIATING
    return one


def made_ready(now_ms: float = 0.0, **changes: Any) -> BrokerConnection:
    """As if the response had come."""
    one = connected(now_ms, **changes)
    one.protocol.take_in_flight()
    one.protocol.phase = Phase.READY
    assert one.next_response(now_ms) is None
    assert one.state is ConnectionState.READY
    return one


@pytest.mark.parametrize(("before", "after"), list(itertools.product(ConnectionState, ConnectionState)))
def test_moves_are_a_table_and_an_illegal_one_changes_nothing(
    before: ConnectionState, after: ConnectionState
) -> None:
    one = link()
    one.state = before
    if (before.value, after.value) in ALLOWED:
        one._move_to(after)
        assert one.state is after
    else:
        with pytest.raises(ValueError, match=f"cannot go from {before.value} to {after.value}"):
            one._move_to(after)
        assert one.state is before


def test_backoff_grows_to_its_maximum_and_starts_anew_after_success() -> None:
    one = link()
    waits = []
    for _ in range(8):
        one.state = ConnectionState.CONNECTING
        one.close(0.0, OSError("no"))
        waits.append(one.connect_after_ms)
    assert waits == [50, 100, 200, 400, 800, 1000, 1000, 1000]
    again = made_ready(failures=5)
    again.close(0.0, OSError("lost"))
    assert again.connect_after_ms == 50


@pytest.mark.parametrize(("random", "wait"), [(0.0, 40), (0.5, 50), (1.0, 60)])
def test_jitter_is_a_fifth(random: float, wait: float) -> None:
    one = link(random=random)
    one.close(0.0, OSError("no"))
    assert one.connect_after_ms == pytest.approx(wait)


def test_a_backoff_maximum_below_the_base_is_the_base() -> None:
    one = link(reconnect_backoff_ms=500, reconnect_backoff_max_ms=100)
    for _ in range(3):
        one.close(0.0, OSError("no"))
        assert one.connect_after_ms == 500


def test_many_failures_do_not_overflow() -> None:
    one = link(reconnect_backoff_ms=2**62, reconnect_backoff_max_ms=2**63 - 1)
    for _ in range(2000):
        one.close(0.0, OSError("no"))
    assert math.isfinite(one.connect_after_ms)


def test_nothing_connects_before_the_backoff_is_over() -> None:
    one = link()
    assert one.may_connect(0.0)
    one.close(0.0, OSError("no"))
    assert not one.may_connect(49.9)
    assert one.may_connect(50.0)


def test_closing_without_a_cause_is_no_failure() -> None:
    one = made_ready()
    one.close(7.0, None)
    assert one.state is ConnectionState.IDLE
    assert one.may_connect(7.0)
    assert one.last_error is None


def test_a_hosts_further_addresses_are_tried_at_once() -> None:
    places = [(socket.AF_INET, ("10.0.0.1", 1)), (socket.AF_INET, ("10.0.0.2", 1))]
    one = link(lookup=partial(start_lookup, resolve=lambda host, port, flags: list(places)))
    tried = []
    for now_ms in (0.0, 1.0):
        assert one.may_connect(now_ms)
        one.open(now_ms)
        assert isinstance(one.transport, DeafTransport)
        tried.append(one.transport.address)
        one.close(now_ms, OSError("refused"))
    assert tried == places
    assert not one.may_connect(1.0), "all addresses failed: now the backoff runs"
    one.open(60.0)
    assert isinstance(one.transport, DeafTransport)
    assert one.transport.address == places[0], "and the name is looked up again"


def test_the_system_refusing_at_once_is_an_error_and_leaves_it_idle_after_close() -> None:
    def refuses(*_: object) -> None:
        raise OSError("network unreachable")

    one = link(plaintext=refuses)
    with pytest.raises(OSError, match="unreachable"):
        one.open(0.0)
    one.close(0.0, OSError("network unreachable"))
    assert one.state is ConnectionState.IDLE
    assert str(one.last_error) == "network unreachable"


def test_the_setup_timeout_grows_with_failures() -> None:
    one = link()
    bounds = []
    for _ in range(4):
        one.open(0.0)
        bounds.append(one.next_deadline_ms())
        one.close(0.0, OSError("no"))
    assert bounds == [10_000, 20_000, 30_000, 30_000]


def test_a_setup_that_takes_too_long_names_its_option() -> None:
    one = connected()
    assert one.overdue(9_999.0) is None
    cause = one.overdue(10_000.0)
    assert isinstance(cause, TimeoutError)
    assert "socket.connection.setup.timeout.ms" in str(cause)
    assert "negotiating" in str(cause)


def test_request_timeouts_are_the_oldest_requests() -> None:
    one = made_ready()
    one.protocol.submit(dataclasses.replace(metadata_request("t"), timeout_ms=100), 1_000.0)
    one.protocol.submit(metadata_request("t"), 1_001.0)
    assert one.next_deadline_ms() == 1_100
    assert one.overdue(1_099.0) is None
    cause = one.overdue(1_100.0)
    assert isinstance(cause, RequestTimeoutError)
    assert "127.0.0.1:9092 (id 3) did not respond within kafka.request.timeout.ms = 100 ms" in str(cause)
    assert one.waiting_ms(1_100.0) == 100


def test_idleness_counts_from_the_last_use_and_not_while_a_request_waits() -> None:
    one = made_ready(connections_max_idle_ms=1_000)
    assert not one.idle_too_long(999.0)
    assert one.idle_too_long(1_000.0)
    assert one.overdue(1_000.0) is None
    one.protocol.submit(metadata_request("t"), 1_000.0)
    assert not one.idle_too_long(10_000.0)


def test_a_request_without_a_response_is_a_use_when_it_is_written() -> None:
    """With acks=0 no response ever shows that the connection is used."""
    one = made_ready(connections_max_idle_ms=1_000, acks=0)
    request = produce_request(batch(1), acks=0)
    one.protocol.submit(request, 900.0)
    assert one.flush() == [request]
    assert not one.idle_too_long(1_899.0)
    assert one.idle_too_long(1_900.0)


def test_a_negative_idle_time_means_never() -> None:
    one = made_ready(connections_max_idle_ms=-1)
    assert one.next_deadline_ms() == math.inf
    assert not one.idle_too_long(1e15)


def test_an_idle_link_has_no_deadline() -> None:
    assert link().next_deadline_ms() == math.inf
    assert link().overdue(1e15) is None


def test_throttling_outlives_a_reconnect() -> None:
    one = made_ready()
    one.throttled_until_ms = 500.0
    one.close(0.0, OSError("lost"))
    assert one.throttled_until_ms == 500.0


@pytest.mark.parametrize(
    ("node", "lookup", "expected"),
    [
        (-1, "resolve_canonical_bootstrap_servers_only", True),
        (-1, "use_all_dns_ips", False),
        (3, "resolve_canonical_bootstrap_servers_only", False),
    ],
)
def test_only_bootstrap_addresses_are_looked_up_by_their_canonical_name(
    node: int, lookup: str, expected: bool
) -> None:
    asked = []

    def start(*arguments: Any) -> Lookup:
        asked.append(arguments[2])
        return Lookup()

    options = dataclasses.replace(OPTIONS, client_dns_lookup=lookup)
    at = Node(node, "a.example", 9092)
    BrokerConnection(at, options, lambda: 0.5, lambda: None, lookup=start).open(0.0)
    assert asked == [expected]


@pytest.mark.parametrize(("given", "named"), [("", b"kafka-chunked"), ("me", b"me")])
def test_requests_name_the_client(given: str, named: bytes) -> None:
    one = link(client_id=given)
    one.open(0.0)
    sent: list[bytes] = []
    assert one.transport is not None
    one.transport.send = lambda buffers: sent.extend(map(bytes, buffers)) or sum(map(len, buffers))  # type: ignore[method-assign]
    one.writable(0.0)
    one.flush()
    # Behind length, API, version and correlation id: a text with its length.
    assert b"".join(sent)[12:].startswith(len(named).to_bytes(2, "big") + named)
