"""Finds the known option that a misspelt name is meant to be."""

from __future__ import annotations

from collections.abc import Iterable

# A name with fewer characters per edit than this is another word: "session" is not "transaction".
_CHARACTERS_PER_EDIT = 3
_MAX_EDITS = 3


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that ``name`` is the beginning of, or differs from by a few edits; None without one.

    An edit inserts, removes or replaces a character, or swaps two neighbours. The characters ``.``, ``_`` and
    ``-`` do not count.
    """
    plain = _plain(name)
    bound = min(_MAX_EDITS, len(plain) // _CHARACTERS_PER_EDIT)
    candidates = []
    for option in known:
        if option.startswith(f"{name}."):
            candidates.append((0, len(option), option))
        elif abs(len(_plain(option)) - len(plain)) <= bound:
            edits = _edits(plain, _plain(option))
            if edits <= bound:
                candidates.append((edits, len(option), option))
    return min(candidates)[2] if candidates else None


def _plain(name: str) -> str:
    return name.lower().replace(".", "").replace("_", "").replace("-", "")


def _edits(left: str, right: str) -> int:
    """The number of edits between two texts (optimal string alignment)."""
    before, row = list[int](), list(range(len(right) + 1))
    for i, a in enumerate(left, 1):
        before, last, row = row, before, [i]
        for j, b in enumerate(right, 1):
            edits = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (a != b))
            if i > 1 and j > 1 and a == right[j - 2] and left[i - 2] == b:
                edits = min(edits, last[j - 2] + 1)
            row.append(edits)
    return row[-1]
