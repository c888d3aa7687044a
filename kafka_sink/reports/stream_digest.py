"""What the log says of a query's micro-batches: a line for the first, one for each with trouble, and a digest
a minute for the others.

Each commit is a process of its own, so the sums since the last digest are a note in the application's folder.
Writes in ``foreachBatch`` count as micro-batches, too.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from kafka_sink import application_markers
from kafka_sink.counts import total
from kafka_sink.reports.summary import size

if TYPE_CHECKING:
    from kafka_sink.reports.write_reports import EndedWrite

_INTERVAL_S = 60.0


@dataclass(slots=True)
class _Sums:
    """Since the last line: of micro-batches that no line was about. Times are of the wall clock."""

    since_s: float
    writes: int = 0
    first: int | None = None
    rows: int = 0
    sent_bytes: int = 0
    slowest_ms: float = 0.0

    def add(self, ended: EndedWrite) -> None:
        counts = total(ended.results)
        self.writes += 1
        self.first = ended.batch if self.first is None else self.first
        self.rows += counts.records + counts.unconfirmed
        self.sent_bytes += counts.sent_bytes
        slowest = max((result.elapsed_ms for result in ended.results), default=0.0)
        self.slowest_ms = max(self.slowest_ms, slowest)

    def line(self, ended: EndedWrite, now_s: float) -> str:
        which = "" if ended.batch is None else f", micro-batches {self.first} to {ended.batch}"
        return (
            f"kafka-chunked{which}: {self.writes:,} writes in {now_s - self.since_s:,.0f} s, "
            f"{self.rows:,} rows in {size(self.sent_bytes)}; the slowest task took "
            f"{self.slowest_ms / 1000:.2f} s"
        )


def is_due(ended: EndedWrite, now_s: float) -> tuple[bool, str]:
    """Whether the committed write has a line of its own, and a digest of those before it or "".

    Every write has a line of its own outside of queries, or where nothing is kept.
    """
    if not ended.query or not application_markers.folder():
        return True, ""
    key = f"digest of {ended.query}"
    sums = _noted(key)
    if sums is None:
        application_markers.note(key, json.dumps(asdict(_Sums(now_s))))
        return True, ""
    own = has_trouble(ended)
    if not own:
        sums.add(ended)
    digest = ""
    # A clock that was set back begins a new minute.
    if sums.writes and not 0 <= now_s - sums.since_s < _INTERVAL_S:
        digest, sums = sums.line(ended, now_s), _Sums(now_s)
    application_markers.note(key, json.dumps(asdict(sums)))
    return own, digest


def has_trouble(ended: EndedWrite) -> bool:
    """Whether somebody may want to look at this write: rows were skipped, sends repeated, or transactions
    other than its own ended with it."""
    counts = total(ended.results)
    others = sum(one.count for name, one in ended.transactions.items() if name != "committed")
    return bool(counts.skipped or counts.retries or counts.breaker_trips or others)


def _noted(key: str) -> _Sums | None:
    with suppress(ValueError, TypeError):
        return _Sums(**json.loads(application_markers.noted_within(key, math.inf) or "null"))
    return None
