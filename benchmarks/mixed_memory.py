"""The mixed workload of KIP-1332 (KAFKA-20576): one producer's memory over time, incremental against full.

    python -m benchmarks.mixed_memory [--seconds N] [--delay-ms N] [--smoke]

Topic ``logs``: keyless, 40 MB/s; topic ``events``: keyed, 1,000 partitions, 5,000 rows (0.55 MB) a second;
110-byte values, batch.size 4 MiB, message limits to match, linger 1 s, no compression, so that bytes are what
rows make them. Responses come 50 ms late, as from brokers that write to remote storage, which is what large
batches are for; --delay-ms 0 leaves that out. Rows come at that pace, or as fast as they are taken where that
is slower. ``full`` runs with the same 64 MiB and with 8 GiB, where it shows what it would need. Samples every
10 ms, under the accumulator's lock. No Spark.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from benchmarks import charts
from benchmarks import direct_producer as direct
from benchmarks.direct_producer import MIB, VALUE_BYTES, MemoryOverTime, Sample
from benchmarks.far_brokers import far_brokers
from benchmarks.surroundings import keep, machine, parser_of
from kafka_sink.memory.allocator import chunk_size
from kafka_sink.model import TaskResult
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.task.producer import Producer
from local_kafka import LocalBroker

TICK_S = 0.02
LOGS = ColumnPlan(value=1, topic="logs")
EVENTS = ColumnPlan(key=0, value=1, topic="events")
LOGS_ROWS_S = 40_000_000 // VALUE_BYTES
EVENTS_ROWS_S = 5_000
LOGS_PARTITIONS, EVENTS_PARTITIONS = 4, 1000
CHUNK = chunk_size(4 * MIB)
# The samples of each case, for the plot.
SAMPLES_KEPT = 300


@dataclass(frozen=True)
class Case:
    name: str
    strategy: str
    memory: int


CASES = (
    Case("incremental, 64 MiB", "incremental", 64 * MIB),
    Case("full, 64 MiB", "full", 64 * MIB),
    Case("full, 8 GiB", "full", 8 << 30),
)


def pump(producer: Producer, seconds: float) -> None:
    """Hands over the rows that are due every 20 ms, at most one Arrow batch at a time."""
    rows = pa.Table.from_batches(direct.row_batches(20)).combine_chunks().to_batches()[0]
    started = time.monotonic()
    sent = {LOGS: 0, EVENTS: 0}
    while (now := time.monotonic() - started) < seconds:
        for plan, per_second in ((LOGS, LOGS_ROWS_S), (EVENTS, EVENTS_ROWS_S)):
            due = min(int(now * per_second) - sent[plan], direct.BATCH_ROWS)
            if due > 0:
                at = sent[plan] % (rows.num_rows - direct.BATCH_ROWS)
                producer.send(rows.slice(at, due), plan=plan)
                sent[plan] += due
        time.sleep(max(0.0, started + now + TICK_S - time.monotonic()))


def bound(sample: Sample) -> int:
    """The most memory that KAFKA-20576 promises: the bytes buffered and a chunk for each batch."""
    return sample.buffered + sample.batches * CHUNK


def figures_of(case: Case, result: TaskResult, samples: list[Sample], seconds: float) -> dict[str, Any]:
    rows, batches, size = {}, {}, {}
    for plan in (LOGS, EVENTS):
        parts = [one for one in result.partitions if one.topic == plan.topic]
        rows[plan.topic] = sum(one.records for one in parts)
        batches[plan.topic] = sum(one.batches for one in parts)
        size[plan.topic] = sum(one.bytes for one in parts)
    # Memory is reserved for rows that are just being written, so it runs ahead of the buffered bytes.
    settled = [sample for sample in samples if not sample.writing]
    return {
        "case": case.name,
        "logs_rows_per_second": rows["logs"] / seconds,
        "events_rows_per_second": rows["events"] / seconds,
        "logs_batch_mib": size["logs"] / max(1, batches["logs"]) / MIB,
        "events_batch_bytes": size["events"] / max(1, batches["events"]),
        "pool_wait_s": result.pool_wait_ms / 1000,
        "peak_used_mib": max(sample.used for sample in samples) / MIB,
        "peak_buffered_mib": max(sample.buffered for sample in samples) / MIB,
        "peak_bound_mib": max(bound(sample) for sample in settled) / MIB,
        "most_over_bound_mib": max(sample.used - bound(sample) for sample in settled) / MIB,
        "peak_batches": max(sample.batches for sample in samples),
        "heap_mib": max(sample.heap for sample in samples) / MIB,
        "samples": [
            (round(sample.at_s, 3), sample.used, sample.buffered, bound(sample))
            for sample in settled[:: max(1, len(settled) // SAMPLES_KEPT)]
        ],
    }


def run(bootstrap: str, case: Case, seconds: float) -> dict[str, Any]:
    options = direct.options_for(
        bootstrap,
        buffer_memory=case.memory,
        buffer_memory_allocation_strategy=case.strategy,
        max_block_ms=600_000,
    )
    producer = Producer(options)
    try:
        # Rows for every partition first: this finds the leaders and opens the logs.
        producer.begin()
        producer.send(direct.row_batches(1)[0], plan=EVENTS)
        producer.send(direct.row_batches(1)[0], plan=LOGS)
        producer.finish()
        producer.begin()
        started = time.monotonic()
        with MemoryOverTime(producer) as memory:
            pump(producer, seconds)
            pumped = time.monotonic() - started
            result = producer.finish()
    finally:
        producer.close()
    return figures_of(case, result, memory.samples, pumped)


def report(outcome: list[dict[str, Any]]) -> None:
    print(f"offered: logs {LOGS_ROWS_S:,} rows/s, events {EVENTS_ROWS_S:,} rows/s\n")
    titles = ("logs rows/s", "events rows/s", "logs batch", "pool peak", "buffered", "bound", "waited s")
    print(f"{'':22}" + "".join(f"{title:>15}" for title in titles))
    for one in outcome:
        numbers = (one["logs_rows_per_second"], one["events_rows_per_second"])
        sizes = (one["logs_batch_mib"], one["peak_used_mib"], one["peak_buffered_mib"], one["peak_bound_mib"])
        print(
            f"{one['case']:22}"
            + "".join(f"{number:>15,.0f}" for number in numbers)
            + "".join(f"{size:>11,.1f} MiB" for size in sizes)
            + f"{one['pool_wait_s']:>15.1f}"
        )
    ours, least, free = outcome
    within = "within" if ours["most_over_bound_mib"] <= 0 else "NOT within"
    print(
        f"\nincremental is {within} bytes buffered + batches x {CHUNK} at every sample "
        f"(nearest: {-ours['most_over_bound_mib']:.2f} MiB below); "
        f"full takes {free['peak_used_mib'] / ours['peak_used_mib']:.0f} times as much where it may; where "
        f"it may not, {least['logs_rows_per_second'] / LOGS_ROWS_S:.0%} of the logs' rows get through"
    )


def plot(found: dict[str, Any], file: Path) -> None:
    outcome = found["outcome"]
    made, [all_axes] = charts.figure(
        "A topic with many rows beside 1,000 partitions with few: memory of both strategies",
        [found["conditions"]],
        (12, 4.6),
        1,
        len(outcome),
        sharey=True,
    )
    for axes, one in zip(all_axes, outcome, strict=True):
        at, used, buffered, most = zip(*one["samples"], strict=True)
        axes.plot(at, [size / MIB for size in used], color=charts.OURS, label="taken from the pool")
        axes.plot(at, [size / MIB for size in buffered], color="#d98b2b", label="bytes buffered")
        if one["case"].startswith("incremental"):
            label = "bytes buffered + batches x chunk: the bound"
            axes.plot(at, [size / MIB for size in most], color="black", linewidth=0.8, label=label)
        rate = one["logs_rows_per_second"] / LOGS_ROWS_S
        axes.set_title(f"{one['case']}: {rate:.0%} of the logs get through")
        axes.set_yscale("log")
        axes.set_ylim(1e-3, 1e4)
        axes.set_yticks([1e-3, 0.1, 10, 1000], ["0.001", "0.1", "10", "1,000"])
        axes.set_xlabel("seconds")
        axes.grid(alpha=0.6)
    all_axes[0].set_ylabel("MiB")
    all_axes[0].legend(loc="lower center")
    charts.save(made, file)


def main() -> None:
    parser = parser_of(__doc__, "few partitions")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--delay-ms", type=float, default=50.0)
    options = parser.parse_args()
    seconds, partitions = (0.5, 50) if options.smoke else (options.seconds, EVENTS_PARTITIONS)
    conditions = (
        f"logs: keyless, {LOGS_PARTITIONS} partitions, 40 MB/s; events: keyed, {partitions:,} "
        f"partitions, {EVENTS_ROWS_S:,} rows/s; {VALUE_BYTES}-byte values, batch.size 4 MiB, linger 1 s, "
        f"uncompressed, responses {options.delay_ms:.0f} ms late, {seconds:.0f} s, "
        f"{machine()}"
    )
    print(conditions, flush=True)
    with LocalBroker() as broker:
        broker.create_topic("logs", LOGS_PARTITIONS, config=direct.ADMITS_8_MIB)
        broker.create_topic("events", partitions, config=direct.ADMITS_8_MIB)
        bootstrap, delay_ms = broker.bootstrap_servers, options.delay_ms
        with far_brokers(bootstrap, delay_ms) if delay_ms else contextlib.nullcontext(broker) as far:
            outcome = [run(far.bootstrap_servers, case, seconds) for case in CASES]
    report(outcome)
    if not options.smoke:
        keep("mixed_memory", {"conditions": conditions, "outcome": outcome}, plot)


if __name__ == "__main__":
    main()
