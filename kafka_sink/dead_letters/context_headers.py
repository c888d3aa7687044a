"""The headers that say of a dead letter what it is and why, as Kafka Connect has them (KIP-298)."""

from __future__ import annotations

from collections.abc import Sequence

from kafka_sink.dead_letters.letter import Header, RefusedLetter

PREFIX = "__connect.errors."
# Not Kafka Connect's: the row's own timestamp, and what was cut off.
CUT_PREFIX = "kafka-chunked.errors."
# Kafka Connect's name for the step that failed.
STAGE = "KAFKA_PRODUCE"
NAME = "kafka-chunked"
_CONNECTOR = PREFIX + "connector.name"
_CONTEXT = frozenset(
    PREFIX + name
    for name in (
        *("topic", "partition", "connector.name", "task.id", "stage", "class.name"),
        *("exception.class.name", "exception.message"),
    )
) | frozenset(CUT_PREFIX + name for name in ("timestamp", "key.length", "value.length", "headers.dropped"))


def is_letter(headers: Sequence[Header]) -> bool:
    """Whether a record of the dead letter topic is a letter of this sink, and no row of the user's own."""
    return (_CONNECTOR, NAME.encode()) in headers


def can_be_cut(letter: RefusedLetter) -> bool:
    """Whether a letter has more than its context."""
    return bool(letter.key or letter.value) or not all(map(is_context, letter.headers))


def is_context(header: Header) -> bool:
    """Whether the sink gave a letter this header."""
    return header[0] in _CONTEXT
