"""Lets Spark find the sink as ``format("kafka_chunked")`` as well.

Spark's lookup takes one data source from each module (see ``pyspark_kafka_chunked``). As in that module, no
exception leaves this one.
"""

from __future__ import annotations

__all__: list[str] = []

try:
    from pyspark_kafka_chunked import DefaultSource as _Source

    class DefaultSource(_Source):
        """The sink, or the substitute that reports why the sink cannot be imported."""

        @classmethod
        def name(cls) -> str:
            return "kafka_chunked"

    __all__ += ["DefaultSource"]
except Exception:  # noqa: BLE001, S110 - this pyspark has no Python data sources
    pass
