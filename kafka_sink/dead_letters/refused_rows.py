"""Rows that can never be written, while they wait for their letters. In columns, as there may be many."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import pyarrow as pa


# Spark's strings may be no UTF-8, so the names of headers are bytes.
Header = tuple[bytes, bytes | None]

Int64s = npt.NDArray[np.int64]
# A row beside its content: lengths, timestamp, partition.
_ROW_BYTES = 32


@dataclass(frozen=True, slots=True)
class OwnHeaders:
    """The headers that rows had: row i ``counts[i]`` of them, which take ``sizes[i]`` bytes in a letter.

    ``keys`` (binary, no nulls) and ``values`` (binary) are those of all rows. ``held[i]`` are of row i: all
    that it had, or none where they are too many for any letter.
    """

    counts: Int64s
    held: Int64s
    sizes: Int64s
    keys: pa.Array
    values: pa.Array

    def slice(self, start: int, stop: int) -> OwnHeaders:
        """Those of rows ``start`` to ``stop``."""
        first, last = int(self.held[:start].sum()), int(self.held[:stop].sum())
        return OwnHeaders(
            self.counts[start:stop],
            self.held[start:stop],
            self.sizes[start:stop],
            self.keys.slice(first, last - first),
            self.values.slice(first, last - first),
        )


@dataclass(frozen=True, slots=True)
class RefusedRows:
    """Rows of which each has the same flaw. Arrays have one entry a row; None: no row has this part.

    ``key``, ``value`` and a ``topic`` by row are binary, ``partition`` is -1 where none was chosen,
    ``timestamps_ms`` are milliseconds since the epoch, NO_TIMESTAMP where a row has none. ``sizes`` are about
    the bytes of each row. ``reason`` says what is wrong with a row, ``error`` is the exception's class.
    ``context`` are the context headers of a letter that its topic refused, where the row is such a letter.
    """

    key: pa.Array | None
    value: pa.Array
    headers: OwnHeaders | None
    topic: pa.Array | str | None
    partition: Int64s | int
    timestamps_ms: Int64s | int
    sizes: Int64s
    reason: str
    error: str
    context: tuple[Header, ...] | None = None

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.value)

    @property
    def held_bytes(self) -> int:
        """About the memory that they take."""
        return int(self.sizes.sum()) + self.count * _ROW_BYTES

    def topic_of(self, row: int) -> str | None:
        """The topic that a row was for."""
        if self.topic is None or isinstance(self.topic, str):
            return self.topic
        name = self.topic[row].as_py()
        return None if name is None else name.decode(errors="replace")

    def counts_by_topic(self) -> list[tuple[str, int]]:
        """Rows by the topic that they were for, "" where it was null."""
        if self.topic is None or isinstance(self.topic, str):
            return [(self.topic or "", self.count)]
        counted = self.topic.value_counts()
        names = [(one or b"").decode(errors="replace") for one in counted.field(0).to_pylist()]
        return list(zip(names, counted.field(1).to_pylist(), strict=True))

    def slice(self, start: int, stop: int) -> RefusedRows:
        """Rows ``start`` to ``stop``."""
        by_row = not (self.topic is None or isinstance(self.topic, str))
        return replace(
            self,
            key=None if self.key is None else self.key.slice(start, stop - start),
            value=self.value.slice(start, stop - start),
            headers=None if self.headers is None else self.headers.slice(start, stop),
            topic=self.topic.slice(start, stop - start) if by_row else self.topic,  # type: ignore[union-attr]
            partition=self.partition if isinstance(self.partition, int) else self.partition[start:stop],
            timestamps_ms=(
                self.timestamps_ms if isinstance(self.timestamps_ms, int) else self.timestamps_ms[start:stop]
            ),
            sizes=self.sizes[start:stop],
        )


@dataclass(frozen=True, slots=True)
class RefusedRecords:
    """Rows that a broker refused, as encoded: record i is ``bodies[ends[i - 1]:ends[i]]``, from its key's
    length on. Otherwise as RefusedRows."""

    bodies: bytes | bytearray
    ends: Int64s
    topic: str
    partition: int
    timestamps_ms: Int64s
    reason: str
    error: str

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.ends)

    @property
    def held_bytes(self) -> int:
        """About the memory that they take."""
        return len(self.bodies) + self.count * _ROW_BYTES

    def topic_of(self, row: int) -> str:
        """The topic that a row was for."""
        return self.topic

    def counts_by_topic(self) -> list[tuple[str, int]]:
        """Rows by the topic that they were for."""
        return [(self.topic, self.count)]


@dataclass(frozen=True, slots=True)
class RefusedLetter:
    """A letter that the dead letter topic refused as too large, with its context in ``headers``."""

    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]


Refused = RefusedRows | RefusedRecords


# -- the headers that say of a dead letter what it is and why, as Kafka Connect has them (KIP-298) ----------


PREFIX = b"__connect.errors."
# Not Kafka Connect's: the row's own timestamp, and what was cut off.
CUT_PREFIX = b"kafka-chunked.errors."
# Kafka Connect's name for the step that failed.
STAGE = b"KAFKA_PRODUCE"
NAME = b"kafka-chunked"
# Bytes of a record's header beside its key and value: two lengths, and some to spare.
HEADER_OVERHEAD = 12
_CONTEXT = frozenset(
    PREFIX + name
    for name in (
        *(b"topic", b"partition", b"connector.name", b"task.id", b"stage", b"class.name"),
        *(b"exception.class.name", b"exception.message"),
    )
) | frozenset(
    CUT_PREFIX + name for name in (b"timestamp", b"key.length", b"value.length", b"headers.dropped")
)


def can_be_cut(letter: RefusedLetter) -> bool:
    """Whether a letter has more than its context."""
    return bool(letter.key or letter.value) or not all(map(is_context, letter.headers))


def is_context(header: Header) -> bool:
    """Whether the sink gave a letter this header."""
    return header[0] in _CONTEXT
