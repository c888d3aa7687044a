"""Errors of a task that cannot write its dead letters."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from kafka_sink.dead_letters.dead_letter_writer import DeadLetterWriter
from kafka_sink.dead_letters.rejected_rows import UNLIMITED, DeadLetters, RejectedRows
from kafka_sink.errors import BufferExhaustedError


def test_exhausted_memory_of_dead_letters_names_the_dead_letters_and_their_topic() -> None:
    """They have memory of their own, so kafka.buffer.memory is not to blame."""

    def append(_: object) -> None:
        raise BufferExhaustedError("no memory: 0 of kafka.buffer.memory = 8388608 bytes are free")

    dead_letters = DeadLetters("graveyard", UNLIMITED, 1 << 20)
    values, sizes = pa.array([b"v"] * 3, pa.binary()), pa.array([1] * 3).to_numpy()
    dead_letters.add(RejectedRows(None, values, None, "t", 0, 0, sizes, "too large", "RecordTooLargeError"))
    ordered: Any = None
    writer = DeadLetterWriter(dead_letters, lambda *_: ordered, append)
    with pytest.raises(BufferExhaustedError, match=r"3 dead letters.*topic\.name = 'graveyard'") as caught:
        writer.write()
    assert "buffer.memory" not in str(caught.value)
