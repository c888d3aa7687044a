"""Where a planned write's tasks find the coordinator."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Travels in the pickled writer. ``cluster`` is the key under which the coordinator knows brokers and
    security settings; the host is the driver's, which tasks know better."""

    port: int
    cluster: str
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class CoordinatorAddress:
    """A rendezvous with the driver's host."""

    host: str
    rendezvous: Rendezvous
