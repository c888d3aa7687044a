"""Brokers that others wrote, on 127.0.0.1: what the sink does with them that no Apache Kafka shows.

kfake comes through the Go module proxy and tansu from crates.io, each with the toolchain of its language;
librdkafka's mock cluster is part of confluent-kafka.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from confluent_kafka import Producer, libversion

from local_kafka.node_config import HOST, free_port
from tests.support.waiting import retry

_KFAKE = Path(__file__).parent / "kfake"
_TANSU = "0.6.0"
_BUILD_SECONDS = 5400
_START_S = 30.0


class NotHereError(Exception):
    """The toolchain that builds this broker is not on this machine."""


@dataclass(frozen=True)
class OtherBroker:
    """``start`` builds it in a folder where that is needed, runs it, and gives its bootstrap addresses; it
    raises NotHereError. ``offers``: what ``job.py`` may ask of it."""

    name: str
    start: Callable[[Path], AbstractContextManager[str]]
    offers: tuple[str, ...] = ()


@contextmanager
def _kfake(folder: Path) -> Iterator[str]:
    binary = folder / "kfakebroker"
    _build("go", "build", "-o", str(binary), ".", cwd=_KFAKE)
    with _running(str(binary)) as stdout:
        yield stdout.readline().strip()


@contextmanager
def _tansu(folder: Path) -> Iterator[str]:
    place = ("--root", str(folder / "tansu"), "--quiet", "--debug", "--features", "dynostore")
    _build("cargo", "install", "tansu", "--version", _TANSU, *place, cwd=folder)
    port = free_port(set())
    listener = f"tcp://{HOST}:{port}"
    listen = ("--listener-url", listener, "--advertised-listener-url", listener)
    with _running(str(folder / "tansu/bin/tansu"), "broker", *listen, "--storage-engine", "memory://tansu/"):
        retry(lambda: socket.create_connection((HOST, port), 1).close(), OSError, _START_S)
        yield f"{HOST}:{port}"


@contextmanager
def _librdkafka(folder: Path) -> Iterator[str]:
    del folder
    # The mock cluster lives as long as this producer.
    owner = Producer({"test.mock.num.brokers": 3, "log_level": 0})
    brokers = owner.list_topics(timeout=_START_S).brokers.values()
    yield ",".join(f"{one.host}:{one.port}" for one in brokers)


OTHERS = (
    OtherBroker("kfake (franz-go 1.22.2)", _kfake, ("admin", "transactions")),
    OtherBroker(f"librdkafka {libversion()[0]}'s mock cluster", _librdkafka),
    OtherBroker(f"tansu {_TANSU}", _tansu, ("admin",)),
)


def _build(tool: str, *arguments: str, cwd: Path) -> None:
    if shutil.which(tool) is None:
        raise NotHereError(tool)
    done = subprocess.run(
        [tool, *arguments], cwd=cwd, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{tool} {arguments[0]} failed: {done.stderr[-1500:]}")


@contextmanager
def _running(*command: str) -> Iterator[IO[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
        process.stdout.close()
