"""Runs Oracle.java against the kafka-clients jar: many cases in one JVM."""

from __future__ import annotations

import struct
import subprocess
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

from local_kafka import LocalBroker

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


class JavaOracle(AbstractContextManager["JavaOracle"]):
    """Kafka's classes in a JVM, within a ``with`` block; ``folder`` takes the exchanged files."""

    def __init__(self, broker: LocalBroker, folder: Path) -> None:
        self._asked, self._answered = folder / "asked", folder / "answered"
        source = Path(__file__).with_name("Oracle.java")
        command = [broker.java, "-cp", broker.classpath, str(source), str(self._asked), str(self._answered)]
        self._log = (folder / "log").open("w+")
        self._jvm = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )

    def __exit__(self, *_: object) -> None:
        with self._log, self._jvm:
            self._jvm.kill()

    def build(self, batches: list[Batch]) -> list[bytes]:
        body = b"".join(_batch(batch) for batch in batches)
        reader = BytesIO(self._run("build", len(batches), body))
        return [_read_text(reader) or b"" for _ in batches]

    def read(self, encoded: list[bytes]) -> list[Batch]:
        reader = BytesIO(self._run("read", len(encoded), b"".join(_text(data) for data in encoded)))
        return [_read_batch(reader) for _ in encoded]

    def murmur2(self, keys: list[bytes]) -> list[int]:
        response = self._run("hash", len(keys), b"".join(_text(key) for key in keys))
        return list(struct.unpack(f">{len(keys)}I", response))

    def _run(self, verb: str, cases: int, body: bytes) -> bytes:
        self._asked.write_bytes(struct.pack(">i", cases) + body)
        assert self._jvm.stdin is not None
        assert self._jvm.stdout is not None
        self._jvm.stdin.write(f"{verb}\n")
        self._jvm.stdin.flush()
        if self._jvm.stdout.readline() != "done\n":
            self._jvm.wait(120)
            self._log.seek(0)
            raise AssertionError(self._log.read()[-3000:])
        return self._answered.read_bytes()


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
