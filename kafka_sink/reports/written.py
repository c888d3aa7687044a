"""What a write returns to the program that called it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kafka_sink.counts import total
from kafka_sink.model import TaskResult, TopicPartition
from kafka_sink.options import SinkOptions
from kafka_sink.reports.delivery_report import partitions_of


@dataclass(frozen=True, slots=True)
class Written:
    """``rows`` are acknowledged, ``unconfirmed`` were sent with acks=0, and ``skipped`` can never be written
    (errors.tolerance=all), by reason in ``skip_reasons``.

    ``already_written``: an earlier run had written this ``txnVersion``, so this one wrote nothing.
    ``dead_letters``: of the skipped rows, in the topic for them.
    ``partitions``: as in the delivery report, one entry for each topic and partition with its ``offsets``.
    """

    rows: int = 0
    unconfirmed: int = 0
    skipped: int = 0
    skip_reasons: Mapping[str, int] = field(default_factory=dict)
    already_written: bool = False
    partitions: Sequence[Mapping[str, Any]] = ()
    dead_letters: int = 0

    @classmethod
    def of(
        cls, results: Sequence[TaskResult], options: SinkOptions, *, already_written: bool = False
    ) -> Written:
        """``results``: of the tasks whose rows count."""
        counts, reasons = total(results), Counter[str]()
        for result in results:
            reasons.update(result.skip_reasons)
        return cls(
            counts.records,
            counts.unconfirmed,
            counts.skipped,
            dict(reasons),
            already_written,
            partitions_of(results),
            # A write ends when each has its letter.
            counts.skipped if options.errors_deadletterqueue_topic_name else 0,
        )

    @property
    def offsets(self) -> dict[TopicPartition, tuple[tuple[int, int], ...]]:
        """Inclusive ranges by partition, those of dead letters included."""
        return {
            TopicPartition(one["topic"], one["partition"]): tuple(
                (first, last) for first, last in one["offsets"]
            )
            for one in self.partitions
        }
