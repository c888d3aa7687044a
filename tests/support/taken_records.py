"""The values of records that were taken out of a batch."""

from __future__ import annotations

import numpy as np

from kafka_sink.dead_letters.rejected_rows import RejectedRecords
from kafka_sink.dead_letters.row_rejection import rows_of_records
from kafka_sink.engine.splitting import TakenRecords


def values_of(records: TakenRecords) -> list[bytes]:
    ends, times = np.array(records.ends, dtype=np.int64), np.array(records.timestamps_ms, dtype=np.int64)
    rejected = RejectedRecords(records.bodies, ends, "t", 0, times, "", "")
    return [value or b"" for value in rows_of_records(rejected, 1 << 20).value.to_pylist()]
