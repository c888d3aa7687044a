"""The login in the connection's state machine: whole, byte by byte, refused, repeated, and cut."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest

from kafka_sink.errors import AuthenticationError, KafkaSinkError, ProtocolError
from kafka_sink.network import apis
from kafka_sink.network.authentication import HandshakeResponse, Login, LoginRequest
from kafka_sink.network.broker_protocol import BrokerProtocol, Phase
from kafka_sink.secret import Secret
from kafka_sink.security import sasl
from tests.support.effort import tries
from tests.support.login_broker import SECRET, Broker
from tests.support.network_harness import metadata_request
from tests.support.schema_requests import each, encoded


def connection(exchange: sasl.SaslExchange | None = None) -> BrokerProtocol:
    exchange = exchange or sasl.plain("user", Secret(SECRET))
    return BrokerProtocol("me", "host:1", 1000.0, exchange)


def phase_of(one: BrokerProtocol) -> Phase:
    """Through a call: mypy takes an attribute that was looked at for unchanged."""
    return one.phase


def sent(one: BrokerProtocol) -> bytes:
    data = b"".join(bytes(buffer) for buffer in one.send_buffer.next_buffers())
    one.send_buffer.advance(len(data))
    return data


def talk(one: BrokerProtocol, broker: Broker, *, piece: int = 1 << 20) -> list[Any]:
    """Runs both sides until neither has bytes to send; the broker's bytes come in pieces."""
    responses: list[Any] = []
    while data := sent(one):
        reply = broker.answer(data)
        for at in range(0, len(reply), piece):
            one.receive(reply[at : at + piece])
            while (answered := one.next_response(5.0)) is not None:
                responses.append(answered.response)
    return responses


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1 << 20])
def test_a_login_comes_before_the_first_request_however_bytes_are_split(piece: int) -> None:
    one, broker = connection(), Broker()
    one.start(0.0)
    with pytest.raises(ValueError, match="not ready"):
        one.submit(metadata_request("t"), 0.0)
    talk(one, broker, piece=piece)
    assert one.phase is Phase.READY
    assert broker.asked == [18, 17, 36]
    assert f"\0user\0{SECRET}".encode() in broker.said[0]
    one.submit(metadata_request("t"), 0.0)
    assert len(talk(one, broker, piece=piece)) == 1


def test_without_a_login_nothing_of_it_is_sent() -> None:
    one, broker = BrokerProtocol("me", "host:1", 1000.0), Broker()
    one.start(0.0)
    talk(one, broker)
    assert one.phase is Phase.READY
    assert broker.asked == [18]


@pytest.mark.parametrize(
    ("refusals", "problem"),
    [
        ({"handshake": 33}, "it does not offer PLAIN but PLAIN, GSSAPI"),
        ({"handshake": 34}, "its listener takes no login"),
        ({"handshake": 77}, "error 77"),
        (
            {"authenticate": 58},
            r"refuses the credentials for SASL PLAIN \(Authentication failed: wrong \[31m\)",
        ),
        ({"authenticate": 13}, "error 13"),
        ({"data": b"?"}, "not one of this mechanism"),
        ({"ranges": {17: (0, 0)}}, "does not offer SASL"),
        ({"ranges": {36: (5, 9)}}, "does not offer SASL"),
    ],
)
def test_each_refusal_says_what_to_change_and_no_request_follows(
    refusals: dict[str, Any], problem: str
) -> None:
    one, broker = connection(), Broker(**refusals)
    one.start(0.0)
    with pytest.raises(AuthenticationError, match=problem) as caught:
        talk(one, broker)
    assert "host:1" in str(caught.value)
    assert one.phase is not Phase.READY
    assert one.take_in_flight() == []
    assert SECRET not in repr(vars(one)) + str(caught.value)


def test_a_new_login_goes_behind_what_is_in_flight_and_requests_wait_for_it() -> None:
    one, broker = connection(), Broker(session_ms=60_000)
    one.start(0.0)
    talk(one, broker)
    assert one.session_ms == 60_000
    one.submit(metadata_request("t"), 1.0)
    one.log_in_again(sasl.plain("user", Secret("second")), 1.0)
    assert phase_of(one) is Phase.REAUTHENTICATING
    with pytest.raises(ValueError, match="not ready"):
        one.submit(metadata_request("t"), 1.0)
    with pytest.raises(ValueError, match="not ready for another login"):
        one.log_in_again(sasl.plain("user", Secret("third")), 1.0)
    assert len(talk(one, broker, piece=1)) == 1
    assert broker.asked == [18, 17, 36, 3, 17, 36]
    assert phase_of(one) is Phase.READY


