"""The encoder's limits as small as few rows need them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from kafka_sink.records import encoder


@contextmanager
def small_limits(*, ranges: bool = False, sliced: bool = False, joined: bool = False) -> Iterator[None]:
    """Within the block, ``ranges`` of any size are encoded apart, or rows of any size are ``sliced`` or
    ``joined``."""
    changes = [
        ("_MIN_RANGE_ROWS", 1, ranges),
        ("_SLICED_ROW_BYTES", 0, sliced),
        ("_JOINED_ROW_BYTES", 0, joined),
    ]
    with ExitStack() as limits:
        for name, limit, is_wanted in changes:
            if is_wanted:
                limits.enter_context(patch.object(encoder, name, limit))
        yield
