"""Preparing a connection, and logging in again before a session ends, on a fake clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

from kafka_sink.errors import AuthenticationError
from kafka_sink.model import Node
from kafka_sink.network.broker_connection import BrokerConnection, ConnectionState
from kafka_sink.network.wire import Buffer
from kafka_sink.secret import Secret
from kafka_sink.security import sasl
from kafka_sink.security.sasl import Preparation, Security
from kafka_sink.security.settings import SaslSettings, SecuritySettings
from tests.support.login_broker import SECRET, Broker
from tests.support.network_harness import OPTIONS, metadata_request

SASL = SecuritySettings("SASL_PLAINTEXT", None, SaslSettings("PLAIN", "user", Secret(SECRET)))
SESSION_MS = 60_000


class Talking:
    """A stream to a Broker: what is sent is answered at once."""

    wants_write = buffered = False

    def __init__(self, broker: Broker, address: Any, settings: Any) -> None:
        self.broker = broker
        self.reply = b""

    def connected(self) -> None: ...
    def flush(self) -> None: ...
    def close(self) -> None: ...
    def abort(self) -> None: ...

    def handshake(self) -> bool:
        return True

    def send(self, buffers: Sequence[Buffer]) -> int:
        data = b"".join(map(bytes, buffers))
        self.reply += self.broker.answer(data)
        return len(data)

    def receive_into(self, buffer: memoryview) -> int | None:
        part, self.reply = self.reply[: len(buffer)], self.reply[len(buffer) :]
        buffer[: len(part)] = part
        return len(part) or None


class Stub(Security):
    """Preparations that end when a test says so; and the broker behind them."""

    def __init__(self, session_ms: int = SESSION_MS) -> None:
        super().__init__(SASL)
        self.broker = Broker(session_ms=session_ms)
        self.begun: list[Preparation] = []

    def begin(self, host: str, notify: Callable[[], None]) -> Preparation:
        self.begun.append(Preparation())
        return self.begun[-1]

    def end(self, error: Exception | None = None) -> None:
        last = self.begun[-1]
        last.error = error
        last.exchange = None if error else sasl.plain("user", Secret(SECRET))
        last.done = True


def connection(security: Stub) -> BrokerConnection:
    node = Node(3, "127.0.0.1", 9092)
    plaintext: Any = partial(Talking, security.broker)
    return BrokerConnection(node, OPTIONS, lambda: 0.5, lambda: None, security, plaintext=plaintext)


def state_of(one: BrokerConnection) -> ConnectionState:
    """Through a call: mypy takes an attribute that was looked at for unchanged."""
    return one.state


def talk(one: BrokerConnection, now_ms: float) -> int:
    """Runs until neither side has bytes to send; returns the number of responses to other requests."""
    responses = 0
    buffer = memoryview(bytearray(1 << 16))
    one.flush()
    while one.receive(buffer, now_ms):
        while one.next_response(now_ms) is not None:
            responses += 1
        one.flush()
    return responses


def ready(security: Stub, now_ms: float = 0.0) -> BrokerConnection:
    one = connection(security)
    one.open(now_ms)
    assert state_of(one) is ConnectionState.PREPARING
    security.end()
    one.prepared()
    one.writable(now_ms)
    talk(one, now_ms)
    assert state_of(one) is ConnectionState.READY
    return one


def test_nothing_is_connected_before_the_login_is_prepared() -> None:
    security = Stub()
    one = connection(security)
    one.open(0.0)
    one.prepared()
    assert state_of(one) is ConnectionState.PREPARING
    assert one.transport is None
    cause = one.overdue(OPTIONS.socket_connection_setup_timeout_ms * 1.3)
    assert "fetching its login or reading TLS files did not end" in str(cause)


def test_what_cannot_be_prepared_is_why_there_is_no_connection() -> None:
    security = Stub()
    one = connection(security)
    one.open(0.0)
    security.end(AuthenticationError("no ticket (on host h)"))
    with pytest.raises(AuthenticationError, match="no ticket"):
        one.prepared()


def test_a_preparation_that_nobody_waited_for_is_not_used_later() -> None:
    security = Stub()
    one = connection(security)
    one.open(0.0)
    one.close(20_000.0, TimeoutError("too long"))
    security.end()
    one.open(900_000.0)
    assert len(security.begun) == 2
    assert state_of(one) is ConnectionState.PREPARING


def test_one_that_hangs_is_waited_for_and_not_doubled() -> None:
    security = Stub()
    one = connection(security)
    for number in range(3):
        one.open(number * 20_000.0)
        one.close(number * 20_000.0 + 10_000, TimeoutError("too long"))
    assert len(security.begun) == 1


def test_a_login_is_renewed_in_time_and_requests_go_on() -> None:
    security = Stub()
    one = ready(security)
    due = SESSION_MS * (0.85 + 0.10 * 0.5)
    assert one.next_deadline_ms() == due
    assert not one.login_is_due(due - 1)
    one.renew_login(due)
    assert len(security.begun) == 2
    assert state_of(one) is ConnectionState.READY, "the old login serves while the new one is prepared"
    one.protocol.submit(metadata_request("t"), due)
    security.end()
    one.renew_login(due + 5)
    assert state_of(one) is ConnectionState.REAUTHENTICATING
    assert one.overdue(due + 10) is None
    with pytest.raises(ValueError, match="not ready"):
        one.protocol.submit(metadata_request("t"), due + 6)
    assert talk(one, due + 10) == 1
    assert state_of(one) is ConnectionState.READY
    assert one.next_deadline_ms() == due + 10 + due


def test_a_login_that_cannot_be_renewed_serves_to_its_end_and_is_tried_again() -> None:
    security = Stub()
    one = ready(security)
    now = SESSION_MS * 0.9
    one.renew_login(now)
    security.end(OSError("the endpoint is away"))
    one.renew_login(now)
    assert state_of(one) is ConnectionState.READY
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
        one.open(now)
        security.end()
        one.prepared()
        one.writable(now)
        with pytest.raises(
            ConnectionError, match=r"sessions of 1 ms.*connections\.max\.reauth\.ms"
        ) as caught:
            talk(one, now)
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


def test_a_renewed_login_without_an_end_does_not_keep_the_end_of_the_one_before() -> None:
    security = Stub()
    one = ready(security)
    security.broker.session_ms = 0
    now = SESSION_MS * 0.96
    one.renew_login(now)
    security.end()
    one.renew_login(now)
    talk(one, now)
    assert state_of(one) is ConnectionState.READY
    assert one.overdue(SESSION_MS + 1.0) is None


def test_a_connection_made_anew_logs_in_from_the_beginning() -> None:
    security = Stub()
    one = ready(security)
    one.close(1000.0, ConnectionResetError("cut"))
    assert not one.login_is_due(SESSION_MS * 2.0)
    one.open(2000.0)
    security.end()
    one.prepared()
    one.writable(2000.0)
    talk(one, 2000.0)
    assert state_of(one) is ConnectionState.READY
    assert security.broker.asked == [18, 17, 36] * 2
