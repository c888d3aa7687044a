"""Texts of a broker cost a line of a log and forge none; what no address can be is refused."""

from __future__ import annotations

import traceback
import uuid
from typing import Any

import pytest
from kafka.protocol.admin.topics import CreateTopicsResponse
from kafka.protocol.metadata import FindCoordinatorResponse, MetadataResponse
from kafka.protocol.producer import ProduceResponse
from kafka.protocol.sasl import SaslAuthenticateResponse, SaslHandshakeResponse

from kafka_sink.errors import AuthenticationError, ProtocolError
from kafka_sink.network import admin_requests, authentication, produce, requests, transaction_requests
from kafka_sink.network.wire import address_of
from kafka_sink.printable import MAX_CHARACTERS
from tests.support.fake_state import framed
from tests.support.login_broker import plain

FORGED = "x\n26/11/22 12:00:00 ERROR forged\x1b[2J\u202e" + "y" * 30_000


def is_safe(text: str | None) -> bool:
    return text is not None and text.isprintable() and 0 < len(text) <= MAX_CHARACTERS


def produced(message: str | None = None, errors: Any = ()) -> produce.ProducePartitionResponse:
    # Number, error code, base offset, times, record errors.
    row = (0, 2, -1, -1, -1, list(errors), message)
    response = ProduceResponse(version=9, responses=[("t", [row])], throttle_time_ms=0)
    return produce.decode_produce(9, framed(response, 9)[4:]).partitions[0]


def metadata(**fields: Any) -> bytes:
    given = {"brokers": [], "topics": [], "cluster_id": "c", **fields}
    return framed(MetadataResponse(version=9, **given), 9)[4:]


def test_explanations_of_every_response_are_bounded_and_printable() -> None:
    """Catches: a message of 1 MB in a produce response gave an exception of a million characters."""
    assert is_safe(produced(FORGED).error_message)
    assert is_safe(produced(errors=[(0, FORGED)]).record_errors.reason)
    created = CreateTopicsResponse(version=4, topics=[("t", 38, FORGED)], throttle_time_ms=0)
    assert is_safe(admin_requests.decode_create_topic(4, framed(created, 4)[4:]).error_message)
    found = FindCoordinatorResponse(
        version=4, throttle_time_ms=0, coordinators=[("k", -1, "", -1, 15, FORGED)]
    )
    seen = transaction_requests.decode_find_coordinator(4, framed(found, 4)[4:])
    assert is_safe(seen.found["k"].error_message)
    login = SaslAuthenticateResponse(version=1, error_code=58, error_message=FORGED, auth_bytes=b"")
    assert is_safe(authentication.decode_authenticate(1, framed(login, 1)[4:]).error_message)
    assert is_safe(requests.decode_metadata(9, metadata(cluster_id=FORGED)).update.cluster_id)


def test_mechanisms_on_offer_are_cut() -> None:
    offer = SaslHandshakeResponse(version=1, error_code=33, mechanisms=["A\nB"] * 500)
    response = authentication.decode_handshake(1, framed(offer, 1)[4:])
    login = authentication.Login(plain(), "broker", {17: (0, 1), 36: (0, 2)})
    login.begin()
    with pytest.raises(AuthenticationError) as caught:
        login.on_response(response)
    assert is_safe(str(caught.value).partition(" but ")[2].partition(": set")[0])


def test_invalid_host_is_refused_and_forges_no_log_line() -> None:
    """Catches: a host name from Metadata with a newline in it, which forged a line of the log."""
    for host in ("", "a\nb", "a b", "x" * 256, "h/path", "u@h", "h;rm", "\x1b[2J", "a\u202eb"):
        with pytest.raises(ProtocolError, match="broker 1 has the address") as caught:
            requests.decode_metadata(9, metadata(brokers=[(1, host, 9092, None)]))
        assert is_safe(str(caught.value))
    for host in ("broker-1.example.org", "under_score", "10.0.0.1", "fe80::1%eth0", "büro.de"):
        assert address_of(1, host, 9092).host == host
    for port in (-1, 0, 65_536):
        with pytest.raises(ProtocolError):
            address_of(1, "h", port)


def test_an_id_of_a_bootstrap_address_is_refused() -> None:
    """Catches: a broker with id -1 took the place of the first bootstrap address, whose connection nobody
    timed out any more."""
    with pytest.raises(ProtocolError, match="the id -1"):
        requests.decode_metadata(9, metadata(brokers=[(-1, "h", 9092, None)]))


def test_bytes_that_are_no_text_are_not_quoted() -> None:
    """Catches: the repr of a UnicodeDecodeError, which holds the whole text: 80 million characters."""
    topic = MetadataResponse.MetadataResponseTopic(
        error_code=3, name="N" * 20_000, topic_id=uuid.UUID(int=7), partitions=[]
    )
    with pytest.raises(ProtocolError) as caught:
        requests.decode_metadata(9, metadata(topics=[topic]).replace(b"N" * 20_000, b"\xff" * 20_000))
    assert "can't decode" in str(caught.value)
    assert is_safe(str(caught.value))
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert len("".join(traceback.format_exception(caught.value))) < 10_000
