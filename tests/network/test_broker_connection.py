"""A connection's states as a table, its backoff and its deadlines, on a fake clock."""

from __future__ import annotations

import dataclasses
import math
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

from kafka_sink.errors import AuthenticationError
from kafka_sink.model import Node
from kafka_sink.network.broker_connection import BrokerConnection
from kafka_sink.network.broker_protocol import ConnectionState
from kafka_sink.network.wire import Buffer
from kafka_sink.secret import Secret
from kafka_sink.security.preparation import Prepared, Security
from kafka_sink.security.settings import SaslSettings, SecuritySettings
from tests.support.login_broker import SECRET, Broker, plain
from tests.support.network_harness import OPTIONS, batch, metadata_request, produce_request

NODE = Node(3, "127.0.0.1", 9092)


class Silent:
    """A stream that takes every byte; nothing comes back."""

    held_bytes, buffered = 0, False

    def __init__(self, address: Any) -> None:
        self.address = address
        self.sent = b""

    def on_connected(self) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...

    def handshake(self) -> bool:
        return True

    def send(self, buffers: Sequence[Buffer]) -> int:
        data = b"".join(map(bytes, buffers))
        self.sent += data
        return len(data)

    def receive_into(self, buffer: memoryview) -> int | None:
        return None


def link(random: float = 0.5, plaintext: Any = Silent, **changes: Any) -> BrokerConnection:
    """To a numeric address, so that nothing is looked up."""
    options = dataclasses.replace(OPTIONS, **changes)
    return BrokerConnection(NODE, options, lambda: random, lambda: None, plaintext=plaintext)


def establish(one: BrokerConnection, now_ms: float) -> None:
    """The one address that is being tried responds."""
    (attempt,) = one.attempts
    assert one.on_connected(attempt, now_ms) == []
    one.shake_hands(now_ms)


def connected(now_ms: float = 0.0, failures: int = 0, **changes: Any) -> BrokerConnection:
    """Up to the ApiVersions request, which stays without a response; after some attempts that failed."""
    one = link(**changes)
    for _ in range(failures):
        one.close(now_ms, OSError("no"))
    one.open(now_ms)
    establish(one, now_ms)
    one.flush(now_ms)
    assert one.state is ConnectionState.NEGOTIATING
    return one


def made_ready(now_ms: float = 0.0, **changes: Any) -> BrokerConnection:
    """As if the response had come."""
    one = connected(now_ms, **changes)
    one.protocol.take_in_flight()
    one.protocol.phase = ConnectionState.READY
    assert one.next_response(now_ms) is None
    assert one.state is ConnectionState.READY
    return one


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


def test_backoff_has_a_jitter_of_a_fifth_and_is_at_least_its_base_and_finite() -> None:
    for random, wait in ((0.0, 40), (0.5, 50), (1.0, 60)):
        one = link(random=random)
        assert one.may_connect(0.0)
        one.close(0.0, OSError("no"))
        assert one.connect_after_ms == pytest.approx(wait)
        assert not one.may_connect(wait - 0.1)
        assert one.may_connect(wait + 0.1)
    below, huge = (
        link(reconnect_backoff_ms=base, reconnect_backoff_max_ms=most)
        for base, most in ((500, 100), (2**62, 2**63 - 1))
    )
    for _ in range(2000):
        below.close(0.0, OSError("no"))
        huge.close(0.0, OSError("no"))
        assert below.connect_after_ms == 500
    assert math.isfinite(huge.connect_after_ms)


def test_closing_without_a_cause_is_no_failure_and_throttling_outlives_it() -> None:
    one = made_ready()
    one.throttled_until_ms = 500.0
    one.close(7.0, None)
    assert one.state is ConnectionState.IDLE
    assert one.may_connect(7.0)
    assert one.last_error is None
    assert one.throttled_until_ms == 500.0
    assert one.next_deadline_ms() == math.inf
    assert one.overdue(1e15) is None


