"""Names become addresses on another thread; its errors are reported."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from kafka_sink.network.transport import Lookup, start_lookup


def finished(host: str, canonical: bool = False) -> Lookup:
    """Waits for it."""
    done = threading.Event()
    lookup = start_lookup(host, 9092, canonical, done.set)
    assert lookup.done or done.wait(20)
    return lookup


@pytest.mark.parametrize(("host", "family"), [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_a_numeric_address_is_done_at_once_without_a_thread(host: str, family: int) -> None:
    before = set(threading.enumerate())
    lookup = start_lookup(host, 9092, False, lambda: None)
    assert lookup.done
    assert [(f, address[:2]) for f, address in lookup.addresses] == [(family, (host, 9092))]
    assert set(threading.enumerate()) <= before


def test_a_name_is_looked_up_elsewhere_and_told() -> None:
    lookup = finished("localhost")
    assert lookup.error is None
    assert {address[0] for _, address in lookup.addresses} <= {"127.0.0.1", "::1"}
    assert lookup.addresses


@pytest.mark.parametrize("host", ["localhost\0.evil.test", "127.0.0.1\0x"])
def test_a_name_with_a_zero_byte_is_not_another_name(host: str) -> None:
    lookup = finished(host)
    assert lookup.addresses == []
    assert "zero byte" in str(lookup.error)


def fake(monkeypatch: pytest.MonkeyPatch, response: Any) -> list[tuple[str, int]]:
    """Replaces the system's resolver; returns what it is asked."""
    asked: list[tuple[str, int]] = []

    def getaddrinfo(host: str, _port: int, *, flags: int = 0, **_: Any) -> Any:
        if flags & socket.AI_NUMERICHOST:
            raise socket.gaierror("not numeric")
        asked.append((host, flags))
        if isinstance(response, BaseException):
            raise response
        return response

    monkeypatch.setattr("kafka_sink.network.transport.socket.getaddrinfo", getaddrinfo)
    return asked


def test_all_addresses_of_a_name_are_kept_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(socket.AF_INET, 1, 6, "", (f"10.0.0.{i}", 9092)) for i in range(3)]
    fake(monkeypatch, rows)
    assert [address for _, address in finished("b").addresses] == [row[4] for row in rows]


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (socket.gaierror(-2, "Name or service not known"), "cannot resolve nowhere: .*not known"),
        (UnicodeError("label too long"), "'nowhere' is not a host name"),
        ([], "nowhere has no address"),
    ],
)
def test_failures_become_errors(monkeypatch: pytest.MonkeyPatch, problem: Any, text: str) -> None:
    fake(monkeypatch, problem)
    lookup = finished("nowhere")
    assert lookup.addresses == []
    with pytest.raises(OSError, match=text):
        raise lookup.error or AssertionError("no error")


def test_the_canonical_name_is_what_is_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = fake(monkeypatch, [(socket.AF_INET, 1, 6, "real.example", ("10.0.0.1", 9092))])
    finished("alias", canonical=True)
    assert asked == [("alias", socket.AI_CANONNAME), ("real.example", 0)]


def test_a_host_with_an_empty_label_is_an_error_and_no_crash() -> None:
    assert finished("a..b").error is not None
