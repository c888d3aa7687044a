"""OAUTHBEARER's tokens: fetched once per worker, kept, and renewed before they run out."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from kafka_sink.errors import AuthenticationError
from kafka_sink.security.settings import TokenSettings
from kafka_sink.security.token import Token, TokenUnavailableError, from_text, provided_tokens
from kafka_sink.security.token_endpoint import TokenEndpoint

_UNKNOWN_LIFETIME_S = 300.0
_TRIES = 3
# After a renewal that failed, while the token at hand is valid; as Java's login thread.
_RENEW_AGAIN_S = 10.0


Fetch = Callable[[], Token]


class _Kept(NamedTuple):
    token: Token
    refresh_at_s: float
    expires_at_s: float


class TokenSource:
    """The token of one set of options. Any thread; one at a time fetches, and the others use the token at
    hand, or wait where it has run out.

    ``wall_clock_s`` is seconds since 1970, as tokens have it; ``wait`` sleeps between tries.
    """

    def __init__(
        self,
        settings: TokenSettings,
        fetch: Fetch,
        wall_clock_s: Callable[[], float] = time.time,
        wait: Callable[[float], None] = time.sleep,
        random: Callable[[], float] = random.random,
    ) -> None:
        self._settings = settings
        self._fetch = fetch
        self._wall_clock_s = wall_clock_s
        self._wait = wait
        self._random = random
        self._lock = threading.Lock()  # held while a token is fetched, and to set the one below
        self._kept: _Kept | None = None

    def get(self) -> Token:
        """A token that is valid. Blocks while it is fetched.

        Raises AuthenticationError where the endpoint refuses, TokenUnavailableError where it cannot be
        reached and the token at hand, if any, has run out.
        """
        kept = self._kept
        is_valid = kept is not None and self._wall_clock_s() < kept.expires_at_s
        if not self._lock.acquire(blocking=not is_valid):
            # An endpoint that hangs must not hold up connections that have what they need.
            assert kept is not None
            return kept.token
        try:
            return self._renewed()
        finally:
            self._lock.release()

    def _renewed(self) -> Token:
        kept = self._kept
        if kept is not None and self._wall_clock_s() < kept.refresh_at_s:
            return kept.token
        try:
            self._kept = self._keeping(self._fetched())
        except (TokenUnavailableError, AuthenticationError):
            if kept is None or self._wall_clock_s() >= kept.expires_at_s:
                raise
            again = self._wall_clock_s() + _RENEW_AGAIN_S
            self._kept = kept._replace(refresh_at_s=min(again, kept.expires_at_s))
        return self._kept.token

    def _fetched(self) -> Token:
        settings = self._settings
        backoff = settings.retry_backoff_s
        for left in reversed(range(_TRIES)):
            try:
                return self._fetch()
            except TokenUnavailableError:
                if not left:
                    raise
            self._wait(backoff)
            backoff = min(backoff * 2, max(settings.retry_backoff_max_s, settings.retry_backoff_s))
        raise AssertionError("the last try returns or raises")

    def _keeping(self, token: Token) -> _Kept:
        """As Java's login thread reckons: a share of the lifetime, a buffer before its end, a least age."""
        settings, now = self._settings, self._wall_clock_s()
        expires = now + _UNKNOWN_LIFETIME_S if token.expires_at_s is None else token.expires_at_s
        lifetime = expires - now
        if lifetime <= 0:
            raise AuthenticationError("OAUTHBEARER: the token that was fetched has run out already")
        refresh = now + lifetime * (settings.refresh_factor + settings.refresh_jitter * self._random())
        if lifetime > settings.refresh_buffer_s + settings.refresh_min_s:
            refresh = min(refresh, expires - settings.refresh_buffer_s)
            refresh = max(refresh, now + settings.refresh_min_s)
        return _Kept(token, min(refresh, expires), expires)


_lock = threading.Lock()  # guards the next one
_sources: dict[TokenSettings, TokenSource] = {}


def _after_fork() -> None:
    """Another thread may have held the lock, or a source's."""
    global _lock
    _lock = threading.Lock()
    _sources.clear()


os.register_at_fork(after_in_child=_after_fork)


def token_source(settings: TokenSettings) -> TokenSource:
    """The one of this process. Raises AuthenticationError where the provider cannot be imported."""
    with _lock:
        source = _sources.get(settings)
        if source is None:
            source = _sources[settings] = TokenSource(settings, _fetch_of(settings))
        return source


def _fetch_of(settings: TokenSettings) -> Fetch:
    if settings.provider:
        return provided_tokens(settings.provider)
    if settings.url.lower().startswith("file:"):
        path = unquote(urlsplit(settings.url).path)
        return lambda: from_text(_read_file(path))
    return TokenEndpoint(settings).fetch


def _read_file(path: str) -> str:
    file = Path(path)
    try:
        if file.is_fifo() or file.is_char_device():
            # Reading one may never end.
            reason = "it is a pipe or a device, not a file"
        else:
            return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no token"
    raise TokenUnavailableError(f"the token file {path} cannot be read: {reason}")
