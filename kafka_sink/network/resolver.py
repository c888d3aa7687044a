"""Host names to addresses, off the sender's thread.

``getaddrinfo`` blocks for as long as the system's resolver takes: 5 to 40 s without a name server, and all
partitions would wait for one broker's name. So each look-up has its own thread. It is a daemon, so one that
hangs ends with the process; its connection starts no second look-up meanwhile.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from kafka_sink.network.transport import SocketAddress


class Lookup:
    """A running look-up. ``done`` is set last, after ``addresses`` or ``error``."""

    def __init__(self) -> None:
        self.done = False
        self.addresses: list[SocketAddress] = []
        self.error: OSError | None = None


def start_lookup(host: str, port: int, canonical: bool, notify: Callable[[], None]) -> Lookup:
    """Start to resolve a name; another thread calls ``notify`` at the end.

    The look-up of a numeric address is done on return. ``canonical`` resolves the host's canonical name
    instead (client.dns.lookup=resolve_canonical_bootstrap_servers_only).
    """
    lookup = Lookup()
    try:
        lookup.addresses = _resolve(host, port, socket.AI_NUMERICHOST)
        lookup.done = True
        return lookup
    except OSError:
        pass  # a name
    arguments = (lookup, host, port, canonical, notify)
    threading.Thread(target=_run, args=arguments, name=f"kafka-chunked-dns-{host}", daemon=True).start()
    return lookup


def _run(lookup: Lookup, host: str, port: int, canonical: bool, notify: Callable[[], None]) -> None:
    try:
        found = _resolve(_canonical_name(host, port) if canonical else host, port, 0)
        lookup.addresses = found
        if not found:
            lookup.error = OSError(f"{host} has no address")
    except OSError as error:
        lookup.error = OSError(f"cannot resolve {host}: {error}")
    except UnicodeError as error:  # a label that is empty or longer than 63 characters
        lookup.error = OSError(f"{host!r} is not a host name: {error}")
    finally:
        lookup.done = True
        notify()


def _resolve(host: str, port: int, flags: int) -> list[SocketAddress]:
    if "\0" in host:
        # Python passes on what comes before it: another host than the one that was named.
        raise OSError(f"{host!r} holds a zero byte")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except UnicodeError:
        if flags:  # no number, whatever else it is
            raise OSError("not numeric") from None
        raise
    return [(family, address) for family, _, _, _, address in found]


def _canonical_name(host: str, port: int) -> str:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_CANONNAME)
    return next((name for _, _, _, name, _ in found if name), host)
