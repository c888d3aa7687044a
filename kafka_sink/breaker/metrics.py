"""The breaker's metrics of one producer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BreakerMetrics:
    """``muted-partitions``, ``breaker-trips-total`` and ``breaker-probes-total`` of one producer."""

    muted_partitions: int = 0
    breaker_trips_total: int = 0
    probes: int = 0

    def since(self, before: BreakerMetrics) -> BreakerMetrics:
        """The same, with totals counted from ``before`` on."""
        trips = self.breaker_trips_total - before.breaker_trips_total
        return BreakerMetrics(self.muted_partitions, trips, self.probes - before.probes)

    def by_name(self) -> dict[str, float]:
        """By the names of docs/metrics.md."""
        return {
            "muted-partitions": self.muted_partitions,
            "breaker-trips-total": self.breaker_trips_total,
            "breaker-probes-total": self.probes,
        }
