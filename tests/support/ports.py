"""Ports that no other process takes between two uses: other tests run at the same time."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from local_kafka import node_config

HOST = "127.0.0.1"


class HeldPort:
    """A port of 127.0.0.1 that stays this process's until ``close``. It refuses connections until ``listen``.

    A socket that is bound and does not listen holds it. With SO_REUSEADDR a second one may be bound, as long
    as none listens.
    """

    def __init__(self) -> None:
        self._spare = _bound(0)
        self.number: int = self._spare.getsockname()[1]

    def listen(self) -> socket.socket:
        """A listening socket. The last one must be closed before the next one is made."""
        listener, self._spare = self._spare, _bound(self.number)
        listener.listen(128)
        return listener

    def close(self) -> None:
        self._spare.close()


def _bound(port: int) -> socket.socket:
    made = socket.socket()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((HOST, port))
    return made


@contextmanager
def refusing_port() -> Iterator[int]:
    held = HeldPort()
    try:
        yield held.number
    finally:
        held.close()


@contextmanager
def silent_port() -> Iterator[int]:
    """A port that drops the packets of a connection, because its backlog is full."""
    with _bound(0) as held, socket.socket() as first, socket.socket() as second:
        held.listen(0)
        for taken in (first, second):
            taken.setblocking(False)
            taken.connect_ex(held.getsockname())
        yield held.getsockname()[1]


def free_port() -> int:
    """A port for a process that will bind it: outside the range used for connections and for port 0."""
    return node_config.free_port(set())


def resolve_many(monkeypatch: pytest.MonkeyPatch, *ports: int) -> None:
    """Give the host many.example several addresses, which all are this host, with a port for each."""

    def getaddrinfo(host: str, *_: Any, flags: int = 0, **__: Any) -> list[Any]:
        if host == "many.example" and not flags:
            return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", port)) for port in ports]
        raise OSError("a name")

    monkeypatch.setattr("kafka_sink.network.transport.socket.getaddrinfo", getaddrinfo)
