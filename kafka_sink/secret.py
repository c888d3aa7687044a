"""A text that must not be seen: it shows itself as hidden wherever it is printed.

Brokers, registries, token endpoints and libraries get secrets, and their texts may repeat them. So each
process knows its secrets, and no text of another in which one occurs is shown: ``printable`` asks
``repeats_secret``.
"""

from __future__ import annotations

import base64
import hmac
import html
import json
import re
import weakref
from typing import Any
from urllib.parse import quote, quote_plus, unquote, unquote_plus

HIDDEN = "[hidden]"
# Fewer characters are in any text.
_SHORTEST = 4
_WHITE = re.compile(r"\s+")


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

    ``is_known``: ``repeats_secret`` looks for it as long as it lives. False for options of which it is not
    known yet whether they are secret.
    """

    __slots__ = ("__weakref__", "_forms", "_text", "is_known")

    def __init__(self, text: str, *, is_known: bool = False) -> None:
        self._text = text
        self._forms: tuple[tuple[str, ...], tuple[str, ...]] | None = None
        self.is_known = is_known
        if is_known and len(text) >= _SHORTEST:
            # By identity: one of two that are equal may be gone first.
            _known[id(self)] = self

    @classmethod
    def known(cls, text: str) -> Secret:
        """One that ``repeats_secret`` looks for."""
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

    def occurs_in(self, texts: tuple[str, str, str], without_spaces: str) -> bool:
        """Whether one of the texts has it as it is or escaped, or the last one encoded by base64."""
        if self._forms is None:
            self._forms = _escaped(self._text), _base64(self._text)
        escaped, encoded = self._forms
        return any(form in text for form in escaped for text in texts) or any(
            form in without_spaces for form in encoded
        )

    def __repr__(self) -> str:
        return HIDDEN

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self._text.encode(), other._text.encode())

    def __hash__(self) -> int:
        return hash((Secret, self._text))

    def __reduce__(self) -> tuple[Any, ...]:
        return (Secret.known if self.is_known else Secret), (self._text,)


_known: weakref.WeakValueDictionary[int, Secret] = weakref.WeakValueDictionary()


def repeats_secret(text: str) -> bool:
    """Whether a known secret occurs in the text: as it is, escaped, URL-quoted, or encoded by base64, alone
    or among others."""
    # A list, made at once: other threads make secrets.
    secrets = [secret for reference in _known.valuerefs() if (secret := reference()) is not None]
    if not secrets:
        return False
    texts, joined = (text, unquote(text), unquote_plus(text)), _WHITE.sub("", unquote(text))
    return any(secret.occurs_in(texts, joined) for secret in secrets)


def _escaped(text: str) -> tuple[str, ...]:
    """The text, and as JSON, Python's representations and HTML have it."""
    data = text.encode("utf-8", "surrogatepass")
    shown = (json.dumps(text), json.dumps(text, ensure_ascii=False), repr(text), ascii(text))
    return tuple({text, html.escape(text), repr(data)[2:-1], *(one[1:-1] for one in shown)})


def _base64(text: str) -> tuple[str, ...]:
    """The characters that stand for the whole text, or the whole as URLs quote it, wherever it stands among
    other bytes."""
    raw = text.encode("utf-8", "surrogatepass")
    found = set[str]()
    for data in {raw, quote_plus(raw).encode(), quote(raw, safe="").encode()}:
        for before in range(3):
            encoded = base64.b64encode(bytes(before) + data).decode("ascii")
            part = encoded[-(-before * 8 // 6) : (before + len(data)) * 8 // 6]
            found |= {part, part.replace("+", "-").replace("/", "_")}
    return tuple(found)
