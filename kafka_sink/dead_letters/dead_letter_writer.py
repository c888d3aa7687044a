"""Writes dead letters for rows that can never be written, while other rows are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from kafka_sink.dead_letters.rejected_rows import (
    CUT_PREFIX,
    HEADER_OVERHEAD,
    NAME,
    PREFIX,
    STAGE,
    DeadLetters,
    OwnHeaders,
    RejectedRows,
)
from kafka_sink.dead_letters.row_rejection import headers_with
from kafka_sink.errors import BufferExhaustedError, DeliveryError, InvalidRowError, MetadataTimeoutError
from kafka_sink.model import NO_TIMESTAMP
from kafka_sink.options.values import TOPIC_MAX_LENGTH
from kafka_sink.records.arrays import (
    Bools,
    Int64s,
    indices,
    lengths,
    null_mask,
    offsets,
    spans,
    values_buffer,
    with_nulls,
)
from kafka_sink.records.ordered_rows import OrderedRows
from kafka_sink.rows.column_plan import HEADERS_TYPE, ColumnPlan


class DeadLetterWriter:
    """Writes dead letters on the task's thread, even while that thread waits with other rows. ``append`` may
    block, but never for the memory for which those rows wait."""

    def __init__(
        self,
        dead_letters: DeadLetters,
        order: Callable[[ColumnPlan, pa.Table], OrderedRows],
        append: Callable[[OrderedRows], None],
    ) -> None:
        self._dead_letters = dead_letters
        self._order = order
        self._append = append
        self._is_writing = False

    def write(self) -> None:
        """Append the dead letters of all waiting rows, about 1 MiB at a time. Raises DeliveryError if they
        cannot be written, and BufferExhaustedError if there is no memory for them within max.block.ms."""
        dead_letters = self._dead_letters
        if dead_letters.topic is None or self._is_writing or not dead_letters.is_waiting:
            return
        # Appending them may also wait, and every wait calls this method, so calls could nest.
        self._is_writing = True
        try:
            plan = dead_letter_plan(dead_letters.topic)
            for rows in self._waiting():
                self._write(
                    plan,
                    dead_letter_table(rows, dead_letters.max_bytes, dead_letters.task),
                    dead_letters.topic,
                )
        finally:
            self._is_writing = False

    def _waiting(self) -> Iterator[RejectedRows]:
        while (rejected := self._dead_letters.take()) is not None:
            yield from slices(rejected)

    def _write(self, plan: ColumnPlan, table: pa.Table, topic: str) -> None:
        try:
            ordered = self._order(plan, table)
        except (InvalidRowError, MetadataTimeoutError) as error:
            raise DeliveryError(
                f"{table.num_rows} dead letters cannot be written to errors.deadletterqueue.topic.name = "
                f"{topic!r}: {error}"
            ) from error
        try:
            self._append(ordered)
        except BufferExhaustedError:
            # The original message is about kafka.buffer.memory, which dead letters do not use.
            raise BufferExhaustedError(
                f"no memory for {table.num_rows} dead letters for errors.deadletterqueue.topic.name = "
                f"{topic!r} within kafka.max.block.ms. They have their own memory, which is in use until "
                "brokers acknowledge them. The brokers of that topic accept dead letters more slowly than "
                "rows are rejected, or do not respond"
            ) from None


# Tables of dead letters. The context headers are those of Kafka Connect's sink connectors (KIP-298), as far
# as they make sense for a row of a DataFrame.
_MAX_REASON = 500
# Room for a batch's header, a record's lengths and deltas, and the two lengths of each of its headers.
_OVERHEAD = 256
# The approximate size of a dead letter's context headers.
_CONTEXT_BYTES = 600
# The size of the dead letters that are made together. Several copies exist until they are in batches.
_TABLE_BYTES = 1 << 20
_COLUMNS = (("key", "binary"), ("value", "binary"), ("headers", HEADERS_TYPE))


class _Header(NamedTuple):
    """A context header of all dead letters: one value, or an array in which null omits it."""

    name: bytes
    value: bytes | pa.Array

    def sizes(self) -> Int64s | int:
        """The number of bytes that the header takes in each dead letter."""
        if isinstance(self.value, bytes):
            return len(self.name) + len(self.value) + HEADER_OVERHEAD
        present = ~null_mask(self.value)
        return present * (len(self.name) + HEADER_OVERHEAD) + lengths(self.value).astype(np.int64)


def dead_letter_plan(topic: str) -> ColumnPlan:
    """The plan for tables that ``dead_letter_table`` makes. Dead letters get the current time. The row's own
    timestamp may be the reason for the rejection, or so old that the dead letter would soon be deleted."""
    return ColumnPlan.of(_COLUMNS, topic)


def slices(rows: RejectedRows) -> Iterator[RejectedRows]:
    """Slices of the rows, each with about 1 MiB of dead letters or one row."""
    before = np.concatenate(([0], np.cumsum(rows.sizes + _CONTEXT_BYTES)))
    start = 0
    while start < rows.count:
        stop = int(np.searchsorted(before, before[start] + _TABLE_BYTES, side="right")) - 1
        stop = max(stop, start + 1)
        yield rows.slice(start, stop)
        start = stop


def dead_letter_table(rows: RejectedRows, max_bytes: int, task: str) -> pa.Table:
    """Make one dead letter for each row. A dead letter above ``max_bytes`` is cut, and headers report this.
    ``task`` identifies the Spark task."""
    context = _context(rows, task)
    left = np.full(rows.count, max_bytes - _OVERHEAD, dtype=np.int64)
    for header in context:
        left -= header.sizes()

    def note_cut(name: bytes, amounts: Int64s, cut: Bools) -> None:
        """Add a header with the original amounts, for the rows that were cut."""
        if cut.any():
            context.append(_Header(CUT_PREFIX + name, _texts(amounts, ~cut)))

    own = rows.headers
    dropped = (own.sizes > left // 4) & (own.counts > 0)
    note_cut(b"headers.dropped", own.counts, dropped)
    left -= np.where(dropped, 0, own.sizes)
    own = _without(own, dropped) if dropped.any() else own
    # The key identifies the row. Most keys are far shorter than a quarter of the dead letter.
    key, sizes, cut = _cut(rows.key, np.maximum(left // 4, 0))
    note_cut(b"key.length", sizes, cut)
    left -= lengths(key)
    value, sizes, cut = _cut(rows.value, np.maximum(left, 0))
    note_cut(b"value.length", sizes, cut)
    headers = headers_with(own.kept, own.keys, own.values, context)
    return pa.Table.from_arrays([key, value, headers], ["key", "value", "headers"])


def _context(rows: RejectedRows, task: str) -> list[_Header]:
    # A column of topics may contain texts that are longer than any topic name.
    topic, _, _ = _cut(rows.topic, np.full(rows.count, TOPIC_MAX_LENGTH, dtype=np.int64))
    known: dict[bytes, bytes | pa.Array] = {
        b"topic": topic,
        b"partition": _texts(rows.partition, rows.partition < 0),
        b"connector.name": NAME,
        b"task.id": task.encode(),
        b"stage": STAGE,
        b"class.name": b"kafka_sink",
        b"exception.class.name": rows.error.encode(),
        b"exception.message": rows.reason[:_MAX_REASON].encode(errors="replace"),
    }
    times = _texts(rows.timestamps_ms, rows.timestamps_ms == NO_TIMESTAMP)
    context = [_Header(PREFIX + name, value) for name, value in known.items()]
    return [*context, _Header(CUT_PREFIX + b"timestamp", times)]


def _texts(numbers: Int64s, nulls: Bools) -> pa.Array:
    array = pa.Array.from_buffers(
        pa.int64(), len(numbers), [None, pa.py_buffer(np.ascontiguousarray(numbers))]
    )
    return with_nulls(array.cast(pa.string()).cast(pa.binary()), nulls)


def _cut(content: pa.Array, limits: Int64s) -> tuple[pa.Array, Int64s, Bools]:
    """The first ``limits[i]`` bytes of each entry, their original lengths, and which of them were longer."""
    sizes = lengths(content).astype(np.int64)
    cut = sizes > limits
    if not cut.any():
        return content, sizes, cut
    starts = offsets(content)[:-1]
    nulls = null_mask(content) if content.null_count else None
    return spans(values_buffer(content), starts, starts + np.minimum(sizes, limits), nulls), sizes, cut


def _without(own: OwnHeaders, dropped: Bools) -> OwnHeaders:
    entries = indices(np.flatnonzero(np.repeat(~dropped, own.kept)))
    left = np.where(dropped, 0, own.kept)
    return replace(own, kept=left, keys=own.keys.take(entries), values=own.values.take(entries))
