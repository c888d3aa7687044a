"""Spark's users see the cause and the remedy, not the frames of this package."""

from __future__ import annotations

import io
import logging
import sys
import traceback

import pytest
from pyspark.sql.types import StructType
from pyspark.util import handle_worker_exception

from kafka_sink.errors import (
    BufferOwnershipError,
    ConfigurationError,
    DeliveryError,
    KafkaSinkError,
    ProtocolError,
    RecordTooLargeError,
)
from kafka_sink.spark.datasource import KafkaChunkedDataSource
from kafka_sink.spark.short_tracebacks import short_tracebacks
from tests.support.commands import printed_by


def text_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error))


@short_tracebacks
def fails(error: Exception, cause: Exception | None = None) -> None:
    def deep(depth: int) -> None:
        if depth:
            deep(depth - 1)
        raise error from cause

    deep(5)


@pytest.mark.parametrize(
    ("kind", "option", "last"),
    [
        ("string", "kafka.acsk", "did you mean 'kafka.acks'?)"),
        ("long", "kafka.acks", "as in .withColumn('value', col('value').cast('string'))"),
    ],
)
def test_planning_shows_the_remedy_without_frames(
    kind: str, option: str, last: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches: frames of planning, twice in PySpark's exception, around one line that helps."""
    source = KafkaChunkedDataSource({"kafka.bootstrap.servers": "127.0.0.1:1", "topic": "t", option: "all"})
    sent = io.BytesIO()
    try:
        source.writer(StructType().add("value", kind), False)
    except KafkaSinkError as error:
        handle_worker_exception(error, sent)
    # After two lengths.
    (line,) = sent.getvalue()[8:].decode().splitlines()
    assert line.startswith("kafka_sink.errors.")
    assert line.endswith(last)
    logged = caplog.records[-1]
    assert (logged.name, logged.levelname) == ("kafka_sink", "ERROR")
    assert logged.getMessage().startswith("kafka-chunked: ")
    assert logged.getMessage().endswith(last)


def explained(error: Exception, cause: Exception | None) -> str:
    with pytest.raises(type(error)) as caught:
        fails(error, cause)
    return text_of(caught.value)


def test_causes_that_the_message_quotes_are_left_out_and_those_that_say_more_stay() -> None:
    """Catches: a bug in the sender whose frames nobody sees, and an error in the user's code one link on."""
    quoted = explained(DeliveryError("delivery failed: too large"), RecordTooLargeError("too large"))
    assert "direct cause" not in quoted
    of_user = ZeroDivisionError("in the user's code")
    assert "in the user's code" in explained(KafkaSinkError("the class of the user fails"), of_user)
    bug = explained(DeliveryError("delivery failed"), BufferOwnershipError("returned twice"))
    assert "BufferOwnershipError: returned twice" in bug
    between = ConfigurationError("the class of the user fails")
    between.__cause__ = of_user
    assert "ZeroDivisionError: in the user's code" in explained(DeliveryError("delivery failed"), between)


def test_bugs_keep_their_frames_and_the_error_that_they_came_from() -> None:
    """Catches: "a response cannot be read" without the KeyError during which it was raised."""

    @short_tracebacks
    def reads() -> None:
        try:
            dict[str, int]()["length"]
        except KeyError:
            raise ProtocolError("a response cannot be read")  # noqa: B904 - as where nobody thought of it

    with pytest.raises(ProtocolError) as caught:
        reads()
    assert "KeyError: 'length'" in text_of(caught.value)
    assert explained(ProtocolError("a response cannot be read"), None).count("in deep") > 3
    with pytest.raises(ZeroDivisionError):
        fails(ZeroDivisionError())


def test_the_whole_traceback_is_in_the_log_at_debug(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "kafka_sink"), pytest.raises(DeliveryError):
        fails(DeliveryError("x"))
    assert "in deep" in caplog.text


_WITHOUT_LZ4 = """
    import sys, traceback
    sys.modules["lz4"] = None
    from kafka_sink.errors import KafkaSinkError
    from kafka_sink.options import parse
    from kafka_sink.rows.column_plan import ColumnPlan
    from kafka_sink.spark.datasource import BatchWriter
    from kafka_sink.spark.write import PlannedWrite
    options = parse({"kafka.bootstrap.servers": "127.0.0.1:1", "topic": "t"}).options
    try:
        BatchWriter(PlannedWrite(options, ColumnPlan.of([("value", "string")], "t"))).write(iter(()))
    except KafkaSinkError as error:
        print("".join(traceback.format_exception(error)))
"""


def test_a_task_without_a_library_names_the_line_for_pip() -> None:
    """Catches: "No module named 'lz4'" below a stack of imports, where --py-files shipped no library."""
    printed = printed_by(_WITHOUT_LZ4)
    assert "Set PYSPARK_PYTHON to a Python that has them" in printed
    assert f"{sys.executable} -m pip install lz4" in printed
    assert printed.count("Traceback (most recent call last)") == 1
