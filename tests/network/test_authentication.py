"""The login in the connection's state machine: whole, byte by byte, refused, repeated, and cut."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kafka.protocol.sasl import SaslAuthenticateRequest, SaslHandshakeRequest

from kafka_sink.errors import AuthenticationError, KafkaSinkError, ProtocolError
from kafka_sink.network import apis
from kafka_sink.network.authentication import HandshakeResponse, Login, LoginRequest
from kafka_sink.network.broker_protocol import BrokerProtocol, ConnectionState
from kafka_sink.network.wire import Buffer
from kafka_sink.secret import Secret
from kafka_sink.security import sasl
from kafka_sink.security.sasl import SaslExchange
from tests.support.effort import tries
from tests.support.login_broker import SECRET, Broker, plain
from tests.support.network_harness import metadata_request
from tests.support.schema_requests import same


def started(exchange: SaslExchange | None = None, **broker: Any) -> tuple[BrokerProtocol, Broker]:
    """A connection that has asked for the broker's versions, and the broker."""
    one = BrokerProtocol("me", "host:1", 1000.0, exchange or plain())
    one.start(0.0)
    return one, Broker(**broker)


def bearer(*extensions: tuple[str, str]) -> SaslExchange:
    return SaslExchange("OAUTHBEARER", sasl.oauthbearer(Secret(SECRET), extensions))


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
    one, broker = started()
    with pytest.raises(ValueError, match="not ready"):
        one.submit(metadata_request("t"), 0.0)
    talk(one, broker, piece=piece)
    assert one.phase is ConnectionState.READY
    assert broker.asked == [18, 17, 36]
    assert f"\0user\0{SECRET}".encode() in broker.said[0]
    one.submit(metadata_request("t"), 0.0)
    assert len(talk(one, broker, piece=piece)) == 1


@pytest.mark.parametrize(
    ("refusals", "problem"),
    [
        ({"handshake": 33}, "it does not offer PLAIN but PLAIN, GSSAPI"),
        ({"handshake": 34}, "its listener does not support a login"),
        ({"handshake": 77}, "error 77"),
        ({"authenticate": 58}, r"refuses the credentials for SASL PLAIN \(.*failed: wrong \[31m\)"),
        ({"authenticate": 13}, "error 13"),
        ({"data": b"?"}, "is invalid for this mechanism"),
        ({"ranges": {17: (0, 0)}}, "does not offer SASL"),
        ({"ranges": {36: (5, 9)}}, "does not offer SASL"),
        ({"handshake": 33, "mechanisms": ["SCRAM\nERROR forged", "\x1b[31m"]}, "does not offer PLAIN but"),
    ],
)  # fmt: skip
def test_each_refusal_says_what_to_change_and_no_request_follows(
    refusals: dict[str, Any], problem: str
) -> None:
    one, broker = started(**refusals)
    with pytest.raises(AuthenticationError, match=problem) as caught:
        talk(one, broker)
    assert "host:1" in str(caught.value)
    assert str(caught.value).isprintable()
    assert one.phase is not ConnectionState.READY
    assert one.take_in_flight() == []
    assert SECRET not in repr(vars(one)) + str(caught.value)


def test_a_new_login_goes_behind_what_is_in_flight_and_requests_wait_for_it() -> None:
    one, broker = started(session_ms=60_000)
    talk(one, broker)
    assert one.session_ms == 60_000
    one.submit(metadata_request("t"), 1.0)
    one.log_in_again(plain("second"), 1.0)
    assert one.phase is ConnectionState.REAUTHENTICATING
    with pytest.raises(ValueError, match="not ready"):
        one.submit(metadata_request("t"), 1.0)
    with pytest.raises(ValueError, match="not ready for another login"):
        one.log_in_again(plain("third"), 1.0)
    assert len(talk(one, broker, piece=1)) == 1
    assert broker.asked == [18, 17, 36, 3, 17, 36]
    assert one.phase.value == "ready"
    # Lost in a third one, it reports the requests of others only.
    mine = metadata_request("t")
    one.submit(mine, 1.0)
    one.log_in_again(plain("third"), 1.0)
    sent(one)
    assert one.take_in_flight() == [(mine, True)]


def test_cut_at_every_byte_a_login_is_neither_over_nor_reported() -> None:
    def login_until(cut: int) -> tuple[BrokerProtocol, int]:
        """The connection, and how many bytes the broker had to send."""
        one, broker = started()
        seen = 0
        while seen < cut and (data := sent(one)):
            reply = broker.answer(data)
            one.receive(reply[: cut - seen])
            seen += len(reply)
            assert one.next_response(0.0) is None
        return one, seen

    whole, total = login_until(1 << 20)
    assert whole.phase is ConnectionState.READY
    for cut in range(total):
        one, _ = login_until(cut)
        assert one.phase in (ConnectionState.NEGOTIATING, ConnectionState.AUTHENTICATING)
        assert one.take_in_flight() == []


