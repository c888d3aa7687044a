"""What the sender needs of the options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kafka_sink.metadata.metadata_requests import MetadataRequestSettings

if TYPE_CHECKING:
    from kafka_sink.options import SinkOptions


@dataclass(frozen=True, slots=True)
class SenderSettings:
    """The options of the same names; times in milliseconds, sizes in bytes.

    ``availability_timeout_ms`` is 0 where partitioning does not adapt to slow brokers.
    """

    acks: int
    max_request_size: int
    request_timeout_ms: float
    retries: int
    retry_backoff_ms: float
    retry_backoff_max_ms: float
    batch_size: int
    metadata: MetadataRequestSettings
    availability_timeout_ms: float = 0.0

    @classmethod
    def from_options(cls, options: SinkOptions) -> SenderSettings:
        """As the user set them."""
        return cls(
            acks=options.acks,
            max_request_size=options.max_request_size,
            request_timeout_ms=options.request_timeout_ms,
            retries=options.retries,
            retry_backoff_ms=options.retry_backoff_ms,
            retry_backoff_max_ms=options.retry_backoff_max_ms,
            batch_size=options.batch_size,
            metadata=MetadataRequestSettings.from_options(options),
            availability_timeout_ms=(
                options.partitioner_availability_timeout_ms
                if options.partitioner_adaptive_partitioning_enable
                else 0
            ),
        )
