"""A producer that keeps the tables it is sent, and batches for it."""

from __future__ import annotations

import threading

import pyarrow as pa


class FakeProducer:
    def __init__(self) -> None:
        self.units: list[pa.Table] = []
        self.came = threading.Event()

    def write_dead_letters(self) -> bool:
        return False

    def send(self, unit: pa.Table) -> int:
        self.units.append(unit)
        self.came.set()
        return 1

    @property
    def values(self) -> list[str]:
        return [value for unit in self.units for value in unit.column(0).to_pylist()]


def batch(*values: str) -> pa.RecordBatch:
    return pa.record_batch([pa.array([0] * len(values)), pa.array(values)], names=["extra", "value"])