def test_a_connection_lost_in_a_second_login_reports_the_requests_of_others_only() -> None:
    one, broker = connection(), Broker()
    one.start(0.0)
    talk(one, broker)
    mine = metadata_request("t")
    one.submit(mine, 1.0)
    one.log_in_again(sasl.plain("user", Secret("second")), 1.0)
    sent(one)
    assert one.take_in_flight() == [(mine, True)]


def test_cut_at_every_byte_a_login_is_neither_over_nor_reported() -> None:
    whole = Broker()
    one = connection()
    one.start(0.0)
    total = 0
    while data := sent(one):
        reply = whole.answer(data)
        total += len(reply)
        one.receive(reply)
        assert one.next_response(0.0) is None
    for cut in range(total):
        one, broker = connection(), Broker()
        one.start(0.0)
        seen = 0
        while data := sent(one):
            reply = broker.answer(data)
            part = reply[: max(0, cut - seen)]
            seen += len(reply)
            one.receive(part)
            assert one.next_response(0.0) is None
            if len(part) < len(reply):
                break
        assert one.phase in (Phase.NEGOTIATING, Phase.AUTHENTICATING)
        assert one.take_in_flight() == []


@pytest.mark.parametrize("at", range(3))
@pytest.mark.parametrize("junk", [b"\xff" * 40, b"\0" * 40, b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_garbage_in_a_login_is_a_protocol_error(at: int, junk: bytes) -> None:
    one, broker = connection(), Broker()
    one.start(0.0)
    for _ in range(at):
        one.receive(broker.answer(sent(one)))
        one.next_response(0.0)
    sent(one)
    one.receive(junk)
    with pytest.raises(ProtocolError):
        one.next_response(0.0)


def test_scram_refuses_fewer_iterations_than_are_safe() -> None:
    def begun() -> tuple[sasl.SaslExchange, bytes]:
        exchange = sasl.scram("SCRAM-SHA-256", "us=er,", Secret(SECRET))
        first = exchange.first()
        assert first.startswith(b"n,,n=us=3Der=2C,r=")
        return exchange, b"r=" + first.rpartition(b",r=")[2] + b"x,s=c2FsdA==,i=%d"

    exchange, challenge = begun()
    with pytest.raises(AuthenticationError, match="4096"):
        exchange.respond(challenge % 100)
    exchange, challenge = begun()
    with pytest.raises(AuthenticationError, match="at most 131072"):
        exchange.respond(challenge % 1_000_000)
    exchange, challenge = begun()
    assert exchange.respond(challenge % 4096) is not None
    with pytest.raises(AuthenticationError, match="does not know the password") as caught:
        exchange.respond(b"v=" + b"AAAA")
    assert caught.value.__context__ is None or SECRET not in repr(caught.value.__context__)


@pytest.mark.parametrize(
    "iterations", [b"i=4096,i=1", b"i= 1", b"i=+1", b"i=1_0", b"i=0000000001", b"i=4096,s=eA==", b"x=y,i=1"]
)
def test_no_spelling_of_few_iterations_gets_a_proof(iterations: bytes) -> None:
    exchange = sasl.scram("SCRAM-SHA-256", "u", Secret(SECRET))
    nonce = exchange.first().partition(b"r=")[2]
    with pytest.raises(AuthenticationError):
        exchange.respond(b"r=" + nonce + b"x,s=c2FsdA==," + iterations)


def test_scram_takes_extensions_that_need_no_response() -> None:
    exchange = sasl.scram("SCRAM-SHA-256", "u", Secret(SECRET))
    nonce = exchange.first().partition(b"r=")[2]
    assert exchange.respond(b"r=" + nonce + b"x,s=c2FsdA==,i=4096,x=y=z") is not None


def test_a_password_that_cannot_be_encoded_is_not_shown() -> None:
    exchange = sasl.plain("u", Secret(SECRET + "\udc80"))
    with pytest.raises(AuthenticationError, match="UnicodeEncodeError") as caught:
        exchange.first()
    assert caught.value.__context__ is None
    assert SECRET not in repr(caught.value)


def test_offered_mechanisms_forge_no_line_of_a_log() -> None:
    one, broker = connection(), Broker(handshake=33, mechanisms=["SCRAM\nERROR forged", "\x1b[31m"])
    one.start(0.0)
    with pytest.raises(AuthenticationError) as caught:
        talk(one, broker)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("junk", [b"", b"\xff\xfe", b"r=", b"r=x,s=!,i=4096", b"e=other-error", b"a" * 70000])
def test_scram_never_raises_anything_else(junk: bytes) -> None:
    exchange = sasl.scram("SCRAM-SHA-512", "u", Secret(SECRET))
    exchange.first()
    with pytest.raises(KafkaSinkError):
        exchange.respond(junk)


@given(st.binary(max_size=200))
@settings(max_examples=tries(200), deadline=None)
@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "OAUTHBEARER"])
def test_any_challenge_is_answered_or_refused_and_never_shows_the_secret(
    mechanism: str, challenge: bytes
) -> None:
    exchange = _exchange(mechanism)
    exchange.first()
    problem = ""
    try:
        for _ in range(3):
            if exchange.respond(challenge) is None:
                break
    except KafkaSinkError as error:
        problem = str(error)
    assert SECRET not in problem


