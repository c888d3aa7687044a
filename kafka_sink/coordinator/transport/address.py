"""Where a planned write's tasks find the coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field

# All interfaces, of IPv4 and of IPv6.
ANY_ADDRESSES = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound to


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Travels in the pickled writer. ``cluster`` is the key under which the coordinator knows brokers and
    security settings. ``host`` is empty where tasks connect to ``spark.driver.host``, which tasks know and
    planning does not; it is set where the coordinator listens on a loopback address only."""

    port: int
    cluster: str
    secret: bytes = field(repr=False)
    host: str = ""
    # Whether tasks report what they do, for the live view.
    figures: bool = False


@dataclass(frozen=True, slots=True)
class CoordinatorAddress:
    """A rendezvous with the driver's host, a name or an address without brackets."""

    host: str
    rendezvous: Rendezvous


def without_brackets(host: str) -> str:
    """Spark writes IPv6 addresses as ``[::1]``; sockets take ``::1``."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host
