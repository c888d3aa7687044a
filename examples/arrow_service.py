"""A service that sends to Kafka what it gets, batch by batch, until Ctrl-C.

    python examples/arrow_service.py localhost:9092 [topic] [seconds]

The address can also stand in KAFKA_BOOTSTRAP_SERVERS. A Kafka to try it on: local-kafka

Four sensors report from threads of their own, each some hundred readings at a time. ``send`` returns when
the rows are taken, and waits while Kafka is slower than the sensors. Once a second ``flush`` waits until
Kafka has all of them: a service would confirm them to its own source then.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import numpy as np
import pyarrow as pa

import kafka_sink
from kafka_sink.arrow.producer import ArrowProducer

servers = sys.argv[1] if len(sys.argv) > 1 else os.environ["KAFKA_BOOTSTRAP_SERVERS"]
topic = sys.argv[2] if len(sys.argv) > 2 else "service-example"
seconds = float(sys.argv[3]) if len(sys.argv) > 3 else 5.0

stop = threading.Event()


def report(producer: ArrowProducer, sensor: int) -> None:
    """One sensor, until the service stops."""
    chance = np.random.default_rng(sensor)
    while not stop.wait(0.02):
        celsius = np.char.mod('{"celsius":%.2f}', chance.normal(20, 5, 200))
        now = pa.scalar(time.time_ns(), pa.timestamp("ns", "UTC"))
        producer.send(
            pa.table(
                {
                    "key": pa.repeat(f"sensor-{sensor}", 200),
                    "value": pa.array(celsius),
                    "timestamp": pa.repeat(now, 200),
                }
            )
        )


options = {"kafka.bootstrap.servers": servers, "topic": topic, "topic.create": True, "kafka.linger.ms": 10}
with kafka_sink.producer(options) as producer:
    sensors = [threading.Thread(target=report, args=(producer, number)) for number in range(4)]
    for sensor in sensors:
        sensor.start()
    try:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(min(1.0, seconds / 2))
            producer.flush()
            print(f"{producer.acknowledged:,} readings are in Kafka")
    except KeyboardInterrupt:
        print("stopping")
    finally:
        # The block ends when all that was sent is acknowledged.
        stop.set()
        for sensor in sensors:
            sensor.join()

if producer.result is not None:
    print(f"{producer.result.rows:,} readings in all, none lost")
