"""What of PySpark's data source API the PySpark at hand has: 4.1 and later all, 4.0 most, 3.5 nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["ArrowWriter", "StreamArrowWriter", "WriterCommitMessage"]

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceArrowWriter as ArrowWriter
    from pyspark.sql.datasource import DataSourceStreamArrowWriter as StreamArrowWriter
    from pyspark.sql.datasource import WriterCommitMessage
else:
    try:
        from pyspark.sql.datasource import WriterCommitMessage
    except ImportError:
        # Spark 3.5 calls no data source, and so asks for no class of its own.
        WriterCommitMessage = object
    try:
        from pyspark.sql.datasource import DataSourceArrowWriter as ArrowWriter
    except ImportError:
        ArrowWriter = StreamArrowWriter = object
    else:
        try:
            from pyspark.sql.datasource import DataSourceStreamArrowWriter as StreamArrowWriter
        except ImportError:
            from pyspark.sql.datasource import DataSourceStreamWriter

            class StreamArrowWriter(DataSourceStreamWriter, ArrowWriter):
                """PySpark 4.0's tasks hand Arrow batches to each ArrowWriter, whatever else it is."""
