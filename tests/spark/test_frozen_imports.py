"""That a worker's collections do not look at what it has imported, and still free what came later."""

from __future__ import annotations

from tests.support.commands import printed_by


def test_a_reused_planning_worker_has_little_to_collect() -> None:
    code = """
        import gc, sys
        from unittest import mock
        sys.modules["pyspark.daemon"] = object()
        from pyspark.sql.types import StructType
        from kafka_sink.spark.datasource import KafkaChunkedDataSource
        options = {"kafka.bootstrap.servers": "localhost:1", "topic": "t", "coordinator.enabled": "false"}
        with mock.patch("kafka_sink.spark.planning.looked_up"):
            for _ in range(2):
                KafkaChunkedDataSource(options).streamWriter(StructType().add("value", "string"), False)
                # PySpark imports more after planning, and its daemon collects.
                import pyarrow
                gc.collect()
                print(len(gc.get_objects()) < 2000)
    """
    assert printed_by(code).split() == ["False", "True"]


def test_what_comes_later_is_still_collected() -> None:
    code = """
        import gc, sys, weakref
        sys.modules["pyspark.daemon"] = object()
        from kafka_sink.spark.worker import freeze_when_reused
        class Node: pass
        freeze_when_reused()
        freeze_when_reused()
        node = Node()
        node.itself = node
        gone = weakref.ref(node)
        freeze_when_reused()
        del node
        gc.collect()
        print(gone() is None)
    """
    assert printed_by(code) == "True"


def test_only_workers_of_the_daemon_do_it() -> None:
    code = """
        import gc
        from kafka_sink.spark.worker import freeze_when_reused
        freeze_when_reused()
        freeze_when_reused()
        print(gc.get_freeze_count())
    """
    assert printed_by(code) == "0"
