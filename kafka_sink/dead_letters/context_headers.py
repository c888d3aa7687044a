"""The headers that say of a dead letter what it is and why, as Kafka Connect has them (KIP-298)."""

from __future__ import annotations

from kafka_sink.dead_letters.refused_rows import Header, RefusedLetter

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
