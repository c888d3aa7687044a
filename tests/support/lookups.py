"""Rows for named topics, the topics that brokers were asked for, and the rows that they got."""

from __future__ import annotations

import pyarrow as pa

from kafka_sink.options import SinkOptions, parse
from tests.support.fake_broker import METADATA, FakeCluster


def rows(*topics: str) -> pa.RecordBatch:
    values = pa.array([b"v"] * len(topics), pa.binary())
    return pa.record_batch({"topic": pa.array(topics, pa.string()), "value": values})


def asked(cluster: FakeCluster) -> list[set[str]]:
    return [{topic.name for topic in one.body.topics} for one in cluster.received(METADATA)]


def written(cluster: FakeCluster, topic: str) -> int:
    return sum(batch.record_count for batch in cluster.batches(topic, 0))


def options(bootstrap: str, topic: str, **more: str) -> SinkOptions:
    names = {name.replace("_", "."): text for name, text in more.items()}
    return parse({"kafka.bootstrap.servers": bootstrap, "topic": topic, **names}).options
