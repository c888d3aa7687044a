"""Writing Arrow data to Kafka without Spark: ``kafka_sink.write_arrow`` and ``kafka_sink.producer``.

No module of this package imports pyspark.
"""
