"""The values of records that were taken out of a batch."""

from __future__ import annotations

import numpy as np

from kafka_sink.dead_letters.row_rejection import rows_of_records
from kafka_sink.engine.splitting import TakenRecords
from kafka_sink.model import TopicPartition


def values_of(records: TakenRecords) -> list[bytes]:
    ends, times = np.array(records.ends, dtype=np.int64), np.array(records.timestamps_ms, dtype=np.int64)
    rows = rows_of_records(records.bodies, ends, times, TopicPartition("t", 0), "", "", 1 << 20)
    return [value or b"" for value in rows.value.to_pylist()]
