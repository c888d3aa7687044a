"""A task whose rows brokers all reject, in a process of its own: it measures the memory.

``python -m tests.support.rejected_rows_job BOOTSTRAP TOPIC DEAD_LETTERS ROWS VALUE_BYTES [OPTION=VALUE ...]``
prints JSON. The topic is compacted, so that it rejects rows without a key; every ``keyed=N``th row has one.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa

from kafka_sink.options import parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.task.producer_cache import task_producer

TABLE_BYTES = 2 << 20


def peak_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) / 1024


def values(start: int, count: int, size: int) -> pa.Array:
    """Numbers that end with a colon, then bytes that do not shrink."""
    data = np.random.default_rng(start).integers(97, 123, (count, size), dtype=np.uint8)
    heads = np.frombuffer(b"".join(b"%09d:" % n for n in range(start, start + count)), np.uint8)
    data[:, :10] = heads.reshape(count, 10)
    ends = np.arange(count + 1, dtype=np.int32) * np.int32(size)
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(data)])


def main(bootstrap: str, topic: str, dead_letters: str, rows: str, size: str, *given: str) -> None:
    options = dict(text.split("=", 1) for text in given)
    keyed = int(options.pop("keyed", "0"))
    raw = {
        "kafka.bootstrap.servers": bootstrap,
        "topic": topic,
        "errors.tolerance": "all",
        "errors.max": "-1",
        "errors.deadletterqueue.topic.name": dead_letters,
    } | options
    plan = ColumnPlan.of([("key", "binary"), ("value", "binary")], topic)
    with task_producer(parse(raw).options, plan) as producer:
        step = max(1, TABLE_BYTES // (int(size) + 16))
        for start in range(0, int(rows), step):
            count = min(step, int(rows) - start)
            numbers = range(start, start + count)
            keys = [b"%d" % row if keyed and row % keyed == 0 else None for row in numbers]
            table = pa.table({"key": pa.array(keys, pa.binary()), "value": values(start, count, int(size))})
            producer.send(table)
        result = producer.finish()
    found = {"records": result.records, "skipped": result.skipped, "retries": result.retries}
    print(json.dumps(found | {"peak_mib": peak_mib()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
