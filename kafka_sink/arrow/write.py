"""One write of Arrow data, from a notebook or a job."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kafka_sink.arrow.columns import check_early
from kafka_sink.arrow.producer import ArrowProducer, record_batches
from kafka_sink.errors import DeliveryError
from kafka_sink.reports.delivery_report import Written


def write_arrow(data: Any, options: Mapping[str, Any]) -> Written:
    """See ``kafka_sink.write_arrow``."""
    producer = ArrowProducer(options)
    schema, batches = record_batches(data)
    if schema is not None:
        # Before any broker is asked. With a format, the registry is asked when the rows come.
        check_early(schema, producer.options)
    with producer:
        producer.send(batches)
        producer.flush()
    if producer.result is None:
        raise DeliveryError("the write has ended without a result")
    return producer.result