def _exchange(mechanism: str) -> sasl.SaslExchange:
    if mechanism == "PLAIN":
        return sasl.plain("u", Secret(SECRET))
    if mechanism == "OAUTHBEARER":
        return sasl.oauthbearer(Secret(SECRET), ())
    return sasl.scram(mechanism, "u", Secret(SECRET))


@given(st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=60)), max_size=6))
@settings(max_examples=tries(200), deadline=None)
def test_any_bytes_at_any_point_of_a_login_are_errors_of_this_package(
    pieces: list[tuple[int, bytes]],
) -> None:
    one, broker = connection(sasl.scram("SCRAM-SHA-512", "u", Secret(SECRET))), Broker()
    one.start(0.0)
    problem = ""
    try:
        for responses, junk in pieces:
            for _ in range(responses):
                if data := sent(one):
                    one.receive(broker.answer(data))
                one.next_response(0.0)
            one.receive(junk)
            one.next_response(0.0)
    except KafkaSinkError as error:
        problem = str(error)
    assert SECRET not in problem


def test_no_log_shows_what_a_broker_repeats_of_a_token(caplog: pytest.LogCaptureFixture) -> None:
    """Catches: kafka-python's mechanism, which logs the broker's error at DEBUG as it is."""
    exchange = sasl.oauthbearer(Secret(SECRET), (("logicalCluster", "lkc-1"),))
    with caplog.at_level(logging.DEBUG):
        assert exchange.first() == f"n,,\1auth=Bearer {SECRET}\1logicalCluster=lkc-1\1\1".encode()
        assert exchange.respond(f'{{"status": "{SECRET}"}}'.encode()) == b"\1"
        assert exchange.respond(b"") is None
    assert caplog.text == ""


def test_a_broker_that_goes_on_with_challenges_is_left() -> None:
    one, broker = connection(sasl.oauthbearer(Secret(SECRET), ())), Broker(data=b"{}")
    one.start(0.0)
    with pytest.raises(AuthenticationError, match="more than 16 challenges"):
        talk(one, broker)


@each(apis.SASL_AUTHENTICATE)
def test_requests_are_as_kafka_python_encodes_them(version: int) -> None:
    steps: Any = (b"\0" * 300 for _ in range(1))
    versions = {apis.SASL_HANDSHAKE: (0, 1), apis.SASL_AUTHENTICATE: (0, version)}
    login = Login(sasl.SaslExchange("SCRAM-SHA-256", steps), "h:1", versions)
    assert login.begin().body == encoded(SaslHandshakeRequest, 1, mechanism="SCRAM-SHA-256")
    request = login.on_response(HandshakeResponse(0, ()))
    assert isinstance(request, LoginRequest)
    assert bytes(request.body) == encoded(SaslAuthenticateRequest, version, auth_bytes=b"\0" * 300)
