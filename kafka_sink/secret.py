"""A text that must not be seen. Wherever it is printed, it shows itself as hidden.

Brokers, registries, token endpoints and libraries receive secrets, and their texts may repeat them. Each
process therefore keeps a list of its secrets. ``redacted`` hides them in foreign texts, and is used by
``printable`` and by this package's errors.
"""

from __future__ import annotations

import hmac
import json
import weakref
from typing import Any
from urllib.parse import quote, quote_plus

HIDDEN = "[hidden]"
# Shorter texts are part of almost any text.
_SHORTEST = 4


class HiddenBytes(bytes):
    """Bytes that contain secrets. They hide themselves, as error trackers collect local variables."""

    def __repr__(self) -> str:
        return HIDDEN


class HiddenValues(dict[str, Any]):
    """A dictionary that shows only its keys, for options that include secrets."""

    def __repr__(self) -> str:
        return f"{{{', '.join(map(repr, self))}: {HIDDEN}}}"


class Secret:
    """A password, key or token. Only ``reveal`` returns the text; ``repr``, ``str`` and ``format`` hide it.

    Secrets can be hashed and pickled: options are sent to executors, and producers are looked up by their
    options.

    If ``is_known`` is True, ``redacted`` looks for the secret while it is alive. It is False for options that
    may turn out not to be secret.
    """

    __slots__ = ("__weakref__", "_text", "forms", "is_known")

    def __init__(self, text: str, *, is_known: bool = False) -> None:
        self._text = text
        self.is_known: bool = is_known
        # The text itself and its forms in URLs and JSON, for ``redacted``.
        self.forms: frozenset[str] = frozenset()
        if is_known and len(text) >= _SHORTEST:
            # The text may be invalid Unicode, because files may contain any bytes.
            raw = text.encode("utf-8", "surrogatepass")
            as_json = (json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1])
            self.forms = frozenset({text, quote(raw), quote(raw, safe=""), quote_plus(raw), *as_json})
            # The key is the identity: of two equal secrets, one may be deleted first.
            _known[id(self)] = self

    @classmethod
    def known(cls, text: str) -> Secret:
        """Make a secret that ``redacted`` looks for."""
        return cls(text, is_known=True)

    @classmethod
    def of_one_line(cls, text: str) -> Secret:
        """Make a known secret without the line end of its file. Raises ValueError for another line end,
        because it would end an HTTP header, and libraries would then show the whole header."""
        text = text.rstrip("\r\n")
        if any(char in text for char in "\r\n\0"):
            raise ValueError("has a line end inside, and this secret is one line")
        return cls.known(text)

    def reveal(self) -> str:
        """Return the text. Keep it in no variable that outlives its use."""
        return self._text

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
    """Return the text with every known secret hidden. Code that sends a secret in another form, such as the
    base64 of a login, makes a ``Secret.known`` of that form."""
    # Copy the list at once, because other threads make secrets.
    secrets = [secret for reference in _known.valuerefs() if (secret := reference()) is not None]
    present = {form for secret in secrets for form in secret.forms if form in text}
    # Replace the longest form first, because a shorter one may be a part of it.
    for form in sorted(present, key=len, reverse=True):
        text = text.replace(form, HIDDEN)
    return text
