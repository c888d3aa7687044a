"""The encoder alone on one core: ns a record by stage, no broker, no Spark.

    python -m benchmarks.encoder [--smoke]

Units of 32,000 rows, 10-byte keys, 110-byte values, four partitions; the best of many repeats, since
everything else that runs only adds.
"""

from __future__ import annotations

import argparse
import os
import platform
import timeit
from collections.abc import Callable
from itertools import pairwise

import google_crc32c
import numpy as np
import pyarrow as pa

from kafka_sink.records import encoder
from kafka_sink.records.compression import Lz4Codec
from kafka_sink.records.encoder import Run
from kafka_sink.records.record_columns import RecordColumns
from kafka_sink.rows.murmur2 import partitions_for

GOAL_NS = 250


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny input: does it run at all")
    smoke = parser.parse_args().smoke
    rows, repeats = (500, 1) if smoke else (32_000, 40)
    chance = np.random.default_rng(1)
    keys = pa.array([b"k%09d" % n for n in chance.integers(0, 10**9, rows)], pa.binary())
    values = pa.array([(b'{"id":%012d,"user":"u%06d"' % (n, n % 977)).ljust(110, b".") for n in range(rows)])

    def best(work: Callable[[], object]) -> float:
        return min(timeit.repeat(work, number=1, repeat=repeats)) / rows * 1e9

    partitions = partitions_for(keys, 4)
    order = np.argsort(partitions.astype(np.int16), kind="stable")
    plain = RecordColumns.of(keys, (values,), None)
    ordered = plain.ordered(order)
    starts = [0, *np.cumsum(np.bincount(partitions, minlength=4)).tolist()]
    runs = [Run(start, stop, 1000, 0) for start, stop in pairwise(starts) if start < stop]
    encoded = b"".join(part[:] for part in encoder.encode(ordered, 0, runs))
    blocks = [encoded[at : at + 65536] for at in range(0, len(encoded), 65536)]
    codec = Lz4Codec(9)
    stages: dict[str, Callable[[], object]] = {
        "murmur2 of the keys": lambda: partitions_for(keys, 4),
        "order by partition": lambda: plain.ordered(np.argsort(partitions.astype(np.int16), kind="stable")),
        "encode": lambda: encoder.encode(ordered, 0, runs),
        "lz4": lambda: [codec.compress_block(block) for block in blocks],
        "crc32c (of raw bytes)": lambda: google_crc32c.value(np.frombuffer(encoded, np.uint8)),
    }
    print(f"{rows:,} rows a unit, {os.cpu_count()} cores (one used), Python {platform.python_version()}")
    for name, work in stages.items():
        goal = f"   goal {GOAL_NS}" if name == "encode" else ""
        print(f"{name:26}{best(work):8.1f} ns a record{goal}")


if __name__ == "__main__":
    main()
