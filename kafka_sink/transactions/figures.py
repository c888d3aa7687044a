"""How many transactions a write has open, committed, aborted and recovered: plain counts for reports.

Three sources count, each for itself and from its own start: planning (``PlannedTransactions.figures``), a
task attempt (``TaskAttempt.figures``), and the commit or abort (``BatchOutcome.figures``). ``of_write`` puts
the latest counts of each together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields


@dataclass(frozen=True, slots=True)
class TransactionFigures:
    """Counts of transactions. ``recovered``: an earlier run had left them, and they were ended now.

    ``oldest_open_ms``: when the oldest open transaction began, in Unix time; 0 if none is open.
    """

    open: int = 0
    committed: int = 0
    aborted: int = 0
    recovered: int = 0
    oldest_open_ms: int = 0

    def __add__(self, other: TransactionFigures) -> TransactionFigures:
        began = [one.oldest_open_ms for one in (self, other) if one.oldest_open_ms]
        return TransactionFigures(
            self.open + other.open,
            self.committed + other.committed,
            self.aborted + other.aborted,
            self.recovered + other.recovered,
            min(began, default=0),
        )

    def oldest_open_age_ms(self, now_ms: int) -> int:
        """Milliseconds since the oldest open transaction began, at ``now_ms`` in Unix time; 0 if none is."""
        return max(0, now_ms - self.oldest_open_ms) if self.oldest_open_ms else 0

    def as_json(self) -> dict[str, int]:
        """For a message or a report."""
        return asdict(self)

    @classmethod
    def from_json(cls, body: Mapping[str, object]) -> TransactionFigures:
        """The reverse of ``as_json``. Raises ValueError unless each value is a whole number from 0 on."""
        values = {one.name: body.get(one.name, 0) for one in fields(cls)}
        for name, value in values.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"'{name}' is not a count")
        return cls(**values)  # type: ignore[arg-type]


def of_write(
    planned: TransactionFigures,
    attempts: Iterable[TransactionFigures],
    ended: TransactionFigures | None = None,
) -> TransactionFigures:
    """The figures of one job or micro-batch.

    ``ended`` is what the commit or abort counted, None before it. It ends every transaction of the write, so
    those that attempts still report as open no longer are.
    """
    written = sum(attempts, TransactionFigures())
    if ended is None:
        return planned + written
    return planned + TransactionFigures(aborted=written.aborted) + ended
