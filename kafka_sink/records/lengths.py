"""How long the entries of a column are, with little work where all are equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_sink.records import arrays, varint

Ints = npt.NDArray[np.int32] | npt.NDArray[np.int64]
# Sums of three such numbers stay within 32 bits.
_MAX_NARROW = 1 << 29


@dataclass(frozen=True, slots=True)
class Lengths:
    """Bytes of ``count`` entries, 0 for null.

    ``each`` is None if all entries have ``largest`` bytes. No entry is below ``smallest`` or above
    ``largest``. Numbers are 32-bit where their range allows it, for half the memory traffic.
    """

    count: int
    smallest: int
    largest: int
    each: Ints | None = None

    @classmethod
    def of(cls, chunks: Sequence[pa.Array]) -> Lengths:
        """The lengths of a column that consists of these string or binary arrays."""
        found = [arrays.lengths(chunk) for chunk in chunks]
        return cls.from_numbers(found[0] if len(found) == 1 else _joined(found))

    @classmethod
    def from_numbers(cls, numbers: Ints) -> Lengths:
        """Lengths that are given as numbers."""
        if len(numbers) == 0:
            return cls(0, 0, 0)
        smallest, largest = int(numbers.min()), int(numbers.max())
        if smallest == largest:
            return cls(len(numbers), smallest, largest)
        return cls(len(numbers), smallest, largest, _as_narrow(numbers, largest))

    def take(self, order: npt.NDArray[np.integer]) -> Lengths:
        """The same entries in another order."""
        if self.each is None:
            return self
        return Lengths(self.count, self.smallest, self.largest, self.each.take(order))

    def slice(self, start: int, stop: int) -> Lengths:
        """Entries ``start`` to ``stop``."""
        each = None if self.each is None else self.each[start:stop]
        return Lengths(stop - start, self.smallest, self.largest, each)

    def numbers(self) -> Ints:
        """One number an entry."""
        return np.full(self.count, self.largest, dtype=np.int64) if self.each is None else self.each

    def total(self) -> int:
        """The sum of all entries."""
        return self.count * self.largest if self.each is None else int(self.each.sum(dtype=np.int64))

    def with_prefix(self) -> Lengths:
        """The lengths plus the bytes of each length as a varint, which are as many for a null's -1."""
        if self.each is None:
            return self.plus(len(varint.scalar(self.largest)))
        widths = varint.widths(self.each, self.smallest, self.largest)
        if isinstance(widths, int):
            return self.plus(widths)
        low, high = (size + len(varint.scalar(size)) for size in (self.smallest, self.largest))
        return Lengths(self.count, low, high, _as_narrow(self.each, high) + widths)

    def plus(self, other: Lengths | int) -> Lengths:
        """Entry by entry, the sum with another column's length or a constant."""
        if isinstance(other, int):
            other = Lengths(self.count, other, other)
        low, high = self.smallest + other.smallest, self.largest + other.largest
        if self.each is None and other.each is None:
            return Lengths(self.count, low, high)
        mine: Ints | int = self.largest if self.each is None else _as_narrow(self.each, high)
        theirs: Ints | int = other.largest if other.each is None else _as_narrow(other.each, high)
        each: Ints = np.add(mine, theirs)
        return Lengths(self.count, low, high, each)


def _joined(parts: list[Ints]) -> Ints:
    joined: npt.NDArray[Any] = np.concatenate(parts)
    return joined


def _as_narrow(numbers: Ints, largest: int) -> Ints:
    if largest <= _MAX_NARROW:
        return numbers.astype(np.int32, copy=False)
    return numbers.astype(np.int64, copy=False)
