"""The columns of rows that become records, and the order in which they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from kafka_sink.records import varint
from kafka_sink.records.arrays import indices
from kafka_sink.records.lengths import Lengths
from kafka_sink.records.record_headers import encode_headers

# Attributes (1) + offset delta (3).
_FIXED_UPPER_BYTES = 1 + 3


@dataclass(frozen=True, slots=True)
class RecordColumns:
    """The columns of rows, and the order in which they are written.

    ``key``, ``headers`` (each row's encoded header section, count included) and the chunks of ``value`` hold
    the rows as they came. ``key`` and ``headers`` are None if no row has one. ``order`` is the position in
    the columns of each row that is written, in writing order; None: all rows are written as they came.

    The lengths are in writing order. ``payload`` are the bytes of key, value and headers with the varints of
    both lengths, where no headers count as 0.
    """

    key: pa.Array | None
    value: tuple[pa.Array, ...]
    headers: pa.Array | None
    key_lengths: Lengths
    value_lengths: Lengths
    payload: Lengths
    order: npt.NDArray[np.int32] | None = None

    @classmethod
    def of(cls, key: pa.Array | None, value: Sequence[pa.Array], headers: pa.Array | None) -> RecordColumns:
        """Rows as they came; ``headers`` as ``encode_headers`` takes them."""
        value_lengths = Lengths.of(value)
        key_lengths = Lengths(value_lengths.count, 0, 0) if key is None else Lengths.of([key])
        payload = key_lengths.with_prefix().plus(value_lengths.with_prefix())
        encoded = None
        if headers is not None:
            encoded, sizes = encode_headers(headers)
            payload = payload.plus(Lengths.from_numbers(sizes))
        return cls(key, tuple(value), encoded, key_lengths, value_lengths, payload)

    def __len__(self) -> int:
        return self.payload.count

    @property
    def has_nulls(self) -> bool:
        """Whether a key or value is null; False if no row has a key."""
        keyed = self.key is not None and self.key.null_count > 0
        return keyed or any(chunk.null_count for chunk in self.value)

    @property
    def body(self) -> Lengths:
        """Record bytes without the two deltas and the record's own length."""
        # The attributes and, without headers, their count.
        return self.payload.plus(2 if self.headers is None else 1)

    def upper_bounds(self, delta_bytes: int) -> Lengths:
        """Bytes that each record takes at most, whatever batch it goes to.

        ``delta_bytes`` is the widest timestamp delta possible among the rows at hand.
        """
        fixed = delta_bytes + _FIXED_UPPER_BYTES + (1 if self.headers is None else 0)
        # One number for all rows, because the bound need not be tight.
        return self.payload.plus(fixed + len(varint.scalar(self.payload.largest + fixed)))

    def ordered(self, order: npt.NDArray[np.integer]) -> RecordColumns:
        """The same rows in another order; only the lengths move."""
        return replace(
            self,
            key_lengths=self.key_lengths.take(order),
            value_lengths=self.value_lengths.take(order),
            payload=self.payload.take(order),
            order=(order if self.order is None else self.order[order]).astype(np.int32, copy=False),
        )

    def slice(self, start: int, stop: int) -> RecordColumns:
        """Rows ``start`` to ``stop`` in writing order. A small part is gathered, so that encoding it does
        not touch the rest."""
        count = stop - start
        if count == len(self):
            return self
        order = np.arange(start, stop, dtype=np.int32) if self.order is None else self.order[start:stop]
        part = replace(
            self,
            key_lengths=self.key_lengths.slice(start, stop),
            value_lengths=self.value_lengths.slice(start, stop),
            payload=self.payload.slice(start, stop),
            order=order,
        )
        return part if count > len(self) // 2 else part._gathered(indices(order))

    def _gathered(self, order: pa.Array) -> RecordColumns:
        taken = pa.chunked_array(self.value).take(order)
        return replace(
            self,
            key=None if self.key is None else self.key.take(order),
            value=tuple(taken.chunks),
            headers=None if self.headers is None else self.headers.take(order),
            order=None,
        )