def test_garbage_in_a_login_is_a_protocol_error() -> None:
    for at, junk in itertools.product(
        range(3), (b"\xff" * 40, b"\0" * 40, b"HTTP/1.1 400 Bad Request\r\n\r\n")
    ):
        one, broker = started()
        for _ in range(at):
            one.receive(broker.answer(sent(one)))
            one.next_response(0.0)
        sent(one)
        one.receive(junk)
        with pytest.raises(ProtocolError):
            one.next_response(0.0)


def scram_begun(mechanism: str = "SCRAM-SHA-256") -> tuple[SaslExchange, bytes]:
    """An exchange that has sent its first message, and a challenge but for its iterations."""
    exchange = SaslExchange(mechanism, sasl.scram(mechanism, "us=er,", Secret(SECRET)))
    first = exchange.first()
    assert first.startswith(b"n,,n=us=3Der=2C,r=")
    return exchange, b"r=" + first.rpartition(b",r=")[2] + b"x,s=c2FsdA==,"


def test_scram_refuses_fewer_iterations_than_are_safe_however_they_are_spelt() -> None:
    few = (b"4096,i=1", b" 1", b"+1", b"1_0", b"0000000001", b"4096,s=eA==")
    refused = {b"i=100": "4096", b"i=1000000": "maximum of 131072", b"x=y,i=1": "SASL"}
    for spelt, problem in {**refused, **{b"i=" + one: "SASL" for one in few}}.items():
        exchange, challenge = scram_begun()
        with pytest.raises(AuthenticationError, match=problem):
            exchange.respond(challenge + spelt)
    # Extensions that need no response are taken.
    for taken in (b"i=4096", b"i=4096,x=y=z"):
        exchange, challenge = scram_begun()
        assert exchange.respond(challenge + taken) is not None
    with pytest.raises(AuthenticationError, match="does not know the password") as caught:
        exchange.respond(b"v=" + b"AAAA")
    assert caught.value.__context__ is None or SECRET not in repr(caught.value.__context__)


def test_a_password_that_cannot_be_encoded_is_not_shown() -> None:
    exchange = plain(SECRET + "\udc80")
    with pytest.raises(AuthenticationError, match="UnicodeEncodeError") as caught:
        exchange.first()
    assert caught.value.__context__ is None
    assert SECRET not in repr(caught.value)


def test_scram_never_raises_anything_else() -> None:
    for junk in (b"", b"\xff\xfe", b"r=", b"r=x,s=!,i=4096", b"e=other-error", b"a" * 70000):
        exchange, _ = scram_begun("SCRAM-SHA-512")
        with pytest.raises(KafkaSinkError):
            exchange.respond(junk)


EXCHANGES: dict[str, Callable[[], SaslExchange]] = {
    "PLAIN": plain,
    "OAUTHBEARER": bearer,
    "SCRAM-SHA-256": lambda: scram_begun()[0],
}


@given(st.binary(max_size=200))
@settings(max_examples=tries(200), deadline=None)
@pytest.mark.parametrize("mechanism", EXCHANGES)
def test_any_challenge_is_answered_or_refused_and_never_shows_the_secret(
    mechanism: str, challenge: bytes
) -> None:
    exchange = EXCHANGES[mechanism]()
    if mechanism != "SCRAM-SHA-256":
        exchange.first()
    problem = ""
    try:
        for _ in range(3):
            if exchange.respond(challenge) is None:
                break
    except KafkaSinkError as error:
        problem = str(error)
    assert SECRET not in problem


@given(st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=60)), max_size=6))
@settings(max_examples=tries(200), deadline=None)
def test_any_bytes_at_any_point_of_a_login_are_errors_of_this_package(
    pieces: list[tuple[int, bytes]],
) -> None:
    one, broker = started(SaslExchange("SCRAM-SHA-512", sasl.scram("SCRAM-SHA-512", "u", Secret(SECRET))))
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
    exchange = bearer(("logicalCluster", "lkc-1"))
    with caplog.at_level(logging.DEBUG):
        assert exchange.first() == f"n,,\1auth=Bearer {SECRET}\1logicalCluster=lkc-1\1\1".encode()
        assert exchange.respond(f'{{"status": "{SECRET}"}}'.encode()) == b"\1"
        assert exchange.respond(b"") is None
    assert caplog.text == ""


def test_a_broker_that_goes_on_with_challenges_is_left() -> None:
    with pytest.raises(AuthenticationError, match="more than 16 challenges"):
        talk(*started(bearer(), data=b"{}"))


def test_requests_are_as_kafka_python_encodes_them() -> None:
    def begun(version: int) -> tuple[Login, LoginRequest]:
        steps: Any = (b"\0" * 300 for _ in range(1))
        versions = {apis.SASL_HANDSHAKE: (0, 1), apis.SASL_AUTHENTICATE: (0, version)}
        login = Login(SaslExchange("SCRAM-SHA-256", steps), "h:1", versions)
        return login, login.begin()

    def authenticate(version: int) -> Buffer:
        request = begun(version)[0].on_response(HandshakeResponse(0, ()))
        assert request is not None
        return request[2]

    same(apis.SASL_HANDSHAKE, lambda _: begun(0)[1][2], SaslHandshakeRequest, mechanism="SCRAM-SHA-256")
    same(apis.SASL_AUTHENTICATE, authenticate, SaslAuthenticateRequest, auth_bytes=b"\0" * 300)
