"""Spark's lookup of Python data sources finds ``DefaultSource`` here, for ``format("kafka-chunked")``.

Spark imports every top-level module named ``pyspark_*`` at the first use of any Python data source. An
exception in one of them breaks all data sources, so this module never raises. If the sink cannot be imported,
a substitute is registered under its name and reports the reason when it is used.
"""

from __future__ import annotations

__all__: list[str] = []

try:
    from kafka_sink.spark.datasource import KafkaChunkedDataSource as DefaultSource

    __all__ += ["DefaultSource"]
except Exception as failure:  # noqa: BLE001 - other data sources must stay usable in any case
    _REASON = f"{type(failure).__name__}: {failure}"
    # "failed to map segment" is what the dynamic loader says.
    _MEMORY = isinstance(failure, MemoryError) or "failed to map segment" in _REASON
    _REMEDY = (
        "Spark limits the memory of this process: raise spark.sql.planner.pythonExecution.memory, "
        "or leave it unset."
        if _MEMORY
        else "Spark's Python workers use PYSPARK_PYTHON, else python3 from PATH: "
        "point PYSPARK_PYTHON at the environment where kafka-chunked is installed."
    )
    try:
        from pyspark.sql.datasource import DataSource

        class _Unavailable(DataSource):
            """Has the sink's name and reports, when used, why the sink could not be imported."""

            def __init__(self, options: dict[str, str]) -> None:
                raise ImportError(
                    f"the kafka-chunked sink cannot be imported by this Python: {_REASON}. {_REMEDY}"
                )

            @classmethod
            def name(cls) -> str:
                return "kafka-chunked"

        globals()["DefaultSource"] = _Unavailable
    except Exception:  # noqa: BLE001, S110 - this pyspark has no Python data sources
        pass