def test_a_hosts_further_addresses_are_tried_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [(socket.AF_INET, ("10.0.0.1", 1)), (socket.AF_INET, ("10.0.0.2", 1))]
    tried: list[Any] = []

    def connect(address: Any) -> Silent:
        tried.append(address)
        return Silent(address)

    monkeypatch.setattr("kafka_sink.network.transport.resolve_host", lambda host, port, flags: list(places))
    one = link(plaintext=connect)
    for now_ms in (0.0, 1.0):
        assert one.may_connect(now_ms)
        one.open(now_ms)
        one.close(now_ms, OSError("refused"))
    assert not one.may_connect(1.0), "all addresses failed: now the backoff runs"
    one.open(60.0)
    assert tried == [*places, places[0]], "and the name is looked up again"

    def refuses(*_: object) -> None:
        raise OSError("network unreachable")

    one = link(plaintext=refuses)
    with pytest.raises(OSError, match="unreachable") as caught:
        one.open(0.0)
    one.close(0.0, caught.value)
    assert one.state is ConnectionState.IDLE
    assert str(one.last_error) == "network unreachable"


class Failing(Silent):
    """A stream whose connecting fails once it is writable."""

    def on_connected(self) -> None:
        raise OSError("refused")


def test_a_silent_address_costs_a_quarter_of_a_second_while_others_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches: a name whose first address drops packets takes the whole setup timeout, and planning gives up
    before that (RFC 8305)."""
    places = [(socket.AF_INET, (f"10.0.0.{number}", 1)) for number in range(4)]
    kinds = iter([Silent, Failing, Silent, Silent, Silent])
    monkeypatch.setattr("kafka_sink.network.transport.resolve_host", lambda host, port, flags: list(places))
    one = link(plaintext=lambda address: next(kinds)(address))
    one.open(0.0)
    assert one.next_deadline_ms() == 250.0
    assert not one.next_address_is_due(249.0)
    assert one.overdue(250.0) is None
    one.try_next_address(250.0)
    first, second = one.attempts
    assert one.on_connected(second, 260.0) == [second], "the third is tried at once"
    assert one.next_deadline_ms() == 510.0
    third = [*one.attempts][1]
    assert one.on_connected(third, 300.0) == [first]
    assert one.transport is third
    assert one.first_tries_end_ms(9_000.0) == math.inf
    # The listener that took the connection says nothing: the other addresses follow, the fourth first.
    one.close(10_000.0, TimeoutError("silent"))
    assert one.may_connect(10_000.0)
    one.open(10_000.0)
    one.try_next_address(10_250.0)
    assert [one.attempts[attempt] for attempt in one.attempts] == [places[3], places[0]]
    assert one.first_tries_end_ms(9_000.0) == 19_000.0
    assert one.next_deadline_ms() == 20_000.0
    one.close(20_000.0, TimeoutError("silent"))
    assert one.first_tries_end_ms(9_000.0) == -math.inf


def test_the_setup_timeout_grows_with_failures_and_names_its_option() -> None:
    one = link()
    bounds = []
    for _ in range(4):
        one.open(0.0)
        bounds.append(one.next_deadline_ms())
        one.close(0.0, OSError("no"))
    assert bounds == [10_000, 20_000, 30_000, 30_000]
    one = connected()
    assert one.overdue(9_999.0) is None
    cause = one.overdue(10_000.0)
    assert isinstance(cause, TimeoutError)
    assert "socket.connection.setup.timeout.ms" in str(cause)
    assert "may expect TLS" in str(cause)


def test_request_timeouts_are_the_oldest_requests() -> None:
    one = made_ready()
    one.protocol.submit(dataclasses.replace(metadata_request("t"), timeout_ms=100), 1_000.0)
    one.protocol.submit(metadata_request("t"), 1_001.0)
    assert one.next_deadline_ms() == 1_100
    assert one.overdue(1_099.0) is None
    cause = one.overdue(1_100.0)
    assert isinstance(cause, TimeoutError)
    assert "127.0.0.1:9092 (id 3) did not respond within kafka.request.timeout.ms = 100 ms" in str(cause)
    assert one.waiting_ms(1_100.0) == 100


def test_a_requests_age_begins_with_the_last_byte_that_was_written() -> None:
    """Catches: requests that a slow link takes longer for than request.timeout.ms, sent again and again."""
    room = [0]

    class Slow(Silent):
        def send(self, buffers: Sequence[Buffer]) -> int:
            taken = min(room[0], sum(map(len, buffers)))
            room[0] -= taken
            return taken

    room[0] = 1000
    one = made_ready(plaintext=Slow)
    room[0] = 0
    first, second = produce_request(bytes(1000)), produce_request(bytes(500))
    for request in (first, second):
        one.protocol.submit(request, 100.0)
    one.flush(100.0)
    assert one.next_deadline_ms() == 30_100.0
    for at_ms in (20_000.0, 40_000.0):
        room[0] = 500
        one.flush(at_ms)
        one.flush(at_ms + 1)
        assert one.next_deadline_ms() == at_ms + 30_000
        assert one.waiting_ms(at_ms + 5) == 5
        assert one.overdue(at_ms + 29_999) is None
    room[0] = first.end - one.protocol.send_buffer.written_bytes + 10
    one.flush(50_000.0)
    room[0] = 300
    one.flush(60_000.0)
    assert (first.written_ms, second.written_ms) == (50_000.0, 60_000.0)
    assert one.overdue(79_999.0) is None
    assert isinstance(one.overdue(80_000.0), TimeoutError)


def test_idleness_counts_from_the_last_use_and_not_while_a_request_waits() -> None:
    one = made_ready(connections_max_idle_ms=1_000)
    assert not one.idle_too_long(999.0)
    assert one.idle_too_long(1_000.0)
    assert one.overdue(1_000.0) is None
    one.protocol.submit(metadata_request("t"), 1_000.0)
    assert not one.idle_too_long(10_000.0)
    never = made_ready(connections_max_idle_ms=-1)
    assert never.next_deadline_ms() == math.inf
    assert not never.idle_too_long(1e15)
    # With acks=0 no response ever shows a use: being written is one.
    one = made_ready(connections_max_idle_ms=1_000, acks=0)
    request = produce_request(batch(1), acks=0)
    one.protocol.submit(request, 900.0)
    assert one.flush(900.0) == [request]
    assert not one.idle_too_long(1_899.0)
    assert one.idle_too_long(1_900.0)


def test_requests_name_the_client() -> None:
    for given, named in (("", b"kafka-chunked"), ("me", b"me")):
        one = connected(client_id=given)
        assert isinstance(one.transport, Silent)
        # Behind length, API, version and correlation id: a text with its length.
        assert one.transport.sent[12:].startswith(len(named).to_bytes(2, "big") + named)


# -- preparing a connection, and logging in again before a session ends --------------------------------


SASL = SecuritySettings("SASL_PLAINTEXT", None, SaslSettings("PLAIN", "user", Secret(SECRET)))
SESSION_MS = 60_000


class Talking(Silent):
    """A stream to a Broker: what is sent is answered at once."""

    def __init__(self, broker: Broker, address: Any) -> None:
        super().__init__(address)
        self.broker = broker
        self.reply = b""

    def send(self, buffers: Sequence[Buffer]) -> int:
        count = super().send(buffers)
        self.reply += self.broker.answer(self.sent[-count:] if count else b"")
        return count

    def receive_into(self, buffer: memoryview) -> int | None:
        part, self.reply = self.reply[: len(buffer)], self.reply[len(buffer) :]
        buffer[: len(part)] = part
        return len(part) or None


class Stub(Security):
    """Preparations that end when a test says so; and the broker behind them."""

    def __init__(self, session_ms: int = SESSION_MS) -> None:
        super().__init__(SASL)
        self.broker = Broker(session_ms=session_ms)
        self.begun: list[Future[Prepared]] = []

    def begin(self, host: str, notify: Callable[[], None]) -> Future[Prepared]:
        self.begun.append(Future())
        return self.begun[-1]

    def end(self, error: Exception | None = None) -> None:
        if error:
            self.begun[-1].set_exception(error)
        else:
            self.begun[-1].set_result((None, plain()))


def connection(security: Stub) -> BrokerConnection:
    plaintext: Any = partial(Talking, security.broker)
    return BrokerConnection(NODE, OPTIONS, lambda: 0.5, lambda: None, security, plaintext=plaintext)


def is_in(one: BrokerConnection, state: ConnectionState) -> bool:
    """Through a call: mypy takes an attribute that was looked at for unchanged."""
    return one.state is state


def talk(one: BrokerConnection, now_ms: float) -> int:
    """Runs until neither side has bytes to send; returns the number of responses to other requests."""
    responses = 0
    buffer = memoryview(bytearray(1 << 16))
    one.flush(now_ms)
    while one.receive(buffer, now_ms):
        while one.next_response(now_ms) is not None:
            responses += 1
        one.flush(now_ms)
    return responses


def log_in(one: BrokerConnection, security: Stub, now_ms: float) -> None:
    """Opens the connection, whose preparation succeeds, and runs until the login is over."""
    one.open(now_ms)
    assert is_in(one, ConnectionState.PREPARING)
    security.end()
    one.on_prepared(now_ms)
    establish(one, now_ms)
    talk(one, now_ms)


def ready(security: Stub) -> BrokerConnection:
    one = connection(security)
    log_in(one, security, 0.0)
    assert is_in(one, ConnectionState.READY)
    return one


def test_connection_waits_for_its_login_and_drops_one_that_hangs() -> None:
    one = connection(security := Stub())
    one.open(0.0)
    one.on_prepared(0.0)
    assert is_in(one, ConnectionState.PREPARING)
    assert one.transport is None
    cause = one.overdue(OPTIONS.socket_connection_setup_timeout_ms * 1.3)
    assert "fetching its login or reading TLS files did not complete" in str(cause)
    security.end(AuthenticationError("no ticket (on host h)"))
    with pytest.raises(AuthenticationError, match="no ticket"):
        one.on_prepared(0.0)
    one = connection(security := Stub())
    for at_ms in (0.0, 20_000.0, 40_000.0):
        one.open(at_ms)
        one.close(at_ms + 10_000, TimeoutError("too long"))
    assert len(security.begun) == 1
    security.end()
    one.open(900_000.0)
    assert len(security.begun) == 2
    assert is_in(one, ConnectionState.PREPARING)


def test_a_login_is_renewed_in_time_and_requests_go_on() -> None:
    one = ready(security := Stub())
    due = SESSION_MS * (0.85 + 0.10 * 0.5)
    assert one.next_deadline_ms() == due
    assert not one.login_is_due(due - 1)
    one.renew_login(due)
    assert len(security.begun) == 2
    assert is_in(one, ConnectionState.READY), "the old login serves while the new one is prepared"
    one.protocol.submit(metadata_request("t"), due)
    security.end()
    one.renew_login(due + 5)
    assert is_in(one, ConnectionState.REAUTHENTICATING)
    assert one.overdue(due + 10) is None
    with pytest.raises(ValueError, match="not ready"):
        one.protocol.submit(metadata_request("t"), due + 6)
    assert talk(one, due + 10) == 1
    assert is_in(one, ConnectionState.READY)
    assert one.next_deadline_ms() == due + 10 + due


def test_a_login_that_cannot_be_renewed_serves_to_its_end_and_is_tried_again() -> None:
    one = ready(security := Stub())
    now = SESSION_MS * 0.9
    one.renew_login(now)
    security.end(OSError("the endpoint is away"))
    one.renew_login(now)
    assert is_in(one, ConnectionState.READY)
    assert not one.login_is_due(now + 999)
    one.renew_login(now + 1000)
    assert len(security.begun) == 3
    assert one.overdue(SESSION_MS - 1) is None
    assert "expired before it could be renewed" in str(one.overdue(SESSION_MS))


def test_a_session_of_a_moment_is_a_failure_and_the_next_login_waits() -> None:
    """Catches: session_lifetime_ms=1, after which logins follow one another without a pause."""
    security = Stub(session_ms=1)
    one = connection(security)
    waits = []
    now = 0.0
    for _ in range(5):
        with pytest.raises(ConnectionError, match=r"of 1 ms.*connections\.max\.reauth\.ms") as caught:
            log_in(one, security, now)
        one.close(now, caught.value)
        waits.append(one.connect_after_ms - now)
        now = one.connect_after_ms
    assert waits == sorted(waits)
    assert waits[0] > 0
    assert waits[-1] > 2 * waits[0]


def test_without_a_session_that_ends_nothing_is_renewed() -> None:
    one = ready(Stub(session_ms=0))
    assert not one.login_is_due(1e12)
    assert one.next_deadline_ms() == OPTIONS.connections_max_idle_ms
    assert one.overdue(1e12) is None
    # Nor does a renewed login keep the end of the one before.
    one = ready(security := Stub())
    security.broker.session_ms = 0
    now = SESSION_MS * 0.96
    one.renew_login(now)
    security.end()
    one.renew_login(now)
    talk(one, now)
    assert is_in(one, ConnectionState.READY)
    assert one.overdue(SESSION_MS + 1.0) is None


def test_a_connection_made_anew_logs_in_from_the_beginning() -> None:
    one = ready(security := Stub())
    one.close(1000.0, ConnectionResetError("cut"))
    assert not one.login_is_due(SESSION_MS * 2.0)
    log_in(one, security, 2000.0)
    assert is_in(one, ConnectionState.READY)
    assert security.broker.asked == [18, 17, 36] * 2
