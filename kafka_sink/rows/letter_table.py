"""Dead letters as rows of the dead letter topic.

The context headers are those of Kafka Connect's sink connectors (KIP-298), as far as a row of a DataFrame has
them.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from kafka_sink.dead_letters.context_headers import CUT_PREFIX, NAME, PREFIX, STAGE, is_context
from kafka_sink.dead_letters.letter import DeadLetter, Header, RefusedLetter
from kafka_sink.model import NO_TIMESTAMP
from kafka_sink.rows.column_plan import HEADERS_TYPE, ColumnPlan

_MAX_REASON = 500
# A batch has a header, a record has lengths and deltas, and a header of a record has two lengths.
_OVERHEAD = 256
_HEADER_OVERHEAD = 12
_COLUMNS = (("key", "binary"), ("value", "binary"), ("headers", HEADERS_TYPE), ("timestamp", "timestamp"))


def letter_plan(topic: str) -> ColumnPlan:
    """The plan of the tables that ``letter_table`` makes."""
    return ColumnPlan.of(_COLUMNS, topic)


def letter_table(letters: Sequence[DeadLetter | RefusedLetter], max_bytes: int, task: str) -> pa.Table:
    """One row per letter. A letter of more than ``max_bytes`` is cut, and headers say so.

    ``task`` identifies the Spark task.
    """
    schema = pa.schema(
        [
            ("key", pa.binary()),
            ("value", pa.binary()),
            ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
            ("timestamp", pa.timestamp("us", tz="UTC")),
        ]
    )
    return pa.Table.from_pylist([_row(letter, max_bytes, task) for letter in letters], schema)


def _row(letter: DeadLetter | RefusedLetter, max_bytes: int, task: str) -> dict[str, object]:
    context: list[Header] = []
    own = letter.headers
    if isinstance(letter, RefusedLetter):
        context = [header for header in own if is_context(header)]
        own = tuple(header for header in own if not is_context(header))
    else:
        context = _context(letter, task)
    left = max_bytes - _OVERHEAD - _size(context)
    if _size(own) > left // 4:
        _note_cut("headers.dropped", len(own), context)
        own = ()
    left -= _size(own)
    # The key identifies the row, and most keys are far shorter than that.
    key = _cut(letter.key, left // 4, "key.length", context)
    left -= len(key or b"")
    value = _cut(letter.value, left, "value.length", context)
    return {
        "key": key,
        "value": value,
        "headers": [{"key": name, "value": content} for name, content in (*own, *context)],
        # The present time. The row's own may be why it was refused, or so old that the letter is soon
        # deleted.
        "timestamp": None,
    }


def _context(letter: DeadLetter, task: str) -> list[Header]:
    known = {
        "topic": letter.topic,
        "partition": None if letter.partition < 0 else str(letter.partition),
        "connector.name": NAME,
        "task.id": task,
        "stage": STAGE,
        "class.name": "kafka_sink",
        "exception.class.name": letter.error,
        "exception.message": letter.reason[:_MAX_REASON],
    }
    context: list[Header] = [
        (PREFIX + name, text.encode()) for name, text in known.items() if text is not None
    ]
    if letter.timestamp_ms != NO_TIMESTAMP:
        context.append((CUT_PREFIX + "timestamp", str(letter.timestamp_ms).encode()))
    return context


def _size(headers: Sequence[Header]) -> int:
    return sum(len(name.encode()) + len(content or b"") + _HEADER_OVERHEAD for name, content in headers)


def _cut(content: bytes | None, limit: int, name: str, context: list[Header]) -> bytes | None:
    if content is None or len(content) <= limit:
        return content
    _note_cut(name, len(content), context)
    return content[: max(limit, 0)]


def _note_cut(name: str, amount: int, context: list[Header]) -> None:
    """Says how much there was before the first cut."""
    if all(known != CUT_PREFIX + name for known, _ in context):
        context.append((CUT_PREFIX + name, str(amount).encode()))
