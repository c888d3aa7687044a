"""Makes texts from brokers, rows and libraries safe for one line of a log or of an exception."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from itertools import islice

from kafka_sink.secret import redacted

MAX_CHARACTERS = 300
# Names, IPv4 and IPv6 addresses that a resolver may be asked for and that a log line may contain.
_HOST = re.compile(r"[\w.%:-]{1,255}")


def is_host(text: str) -> bool:
    """Whether the text may be a host's name or address."""
    return _HOST.fullmatch(text) is not None


def printable(text: str, limit: int = MAX_CHARACTERS) -> str:
    """Like ``one_line``, for texts of peers and libraries: known secrets are hidden in them."""
    return one_line(redacted(text), limit)


def one_line(text: str, limit: int = MAX_CHARACTERS) -> str:
    """At most ``limit`` characters of the text, on one line.

    Characters that are not printable become spaces: line ends, terminal escape codes, marks that change the
    writing direction. A text that was cut ends in "...".
    """
    cut = text[: limit - 3] + "..." if len(text) > limit else text
    return cut if cut.isprintable() else "".join(char if char.isprintable() else " " for char in cut)


def printable_list(texts: Iterable[str]) -> str:
    """The texts as ``printable`` returns them, separated by commas. Reads no more texts than it shows."""
    shown: list[str] = []
    length = 0
    for text in texts:
        if length > MAX_CHARACTERS:
            break
        shown.append(printable(text))
        length += len(shown[-1]) + 2
    return one_line(", ".join(shown))


def first_of(items: Collection[object], most: int = 5) -> str:
    """The texts of the first ``most`` items, separated by commas, and how many more there are."""
    more = f" and {len(items) - most:,} more" if len(items) > most else ""
    return ", ".join(map(str, islice(items, most))) + more
