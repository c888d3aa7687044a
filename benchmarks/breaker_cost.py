"""What the circuit breaker costs when nothing is wrong: nanoseconds per record batch, and its share of all.

    python -m benchmarks.breaker_cost [--smoke]

First the calls alone, on one core: what the sender asks of the breaker for a request of so many batches, with
the two passes of its loop that a request takes (one sends it, one has its response). Then a producer
writes to a real broker, for the processor time that a batch takes in all: taking rows in, encoding, sending,
responses.
Times of the calls are the least of many rounds, so that whatever else runs here is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from dataclasses import asdict, dataclass

from benchmarks import direct_producer
from benchmarks.surroundings import RESULTS
from kafka_sink.breaker import (
    FailureRateCircuitBreaker,
)
from kafka_sink.breaker.interface import SendPolicy
from kafka_sink.breaker.manager import CircuitBreakManager
from kafka_sink.breaker.producer_breaker import ProducerBreaker
from kafka_sink.local_broker import LocalBroker
from kafka_sink.model import TopicPartition
from kafka_sink.options import parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.task.producer import Producer
from tests.support.breaker_cluster import Cluster

NODES = 3
PARTITIONS = 12
TOPIC = "cost"
BATCHES_PER_REQUEST = (1, 4)
BATCH_SIZES = (16_384, 524_288)
# Responses come after so long; the clock of the calls is made up.
LATENCY_MS = 5.0
ROWS_A_BATCH = 1_000


@dataclass
class Calls:
    batches_per_request: int
    breaker_ns: float
    none_ns: float


@dataclass
class Whole:
    batch_size: int
    batches: int
    requests: int
    cpu_ns: float
    breaker_share: float


def gate() -> ProducerBreaker:
    cluster = Cluster(**{TOPIC: [partition % NODES for partition in range(PARTITIONS)]})
    breaker = FailureRateCircuitBreaker()
    breaker.configure({})
    return ProducerBreaker(breaker, CircuitBreakManager(cluster, 2_000.0), str)


def calls_ns(observer: SendPolicy, per_request: int, requests: int, rounds: int) -> float:
    """Nanoseconds of processor time per batch, of the best round. Rounds take milliseconds."""
    places = [
        [TopicPartition(TOPIC, node + NODES * number) for number in range(per_request)]
        for node in range(NODES)
    ]
    now, best = 0.0, float("inf")
    for _ in range(rounds):
        started = time.thread_time_ns()
        for number in range(requests):
            node = number % NODES
            observer.muted(now)
            observer.next_change_ms(now)
            observer.on_unreachable((), (), now)
            observer.on_request(node, now)
            for partition in places[node]:
                observer.on_send(node, [(partition, ROWS_A_BATCH)], now)
            now += LATENCY_MS
            observer.muted(now)
            observer.next_change_ms(now)
            observer.on_unreachable((), (), now)
            observer.on_request_done(node, now)
            for partition in places[node]:
                observer.on_complete(node, [(partition, ROWS_A_BATCH)], None, now)
        best = min(best, (time.thread_time_ns() - started) / (requests * per_request))
    return best


def whole(broker: LocalBroker, batch_size: int, rows: int) -> tuple[int, int, float]:
    """Batches, requests, and nanoseconds of processor time per batch."""
    topic = f"{TOPIC}-{batch_size}"
    broker.create_topic(topic, PARTITIONS)
    raw = {
        "kafka.bootstrap.servers": broker.bootstrap_servers,
        "kafka.batch.size": str(batch_size),
        "topic": topic,
    }
    # Partitions are not asked for, so that rows are keyless and batches full.
    data = [batch.select(["value"]) for batch in direct_producer.row_batches(10)]
    plan = ColumnPlan.of([("value", "string")], topic)
    producer = Producer(parse(raw).options)
    try:
        for measured in (False, True):
            producer.begin()
            started = time.process_time_ns()
            for number in range(max(1, rows // direct_producer.BATCH_ROWS) if measured else 10):
                producer.send(data[number % len(data)], plan=plan)
            result = producer.finish()
            taken = time.process_time_ns() - started
    finally:
        producer.close()
    return result.batches, result.requests, taken / result.batches


def per_batch_ns(calls: list[Calls], per_request: float) -> float:
    """The breaker's time for so many batches a request: a part per request, and one per batch."""
    few, many = calls[0], calls[-1]
    spread = 1 / few.batches_per_request - 1 / many.batches_per_request
    for_request = (few.breaker_ns - many.breaker_ns) / spread
    return few.breaker_ns + for_request * (1 / per_request - 1 / few.batches_per_request)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny input, no files: does it run at all")
    options = parser.parse_args()
    requests, rounds, rows = (100, 2, 20_000) if options.smoke else (200, 300, 1_000_000)
    conditions = (
        f"one core of {os.cpu_count()}, Python {platform.python_version()}, {PARTITIONS} partitions on "
        f"{NODES} brokers; in all: {rows:,} keyless {direct_producer.VALUE_BYTES}-byte rows, Kafka 4.3.0 on "
        "the same machine"
    )
    print(conditions)
    print(f"\n{'batches a request':>18}{'breaker, ns a batch':>22}{'switched off':>15}")
    calls = []
    for per_request in BATCHES_PER_REQUEST:
        found = Calls(
            per_request,
            calls_ns(gate(), per_request, requests, rounds),
            calls_ns(SendPolicy(), per_request, requests, rounds),
        )
        calls.append(found)
        print(f"{per_request:18}{found.breaker_ns:22,.0f}{found.none_ns:15,.0f}", flush=True)
    print(f"\n{'batch.size':>11}{'batches':>9}{'a request':>11}{'ns a batch in all':>19}{'breaker':>9}")
    wholes = []
    with LocalBroker() as broker:
        for batch_size in BATCH_SIZES:
            batches, sent, cpu_ns = whole(broker, batch_size, rows)
            share = per_batch_ns(calls, batches / sent) / cpu_ns
            wholes.append(Whole(batch_size, batches, sent, cpu_ns, share))
            print(f"{batch_size:11,}{batches:9,}{batches / sent:11.1f}{cpu_ns:19,.0f}{share:9.2%}")
    if not options.smoke:
        RESULTS.mkdir(exist_ok=True)
        figures = {
            "conditions": conditions,
            "calls": [asdict(one) for one in calls],
            "whole": [asdict(one) for one in wholes],
        }
        (RESULTS / "breaker_cost.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
