"""Keyless rows stay in the producer's rack (KIP-1123); test_partitioner.py has the rule."""

from __future__ import annotations

import pyarrow as pa

from kafka_sink.options import parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.task.producer import Producer
from local_kafka import LocalBroker

PLAN = ColumnPlan.of([("value", "binary")], "t")
VALUES = pa.record_batch({"value": pa.array([b"x" * 100] * 2000, pa.binary())})


def test_bytes_stay_in_the_rack_of_a_real_cluster(cluster3: LocalBroker) -> None:
    cluster3.create_topic("rack-aware", 6)
    for aware in (True, False):
        raw = {
            "kafka.bootstrap.servers": cluster3.bootstrap_servers,
            "topic": "rack-aware",
            "kafka.client.rack": "rack-1",
            "kafka.partitioner.rack.aware": str(aware).lower(),
            "coordinator.enabled": "false",
            # Rows also leave a rack whose broker is slow, as on a busy machine.
            "kafka.producer.circuit.breaker.class": "none",
            "kafka.partitioner.adaptive.partitioning.enable": "false",
            # The partition is drawn for each batch: of a dozen, all may be of one rack.
            "kafka.batch.size": "16384",
        }
        producer = Producer(parse(raw).options)
        try:
            producer.begin()
            producer.plan = PLAN
            for _ in range(30):
                producer.send(VALUES)
            counts = producer.finish()
        finally:
            producer.close()
        assert counts.records == 30 * VALUES.num_rows
        share = counts.other_rack_bytes / counts.sent_bytes
        assert share == 0 if aware else share > 0.3, (aware, share, counts)
