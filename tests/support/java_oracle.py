"""Runs Oracle.java against the kafka-clients jar: many cases in one JVM."""

from __future__ import annotations

import struct
import subprocess
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

from kafka_sink.local_broker import LocalBroker

Text = bytes | None


@dataclass(frozen=True)
class Row:
    timestamp: int
    key: Text
    value: Text
    headers: tuple[tuple[bytes, Text], ...] = ()


@dataclass(frozen=True)
class Batch:
    rows: tuple[Row, ...]
    producer_id: int = -1
    producer_epoch: int = -1
    base_sequence: int = -1
    codec: int = field(default=0, compare=False)


class JavaOracle:
    """Kafka's classes; ``folder`` takes the exchanged files."""

    def __init__(self, broker: LocalBroker, folder: Path) -> None:
        self._broker = broker
        self._folder = folder

    def build(self, batches: list[Batch]) -> list[bytes]:
        """The uncompressed bytes that MemoryRecordsBuilder makes of each batch."""
        body = b"".join(_batch(batch) for batch in batches)
        reader = BytesIO(self._run("build", len(batches), body))
        return [_read_text(reader) or b"" for _ in batches]

    def read(self, encoded: list[bytes]) -> list[Batch]:
        """What Kafka reads from each batch; raises where it finds one invalid."""
        reader = BytesIO(self._run("read", len(encoded), b"".join(_text(data) for data in encoded)))
        return [_read_batch(reader) for _ in encoded]

    def murmur2(self, keys: list[bytes]) -> list[int]:
        """Utils.murmur2 as unsigned numbers."""
        response = self._run("hash", len(keys), b"".join(_text(key) for key in keys))
        return list(struct.unpack(f">{len(keys)}I", response))

    def _run(self, verb: str, cases: int, body: bytes) -> bytes:
        source = Path(__file__).with_name("Oracle.java")
        asked, answered = self._folder / "asked", self._folder / "answered"
        asked.write_bytes(struct.pack(">i", cases) + body)
        command = [
            self._broker.java,
            "-cp",
            self._broker.classpath,
            str(source),
            verb,
            str(asked),
            str(answered),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return answered.read_bytes()


def _text(data: Text) -> bytes:
    return struct.pack(">i", -1) if data is None else struct.pack(">i", len(data)) + data


def _batch(batch: Batch) -> bytes:
    head = struct.pack(">qhii", batch.producer_id, batch.producer_epoch, batch.base_sequence, len(batch.rows))
    return head + b"".join(_row(row) for row in batch.rows)


def _row(row: Row) -> bytes:
    headers = b"".join(_text(key) + _text(value) for key, value in row.headers)
    return (
        struct.pack(">q", row.timestamp)
        + _text(row.key)
        + _text(row.value)
        + struct.pack(">i", len(row.headers))
        + headers
    )


def _unpack(reader: BytesIO, form: str) -> tuple[int, ...]:
    return struct.unpack(form, reader.read(struct.calcsize(form)))


def _read_text(reader: BytesIO) -> Text:
    (length,) = _unpack(reader, ">i")
    return None if length < 0 else reader.read(length)


def _read_batch(reader: BytesIO) -> Batch:
    codec, producer_id, epoch, sequence, count = _unpack(reader, ">iqhii")
    rows = []
    for _ in range(count):
        (timestamp,) = _unpack(reader, ">q")
        key, value = _read_text(reader), _read_text(reader)
        (headers,) = _unpack(reader, ">i")
        pairs = tuple((_read_text(reader) or b"", _read_text(reader)) for _ in range(headers))
        rows.append(Row(timestamp, key, value, pairs))
    return Batch(tuple(rows), producer_id, epoch, sequence, codec)
