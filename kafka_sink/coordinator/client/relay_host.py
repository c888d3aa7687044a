"""A process beside Spark's Python daemon in which the relays of its executor run.

It outlives the workers, which with ``spark.python.worker.reuse=false`` end with their task, and is not busy
with rows, as they are. The daemon forks it before any worker: so it shares the daemon's memory, and all
workers have inherited the one socket by which they ask it to be the relay for a coordinator. Nobody else can.

It ends with the daemon and the last worker, which hold the other end of that socket.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial

from kafka_sink.coordinator.transport.address import CoordinatorAddress, Rendezvous

_MAX_BYTES = 4096
# Relays that are being started at a time.
_MAX_BUSY = 64
# In the daemon and its workers, their end of the socket.
_asks: socket.socket | None = None


def start(become_relay: Callable[[CoordinatorAddress], object]) -> None:
    """Fork the process, in which ``become_relay`` is called on a thread for each request.

    The calling process must have no other thread. Raises OSError where the system has no such sockets.
    """
    global _asks
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # A worker does not wait for it: where it does not keep up, the worker becomes the relay.
    ours.setblocking(False)
    if os.fork():
        theirs.close()
        _asks = ours
        return
    try:
        ours.close()
        # Spark reads the daemon's output, and ends it by closing its input.
        nothing = os.open(os.devnull, os.O_RDWR)
        os.dup2(nothing, 0)
        os.dup2(nothing, 1)
        _serve(theirs, become_relay)
    finally:
        os._exit(0)


def _serve(requests: socket.socket, become_relay: Callable[[CoordinatorAddress], object]) -> None:
    # All workers ask at once, and again while the coordinator cannot be reached.
    busy: set[bytes] = set()
    while data := requests.recv(_MAX_BYTES):
        if data in busy or len(busy) >= _MAX_BUSY:
            continue
        busy.add(data)
        done = partial(busy.discard, data)
        try:
            args = become_relay, _address_in(data), done
            threading.Thread(target=_become, args=args, daemon=True).start()
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError):
            # An invalid request, or no more threads: the worker becomes the relay itself.
            done()


def _address_in(data: bytes) -> CoordinatorAddress:
    told = json.loads(data)
    secret = bytes.fromhex(told["rendezvous"].pop("secret"))
    return CoordinatorAddress(told["host"], Rendezvous(secret=secret, **told["rendezvous"]))


def _become(
    become_relay: Callable[[CoordinatorAddress], object],
    address: CoordinatorAddress,
    done: Callable[[], None],
) -> None:
    # The worker sees that there is no relay, and tries to become it itself.
    with suppress(Exception):
        become_relay(address)
    done()


def is_there() -> bool:
    """Whether this process can ask it."""
    return _asks is not None


def ask(address: CoordinatorAddress) -> None:
    """Ask it to be the relay for this coordinator, without waiting."""
    global _asks
    if _asks is None:
        return
    rendezvous = {**asdict(address.rendezvous), "secret": address.rendezvous.secret.hex()}
    try:
        _asks.send(json.dumps({"host": address.host, "rendezvous": rendezvous}).encode())
    except BlockingIOError:
        pass
    except OSError:
        # It is gone.
        _asks.close()
        _asks = None
