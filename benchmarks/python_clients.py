"""Clients that take one row at a time, each as its documents advise, with lz4 and batches of 1 MiB.

They return when all rows are acknowledged. Rows are pairs of key and value, both texts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

LIBRDKAFKA = {
    "linger.ms": "20",
    "batch.size": str(1 << 20),
    "compression.type": "lz4",
    "queue.buffering.max.messages": 1_000_000,
}
Rows = Iterable[tuple[Any, Any]]


def aio_producer(rows: Rows, bootstrap: str, topic: str) -> None:
    """confluent-kafka gathers messages, and gives them to ``produce_batch`` in a pool of threads. Each row
    has a future."""
    from confluent_kafka.aio import AIOProducer

    async def write() -> None:
        producer = AIOProducer({"bootstrap.servers": bootstrap, **LIBRDKAFKA}, batch_size=10_000)
        sent = [await producer.produce(topic, value, key) for key, value in rows]
        await producer.flush()
        await asyncio.gather(*sent)
        await producer.close()

    asyncio.run(write())


def aiokafka(rows: Rows, bootstrap: str, topic: str) -> None:
    from aiokafka import AIOKafkaProducer

    async def write() -> None:
        producer = AIOKafkaProducer(
            bootstrap_servers=bootstrap,
            compression_type="lz4",
            linger_ms=20,
            max_batch_size=1 << 20,
            acks="all",
        )
        async with producer:
            sent = [await producer.send(topic, value.encode(), key.encode()) for key, value in rows]
            await producer.flush()
            await asyncio.gather(*sent)

    asyncio.run(write())


def kafka_python(rows: Rows, bootstrap: str, topic: str) -> None:
    from kafka import KafkaProducer

    producer = KafkaProducer(
        bootstrap_servers=bootstrap, compression_type="lz4", linger_ms=20, batch_size=1 << 20, acks="all"
    )
    for key, value in rows:
        producer.send(topic, value.encode(), key.encode())
    producer.flush()
    producer.close()
