"""Finds the web UI of Spark's driver among the ports that its process listens on. Linux only."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress

from kafka_sink.coordinator.wire.driver_process import DriverProcess

_DEFAULT_PORT = 4040
# Spark tries the next ports where one is taken: spark.port.maxRetries.
_TRIED_PORTS = 17
_LISTENING = "0A"
_PORT = re.compile(r"spark\.ui\.port=(\d+)")


def find_ui(driver: DriverProcess) -> tuple[str, int] | None:
    """The UI's address and port. None if the driver has no UI, or one at a random port.

    No other port of the driver is tried: Spark logs an error for HTTP at its other ports.
    """
    arguments = driver.arguments()
    if any("spark.ui.enabled=false" in one for one in arguments):
        return None
    first = first_port(arguments)
    found = [one for one in _listening(driver.pid) if first and first <= one[1] < first + _TRIED_PORTS]
    return min(found, key=lambda one: one[1], default=None)


def first_port(arguments: Iterable[str]) -> int:
    """The port that Spark tries first, by the JVM's command line."""
    given = [match.group(1) for match in map(_PORT.search, arguments) if match]
    return int(given[-1]) if given else _DEFAULT_PORT


def _listening(pid: int) -> Iterator[tuple[str, int]]:
    inodes = set()
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                inodes.add(os.readlink(entry.path))
    for table in ("tcp", "tcp6"):
        with suppress(OSError), open(f"/proc/{pid}/net/{table}", encoding="ascii") as file:
            for fields in map(str.split, file):
                if len(fields) > 9 and fields[3] == _LISTENING and f"socket:[{fields[9]}]" in inodes:
                    yield listening_address(fields[1])


def listening_address(text: str) -> tuple[str, int]:
    """An address and port of /proc/net/tcp or tcp6; the loopback address for all interfaces."""
    packed, _, port = text.partition(":")
    # The kernel writes words of 32 bits in the byte order of the host, which is little-endian wherever
    # PyArrow runs.
    words = [packed[at : at + 8] for at in range(0, len(packed), 8)]
    address = ipaddress.ip_address(b"".join(bytes.fromhex(word)[::-1] for word in words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    if mapped is not None:
        address = mapped
    if address.is_unspecified:
        # A socket for all IPv6 interfaces takes IPv4, too, unless IPv4 is switched off.
        return "localhost", int(port, 16)
    return str(address), int(port, 16)
