"""What the sender needs of the options."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SenderSettings:
    """The options of the same names; times in milliseconds, sizes in bytes.

    ``rebootstrap`` is whether metadata.recovery.strategy says so.
    """

    acks: int
    max_request_size: int
    request_timeout_ms: float
    retries: int
    batch_size: int
    allow_auto_create_topics: bool
    rebootstrap: bool = True
    rebootstrap_trigger_ms: float = 300_000.0
    availability_timeout_ms: float = 0.0
    transactional_id: str | None = None
