"""Spark's settings with which rows reach Python at less cost: for ``kafka_sink.tune`` and the doctor.

Workers import it before Arrow, which their memory may be too small for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

LARGE_ROW_BYTES = 512
_ROWS = "spark.sql.execution.arrow.maxRecordsPerBatch"
# Spark's default, with which small rows are as fast as they get.
_MOST_ROWS = 10_000
# Spark 4.1 and later add up the bytes of each row, unless there is no limit.
_BYTES = "spark.sql.execution.arrow.maxBytesPerBatch"
_NO_LIMIT = str(2**31 - 1)
_CODEC = "spark.sql.execution.arrow.compression.codec"
_GOOD_ARROW_BATCH = 4_000_000


def rows_of_good_batch(row_bytes: float) -> int:
    """How many rows of this size an Arrow batch should have."""
    fitting = max(1, int(_GOOD_ARROW_BATCH / row_bytes))
    # The first digit alone: 83 becomes 80.
    magnitude = int("1".ljust(len(str(fitting)), "0"))
    return fitting // magnitude * magnitude


def settings_for(row_bytes: int) -> dict[str, str]:
    """Of a session, by name, for rows of about so many bytes. Raises ValueError for less than one."""
    if row_bytes < 1:
        raise ValueError(f"row_bytes is {row_bytes}; give the bytes that a row has on average")
    wanted = {_ROWS: str(min(_MOST_ROWS, rows_of_good_batch(row_bytes)))}
    if row_bytes < LARGE_ROW_BYTES:
        # Of larger rows the sum costs little, and the limit holds where some are much larger.
        wanted[_BYTES] = _NO_LIMIT
    return wanted


def advice(conf: Callable[[str], str | None]) -> Iterator[str]:
    """What to change in a session. ``conf``: the value of a setting, None where nobody set it."""
    if conf(_ROWS) is None and conf(_BYTES) is None:
        yield (
            "Spark hands rows to Python in pieces of its default size: kafka_sink.tune(spark, row_bytes=...) "
            "sets those that cost less for rows of that size"
        )
    codec = conf(_CODEC)
    if codec not in (None, "none"):
        yield (
            f"{_CODEC}={codec} compresses rows that only go to Python on the same host, lz4 at some 100 us a "
            "row: unset it"
        )
