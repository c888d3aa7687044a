"""What happens in a round, drawn from a seed: faults of brokers and of the wire, and the producers' settings.

Pure: the same seed gives the same plan. What the faults hit still depends on the machine's timing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random

BROKERS = 3


class Fault(Enum):
    """A fault of a broker's process or of the proxy before it."""

    KILL = "kill -9, restart"
    FREEZE_KILL = "freeze, kill -9, restart"
    FREEZE = "freeze, thaw"
    STOP = "controlled stop, restart"
    CUT = "reset connections"
    CUT_REQUEST = "reset in mid-request"
    CUT_RESPONSE = "reset in mid-response"
    SWALLOW = "deliver, swallow the response"
    DELAY = "delay every piece"
    TRICKLE = "trickle"
    STALL = "forward nothing"
    LOSE = "hold requests, then reset connections"
    REFUSE = "refuse connections"


BROKER_FAULTS = (Fault.KILL, Fault.FREEZE_KILL, Fault.FREEZE, Fault.STOP)
WIRE_FAULTS = tuple(fault for fault in Fault if fault not in BROKER_FAULTS)


@dataclass(frozen=True)
class Event:
    """``after_ms`` the event before has ended, ``fault`` strikes ``broker`` and lasts for ``lasts_ms``.

    ``amount``: bytes until the cut, responses to swallow, milliseconds of delay, bytes a trickle lets through
    every 5 ms; else 0.
    """

    after_ms: float
    fault: Fault
    broker: int
    lasts_ms: float = 0.0
    amount: int = 0


@dataclass(frozen=True)
class Worker:
    """One producer's task: ``units`` batches of ``unit_rows`` rows, ``pause_ms`` apart, and its options."""

    units: int
    unit_rows: int
    pause_ms: float
    options: tuple[tuple[str, object], ...]


@dataclass(frozen=True)
class Schedule:
    """One round. Both tracks run at once; within a track events follow one another."""

    seed: int
    partitions: int
    brokers: tuple[Event, ...]
    wire: tuple[Event, ...]
    workers: tuple[Worker, ...]
    # Whether delivery.timeout.ms is shorter than some faults, so that attempts may fail.
    strict: bool


def draw(seed: int, broker_fault: Fault | None = None, *, wire: int = 6) -> Schedule:
    """The plan of a round with one fault of a broker (no fault if None) and ``wire`` faults of the wire."""
    random = Random(seed)
    strict = random.random() < 0.25
    return Schedule(
        seed,
        partitions=random.choice((1, 3, 6, 12)),
        brokers=() if broker_fault is None else (_broker_event(random, broker_fault),),
        wire=tuple(_wire_event(random) for _ in range(wire)),
        workers=tuple(_worker(random, number, strict) for number in range(3)),
        strict=strict,
    )


def fault_of_round(number: int) -> Fault | None:
    """Rounds take turns: one with a fault of a broker, one with faults of the wire only."""
    return None if number % 2 else BROKER_FAULTS[number // 2 % len(BROKER_FAULTS)]


def _broker_event(random: Random, fault: Fault) -> Event:
    # Frozen for longer than the session, a broker loses its leaders while it believes that it has them.
    lasts = random.choice((300, 1500, 5000)) if fault is Fault.FREEZE else random.uniform(0, 1500)
    return Event(random.uniform(300, 1200), fault, random.randrange(BROKERS), lasts)


def _wire_event(random: Random) -> Event:
    fault = random.choice(WIRE_FAULTS)
    lasts, amount = 0.0, 0
    if fault in (Fault.CUT_REQUEST, Fault.CUT_RESPONSE):
        amount = random.choice((1, 3, 11, 60, 500, 7_000))
    elif fault is Fault.SWALLOW:
        amount = random.randint(1, 4)
    elif fault is Fault.DELAY:
        lasts, amount = random.uniform(200, 800), random.choice((5, 50, 300))
    elif fault is Fault.TRICKLE:
        lasts, amount = random.uniform(200, 600), random.choice((1, 30, 400))
    elif fault is Fault.LOSE:
        lasts = random.uniform(50, 700)
    elif fault is Fault.STALL:
        # The longer one is past request.timeout.ms.
        lasts = random.choice((200, 700, 2600))
    elif fault is Fault.REFUSE:
        lasts = random.uniform(100, 1500)
    return Event(random.uniform(50, 500), fault, random.randrange(BROKERS), lasts, amount)


def _worker(random: Random, number: int, strict: bool) -> Worker:
    options: dict[str, object] = {
        "client.id": f"chaos-{number}",
        "acks": "all",
        "compression.type": random.choice(("none", "lz4", "zstd", "snappy", "gzip")),
        "linger.ms": random.choice((0, 5, 50)),
        "batch.size": random.choice((2_000, 16_384, 524_288)),
        "max.in.flight.requests.per.connection": random.choice((1, 2, 5, 5)),
        "buffer.memory": random.choice((262_144, 67_108_864)),
        "buffer.memory.allocation.strategy": random.choice(("incremental", "incremental", "full")),
        "request.timeout.ms": 1_500 if strict else 2_000,
        "delivery.timeout.ms": 2_500 if strict else 90_000,
        "max.block.ms": 60_000,
        **BACKOFFS,
    }
    if options["buffer.memory"] == 262_144:
        options["batch.size"] = min(16_384, int(str(options["batch.size"])))
    return Worker(
        units=random.randint(3, 40),
        unit_rows=random.choice((1, 40, 300)),
        pause_ms=random.choice((0, 10, 25)),
        options=tuple(options.items()),
    )


# Short, so that a round of some seconds has many attempts; the last is for brokers that accept in silence.
BACKOFFS: dict[str, object] = {
    "retry.backoff.ms": 20,
    "retry.backoff.max.ms": 200,
    "reconnect.backoff.ms": 20,
    "reconnect.backoff.max.ms": 200,
    "socket.connection.setup.timeout.ms": 1_500,
    "socket.connection.setup.timeout.max.ms": 3_000,
}


def described(events: Sequence[Event]) -> str:
    """For the log: what strikes whom."""
    return ", ".join(f"{event.fault.name.lower()}@{event.broker}" for event in events)
