"""A token of OAUTHBEARER as a value, and when it runs out."""

from __future__ import annotations

import base64
import importlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kafka_sink.errors import AuthenticationError
from kafka_sink.secret import Secret

_MAX_TOKEN_CHARACTERS = 256 * 1024


class TokenUnavailableError(OSError):
    """No token could be had just now; trying again may help."""


@dataclass(frozen=True)
class Token:
    """``expires_at_s`` in seconds since 1970, or None where the token does not say."""

    text: Secret
    expires_at_s: float | None = None


def from_text(text: str, expires_at_s: float | None = None) -> Token:
    """A token with the end that it names itself, where it is a JWT. Raises AuthenticationError for what no
    token can be."""
    if not text or len(text) > _MAX_TOKEN_CHARACTERS or not text.isascii() or not text.isprintable():
        raise AuthenticationError(
            "OAUTHBEARER: the response is not a token: empty, too long or not printable"
        )
    return Token(Secret(text), jwt_expiry(text) if expires_at_s is None else expires_at_s)


def jwt_expiry(text: str) -> float | None:
    """The claim ``exp``, not verified: brokers do that. None if the token has no readable one."""
    parts = text.split(".")
    if len(parts) != 3:
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        return float(claims["exp"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


_OPTION = "Option 'sasl.oauthbearer.token.provider'"


def provided_tokens(path: str) -> Callable[[], Token]:
    """The function behind a dotted path, its result made a Token. Raises AuthenticationError where there is
    none; what the function raises becomes TokenUnavailableError, by its class alone: texts may be secret."""
    module_name, _, name = path.rpartition(".")
    if not module_name or not name:
        raise AuthenticationError(f"{_OPTION} = {path!r} is not module.function")
    try:
        found: Any = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise AuthenticationError(f"{_OPTION} = {path!r} cannot be imported here: {error}") from None
    if not callable(found):
        raise AuthenticationError(f"{_OPTION} = {path!r} is not a function")

    def fetch() -> Token:
        try:
            result = found()
        except Exception as error:  # noqa: BLE001 - whatever a user's function raises
            problem = type(error).__name__
        else:
            return _token(path, result)
        raise TokenUnavailableError(f"{_OPTION} = {path!r} raised {problem}")

    return fetch


def _token(path: str, result: Any) -> Token:
    if isinstance(result, str):
        return from_text(result)
    is_pair = isinstance(result, tuple) and len(result) == 2
    if is_pair and isinstance(result[0], str) and isinstance(result[1], int | float):
        return from_text(result[0], float(result[1]))
    raise AuthenticationError(
        f"{_OPTION} = {path!r} returned neither a text nor a pair of a text and the time it expires"
    )
