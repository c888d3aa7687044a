"""Rows that were rejected, with nothing but a value."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from kafka_sink.dead_letters.rejected_rows import RejectedRows
from kafka_sink.dead_letters.row_rejection import rows_of_table
from kafka_sink.errors import InvalidRowError
from kafka_sink.rows.column_plan import ColumnPlan


def rejected_rows(values: Sequence[bytes], topic: str, reason: str = "too large") -> RejectedRows:
    table = pa.table({"value": pa.array(values, pa.binary()), "topic": [topic] * len(values)})
    error = InvalidRowError(reason, np.ones(len(values), dtype=np.bool_), reason)
    return rows_of_table(ColumnPlan(value=0, topic_column=1), table, error)
