"""Writes the letters of rows that can never be written, while other rows go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa

from kafka_sink.dead_letters.collector import DeadLetters
from kafka_sink.dead_letters.refused_rows import RefusedLetter, RefusedRecords, RefusedRows
from kafka_sink.errors import BufferExhaustedError, DeliveryError, InvalidRowError, MetadataTimeoutError
from kafka_sink.records.ordered_rows import OrderedRows
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.rows.letter_table import letter_plan, letter_table, pieces
from kafka_sink.rows.refused_columns import rows_of_letter, rows_of_records


class LetterWriter:
    """Used by the task's thread, also while it waits with other rows.

    ``append`` may block, but not for the memory for which those rows wait.
    """

    def __init__(
        self,
        letters: DeadLetters,
        order: Callable[[ColumnPlan, pa.Table], OrderedRows],
        append: Callable[[OrderedRows], None],
    ) -> None:
        self._letters = letters
        self._order = order
        self._append = append
        self._is_writing = False

    def write(self) -> bool:
        """Appends the letters of all rows that wait, about 1 MiB at once; returns whether there were any.

        Raises DeliveryError where they cannot be written, BufferExhaustedError where there is no memory for
        them within max.block.ms.
        """
        letters = self._letters
        if letters.topic is None or self._is_writing or not letters.is_waiting:
            return False
        # Appending them waits, too, and whatever waits looks here.
        self._is_writing = True
        try:
            plan = letter_plan(letters.topic)
            for rows in self._waiting():
                # Its topic may have refused the ones before as too large.
                self._write(plan, letter_table(rows, letters.max_bytes, letters.task), letters.topic)
        finally:
            self._is_writing = False
        return True

    def _waiting(self) -> Iterator[RefusedRows]:
        while (refused := self._letters.take()) is not None:
            if isinstance(refused, RefusedLetter):
                yield rows_of_letter(refused)
                continue
            if isinstance(refused, RefusedRecords):
                refused = rows_of_records(refused, self._letters.max_bytes)
            yield from pieces(refused)

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
            # Its text is about kafka.buffer.memory, which letters do not use.
            raise BufferExhaustedError(
                f"no memory for {table.num_rows} dead letters for errors.deadletterqueue.topic.name = "
                f"{topic!r} within kafka.max.block.ms. They have memory of their own, which letters hold "
                "until brokers acknowledge them: the brokers of that topic take letters more slowly than "
                "rows are refused, or do not respond"
            ) from None
