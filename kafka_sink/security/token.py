"""A token of OAUTHBEARER as a value, and when it runs out."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass

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
