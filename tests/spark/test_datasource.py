"""Mistakes of users, as planning meets them: one line of the driver's log says what to do.

Those about logins, certificates and brokers are in ``tests/security/test_secured_broker.py``, what tasks and
streams print around the line in ``tests/security/test_secured_spark.py``.
"""

from __future__ import annotations

import re

import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from kafka_sink.errors import KafkaSinkError
from kafka_sink.spark.datasource import KafkaChunkedDataSource
from tests.support.ports import refusing_port

pytestmark = pytest.mark.usefixtures("bare_logging")
GIVEN = {"kafka.bootstrap.servers": "127.0.0.1:1", "topic": "t", "kafka.max.block.ms": "100"}
VALUE: dict[str, DataType] = {"value": StringType()}
COLUMNS: dict[str, tuple[dict[str, DataType], str]] = {
    "no value": ({"data": StringType()}, r"among the columns data: rename one to 'value'"),
    "Value": ({"Value": StringType()}, r"withColumnRenamed\('Value', 'value'\)"),
    "value as number": ({"value": LongType()}, r"col\('value'\)\.cast\('string'\)"),
    "value as struct": ({"value": StructType()}, r"to_json\('value'\)"),
    "key as number": ({**VALUE, "key": IntegerType()}, r"col\('key'\)\.cast\('string'\)"),
    "partition as long": ({**VALUE, "partition": LongType()}, r"col\('partition'\)\.cast\('int'\)"),
    "timestamp as number": ({**VALUE, "timestamp": LongType()}, r"timestamp_millis\('timestamp'\)"),
    "timestamp without zone": ({**VALUE, "timestamp": TimestampNTZType()}, r"cast\('timestamp'\)"),
    "headers as map": ({**VALUE, "headers": MapType(StringType(), StringType())}, r"transform\(map_entries"),
    "headers as texts": ({**VALUE, "headers": ArrayType(StringType())}, r"headers must be"),
}
OPTIONS = {
    "topic=": r"'topic' is empty",
    "topic=my topic": r"ASCII letters, digits",
    "kafka.acsk=all": r"did you mean 'kafka\.acks'\?",
    "delivery.guarante=exactly-once": r"mean 'delivery\.guarantee'\?",
    "errors.tolerence=all": r"mean 'errors\.tolerance'\?",
    "max.rows.per.secnd=5": r"mean 'max\.rows\.per\.second'\?",
    "kafka.topic=t": r"did you mean 'topic'",
    "security.protocol=SSL": r"write 'kafka\.security\.protocol'",
    "acks=all": r"write 'kafka\.acks'",
    "batch.size=1MiB": r"write 'kafka\.batch\.size'",
    "compression.type=lz4": r"write 'kafka\.compression\.type'",
    "kafka.linger.ms=soon": r"'kafka\.linger\.ms' is not a whole number",
    "kafka.linger.ms=1MiB": r"unit of ms, s, min, h, d",
    "kafka.batch.size=1MB": r"KiB, MiB, GiB \(did you mean 1MiB\?\)",
    "kafka.batch.size=-5": r"out of bounds \(allowed: ",
    "kafka.compression.type=lzma": r"is not one of none, gzip",
    "kafka.enable.idempotence=yes": r"must be true or false",
    "kafka.bootstrap.servers=broker": r"is not host:port",
    "kafka.bootstrap.servers=u:p@h:1": r"credentials do not belong",
    "kafka.bootstrap.servers=http://h:1": r"http:// in front of its address",
    "kafka.bootstrap.servers=h:1;i:2": r"has a ';' between its addresses",
    "kafka.bootstrap.servers=SSL://h:1": r"kafka\.security\.protocol is",
    "kafka.value.serializer=x": r"the column 'value' is sent as it is",
    "kafka.partitioner.class=x.Y": r"compute the partition in a column 'partition'",
    "kafka.transactional.id=x": r"delivery\.guarantee=exactly-once",
    "topic.partitions=4": r"no effect without topic\.create=true",
    "topic.config.retention.ms=4": r"no effect without topic\.create=true",
    "kafka.sasl.password=x": r"kafka\.security\.protocol",
    "delivery.report.path=hdfs:///x": r"only files on the driver's host",
    "delivery.report.path=/nowhere/x": r"No such file or directory",
}
MISTAKES: dict[str, tuple[dict[str, DataType], dict[str, str], str]] = {
    **{name: (columns, {}, pattern) for name, (columns, pattern) in COLUMNS.items()},
    **{one: (VALUE, dict([one.split("=", 1)]), pattern) for one, pattern in OPTIONS.items()},
}


def test_planning_error_is_logged_in_one_line_with_a_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    for mistake, (columns, options, pattern) in MISTAKES.items():
        schema = StructType([StructField(name, kind) for name, kind in columns.items()])
        with pytest.raises(KafkaSinkError) as caught:
            KafkaChunkedDataSource(GIVEN | options).writer(schema, False)
        (line,) = capsys.readouterr().err.splitlines()
        assert re.search(rf"^\S+ \S+ ERROR kafka-chunked: .*{pattern}", line), mistake
        assert line.endswith(str(caught.value)), mistake


def test_a_stream_is_named_by_its_checkpoint_and_overwriting_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    schema = StructType([StructField("value", BinaryType()), StructField("timestamp", TimestampType())])
    with refusing_port() as port:
        given = GIVEN | {"kafka.bootstrap.servers": f"127.0.0.1:{port}"}
        given["checkpointlocation"] = "/data/checkpoints/orders"
        with pytest.raises(KafkaSinkError):
            KafkaChunkedDataSource(given).streamWriter(schema, False)
    last = capsys.readouterr().err.splitlines()[-1]
    assert "kafka-chunked, stream with checkpointLocation=/data/checkpoints/orders: could not connect" in last
    assert "nothing listens there: check host and port" in last
    with pytest.raises(KafkaSinkError):
        KafkaChunkedDataSource(given).writer(schema, True)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("Use mode('append').")
    assert "checkpointLocation" not in last, "a batch write shares its options with a stream"


def test_an_option_of_the_source_is_not_taken_for_the_topic(capsys: pytest.CaptureFixture[str]) -> None:
    given = {"kafka.bootstrap.servers": "127.0.0.1:1", "subscribe": "t"}
    with pytest.raises(KafkaSinkError):
        KafkaChunkedDataSource(given).writer(StructType([StructField("value", StringType())]), False)
    warning, error = capsys.readouterr().err.splitlines()
    assert warning.endswith("Unknown options are ignored: subscribe (did you mean 'topic'?)")
    assert error.endswith("Use the topic option for setting a topic.")
