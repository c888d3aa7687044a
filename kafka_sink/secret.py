"""A text that must not be seen: it shows itself as hidden wherever it is printed.

Brokers, registries, token endpoints and libraries get secrets, and their texts may repeat them. So each
process keeps a list of its secrets, and ``redacted`` hides them in the texts of others: ``printable`` and the
errors of this package use it.
"""

from __future__ import annotations

import hmac
import json
import weakref
from typing import Any
from urllib.parse import quote, quote_plus

HIDDEN = "[hidden]"
# Fewer characters are in any text.
_SHORTEST = 4


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

    ``is_known``: ``redacted`` looks for it as long as it lives. False for options of which it is not known
    yet whether they are secret.
    """

    __slots__ = ("__weakref__", "_forms", "_text", "is_known")

    def __init__(self, text: str, *, is_known: bool = False) -> None:
        self._text = text
        self._forms: frozenset[str] | None = None
        self.is_known: bool = is_known
        if is_known and len(text) >= _SHORTEST:
            # By identity: one of two that are equal may be gone first.
            _known[id(self)] = self

    @classmethod
    def known(cls, text: str) -> Secret:
        """A secret that ``redacted`` looks for."""
        return cls(text, is_known=True)

    @classmethod
    def of_one_line(cls, text: str) -> Secret:
        """A known one without the line end that files have. Raises ValueError for a line end inside, which
        would end a header: libraries then show the whole of it."""
        text = text.rstrip("\r\n")
        if any(char in text for char in "\r\n\0"):
            raise ValueError("has a line end inside, and this secret is one line")
        return cls.known(text)

    def reveal(self) -> str:
        """The text itself; keep it in no variable that outlives its use."""
        return self._text

    @property
    def forms(self) -> frozenset[str]:
        """The text as it is, and as URLs and JSON have it."""
        if self._forms is None:
            self._forms = _forms(self._text)
        return self._forms

    def __repr__(self) -> str:
        return HIDDEN

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(
            self._text.encode(errors="surrogatepass"), other._text.encode(errors="surrogatepass")
        )

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __reduce__(self) -> tuple[Any, ...]:
        return (Secret.known if self.is_known else Secret), (self._text,)


_known: weakref.WeakValueDictionary[int, Secret] = weakref.WeakValueDictionary()


def redacted(text: str) -> str:
    """The text with every known secret hidden. Whoever sends a secret in another form, such as the base64 of
    a login, makes that form a ``Secret.known`` of its own."""
    # A list, made at once: other threads make secrets.
    secrets = [secret for reference in _known.valuerefs() if (secret := reference()) is not None]
    found = {form for secret in secrets for form in secret.forms if form in text}
    # The longest first: a shorter one may be a part of it.
    for form in sorted(found, key=len, reverse=True):
        text = text.replace(form, HIDDEN)
    return text


def _forms(text: str) -> frozenset[str]:
    # Not every text is valid Unicode: files may hold any bytes.
    raw = text.encode("utf-8", "surrogatepass")
    as_json = (json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1])
    return frozenset({text, quote(raw), quote(raw, safe=""), quote_plus(raw), *as_json})
