"""A text that must not be seen: it shows itself as hidden wherever it is printed."""

from __future__ import annotations

import hmac
from typing import Any

HIDDEN = "[hidden]"


class HiddenBytes(bytes):
    """Bytes with secrets in them: error trackers collect the local variables of every frame."""

    def __repr__(self) -> str:
        return HIDDEN


class HiddenValues(dict[str, Any]):
    """A dictionary that shows its keys only, for options with secrets among them."""

    def __repr__(self) -> str:
        return f"{{{', '.join(map(repr, self))}: {HIDDEN}}}"


class Secret:
    """A password, key or token. Only ``reveal`` gives the text; ``repr``, ``str`` and ``format`` hide it.

    Hashable and picklable: options travel to executors, and producers are found by their options.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text itself; keep it in no variable that outlives its use."""
        return self._text

    def __repr__(self) -> str:
        return HIDDEN

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._text.encode(), other._text.encode())

    def __hash__(self) -> int:
        return hash((Secret, self._text))
