"""What Spark's own lookup of Python data sources finds: ``DefaultSource``, for ``format("kafka-chunked")``.

Spark imports every top-level module named ``pyspark_*`` at the first use of any Python data source, and one
exception there fails the lookup for all of them. So this module raises nothing: where the sink cannot be
imported, a stand-in takes its name and says why once somebody uses it.
"""

from __future__ import annotations

__all__: list[str] = []

try:
    from kafka_sink.spark.datasource import KafkaChunkedDataSource as DefaultSource

    __all__ += ["DefaultSource"]
except Exception as failure:  # noqa: BLE001 - whatever it is, other data sources must stay usable
    _REASON = f"{type(failure).__name__}: {failure}"
    try:
        from pyspark.sql.datasource import DataSource

        class _Unavailable(DataSource):
            """Answers to the sink's name and reports on use why the sink could not be imported."""

            def __init__(self, options: dict[str, str]) -> None:  # noqa: ARG002 - DataSource's signature
                raise ImportError(
                    f"the kafka-chunked sink cannot be imported by this Python: {_REASON}. "
                    "Spark's Python workers use PYSPARK_PYTHON, else python3 from PATH: "
                    "point PYSPARK_PYTHON at the environment where kafka-chunked is installed."
                )

            @classmethod
            def name(cls) -> str:
                return "kafka-chunked"

        globals()["DefaultSource"] = _Unavailable
    except Exception:  # noqa: BLE001 - a pyspark without Python data sources: nothing can be offered
        pass
