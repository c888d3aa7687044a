"""What the sender needs of the options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kafka_sink.options import SinkOptions


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

    @classmethod
    def from_options(cls, options: SinkOptions) -> SenderSettings:
        """Taken as they are; brokers count as unavailable only where partitioning adapts to it."""
        return cls(
            acks=options.acks,
            max_request_size=options.max_request_size,
            request_timeout_ms=options.request_timeout_ms,
            retries=options.retries,
            batch_size=options.batch_size,
            allow_auto_create_topics=options.allow_auto_create_topics,
            rebootstrap=options.metadata_recovery_strategy == "rebootstrap",
            rebootstrap_trigger_ms=options.metadata_recovery_rebootstrap_trigger_ms,
            availability_timeout_ms=(
                options.partitioner_availability_timeout_ms
                if options.partitioner_adaptive_partitioning_enable
                else 0
            ),
        )
