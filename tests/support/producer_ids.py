"""Producer ids of a real cluster whose controller is about to freeze."""

from __future__ import annotations

import socket
import struct

from kafka_sink.network import apis, requests
from tests.support.waiting import until


def ask_for_producer_id(address: str) -> None:
    """Returns once this broker has given one.

    A broker gets producer ids from the controller, a thousand at a time. One that has none yet and whose
    controller is frozen gives none before the next controller is elected.
    """
    host, _, port = address.rpartition(":")
    header = requests.encode_header(apis.INIT_PRODUCER_ID, 1, 1, "test")
    request = header + requests.encode_init_producer_id(1, -1, -1)
    with socket.create_connection((host, int(port)), 10) as connection:
        connection.settimeout(10)

        def is_given() -> bool:
            connection.sendall(struct.pack(">i", len(request)) + request)
            with connection.makefile("rb") as responses:
                (size,) = struct.unpack(">i", responses.read(4))
                # Correlation id and throttle time come before the error code.
                return struct.unpack_from(">h", responses.read(size), 8) == (0,)

        until(is_given, "a producer id", poll_s=0.05)
