"""OAUTHBEARER's tokens. A worker gets each token once, keeps it, and renews it before it expires.

A user's function, a file or a token endpoint provides them. The endpoint grants a token for client
credentials (RFC 6749, 4.4; KIP-768) or for an assertion, which is a JWT that authenticates this client
without a secret (RFC 7523). Each token gets a new assertion, so replaced files are used from the next token
on.
"""

from __future__ import annotations

import base64
import http.client
import importlib
import json
import math
import ssl
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import quote_plus, unquote, urlencode, urlsplit

from kafka_sink.clock import RANDOM, ExponentialBackoff
from kafka_sink.errors import AuthenticationError, ConfigurationError
from kafka_sink.printable import printable
from kafka_sink.process_entries import ProcessEntries
from kafka_sink.secret import HiddenBytes, HiddenValues, Secret
from kafka_sink.security.http import HttpClient
from kafka_sink.security.settings import AssertionSettings, Store, TokenSettings
from kafka_sink.security.stores import content_of, named
from kafka_sink.security.tls_context import TlsContexts, explain

_MAX_TOKEN_CHARACTERS = 256 * 1024


class TokenUnavailableError(OSError):
    """No token is available at the moment. Another attempt may succeed."""


@dataclass(frozen=True)
class Token:
    """``expires_at_s`` is in seconds since 1970, or None if the token has no readable expiry."""

    text: Secret
    expires_at_s: float | None = None


def from_text(text: str, expires_at_s: float | None = None) -> Token:
    """Return the text as a token. Without ``expires_at_s``, a JWT's own expiry counts. Raises
    AuthenticationError if the text cannot be a token."""
    text = text.rstrip("\r\n")
    if not text or len(text) > _MAX_TOKEN_CHARACTERS or not text.isascii() or not text.isprintable():
        raise AuthenticationError(
            "OAUTHBEARER: the response is not a token: it is empty, too long or not printable ASCII"
        )
    return Token(Secret.known(text), jwt_expiry(text) if expires_at_s is None else expires_at_s)


def jwt_expiry(text: str) -> float | None:
    """Return the claim ``exp`` without verifying the token, which brokers do, or None if it cannot be
    read."""
    parts = text.split(".")
    if len(parts) != 3:
        return None
    try:
        claims = json.loads(base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
        expiry = float(claims["exp"])
        return expiry if math.isfinite(expiry) else None
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None


_OPTION = "Option 'sasl.oauthbearer.token.provider'"


def provided_tokens(path: str) -> Callable[[], Token]:
    """Return the function at a dotted path, wrapped so that it returns a Token.

    Raises AuthenticationError if it cannot be imported. The wrapper turns the function's errors into
    TokenUnavailableError with the class alone, because their texts may contain secrets.
    """
    module_name, _, name = path.rpartition(".")
    if not module_name or not name:
        raise AuthenticationError(f"{_OPTION} = {path!r} is not of the form module.function")
    try:
        provider: Any = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise AuthenticationError(
            f"{_OPTION} = {path!r} cannot be imported here: {printable(str(error))}"
        ) from None
    if not callable(provider):
        raise AuthenticationError(f"{_OPTION} = {path!r} is not a function")

    def fetch() -> Token:
        try:
            result = provider()
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


_MAX_BYTES = 1024 * 1024
_JWT_BEARER = "urn:ietf:params:oauth:grant-type:jwt-bearer"
_CLIENT_ASSERTION = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer"
# After these status codes, which RFC 6749 or proxies use, no retry can help.
_REFUSALS = (400, 401, 403, 404, 405)
# A hundred years. Python's JSON accepts NaN and infinity as numbers; this comparison is false for both.
_MAX_LIFETIME_S = 100 * 365 * 86_400


class TokenEndpoint:
    """Fetches tokens from an endpoint, each over a new connection: many minutes lie between two tokens."""

    def __init__(self, settings: TokenSettings, bound: str = "kafka.sasl.login.read.timeout.ms") -> None:
        self._settings = settings
        contexts = TlsContexts(settings.tls)
        self._http = HttpClient(settings.url, contexts.current, settings.connect_timeout_s, bound)
        self._sent = Secret("")

    def fetch(self) -> Token:
        """Fetch a token. Raises AuthenticationError if the endpoint refuses, ConfigurationError if the
        assertion cannot be made or a file cannot be read, and TokenUnavailableError for other failures."""
        settings = self._settings
        proof = settings.client_secret or Secret("")
        if settings.assertion is not None:
            proof = assertion_of(settings.assertion, time.time())
        try:
            status, body = self._ask(proof)
        except ConfigurationError:
            raise
        except ssl.SSLError as error:
            why = explain(error, self._http.host)
            problem: Exception = AuthenticationError(
                f"OAUTHBEARER: TLS with the token endpoint {self._http.shown} failed: {why}"
            )
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = str(error) or type(error).__name__
            problem = TokenUnavailableError(
                f"the token endpoint {self._http.shown} cannot be reached: {printable(reason)}"
            )
        else:
            return self._read(status, body)
        raise problem

    def _ask(self, proof: Secret) -> tuple[int, bytes]:
        settings = self._settings
        headers = HiddenValues(
            {
                "Accept": "application/json",
                "Cache-Control": "no-cache",
                "Content-Type": "application/x-www-form-urlencoded",
            }
        )
        if settings.assertion is None:
            # Keep the secret, because the endpoint's response may repeat it: `redacted` finds secrets that
            # are alive.
            self._sent = Secret.known(self._credentials(proof))
            headers["Authorization"] = f"Basic {self._sent.reveal()}"
        body = HiddenBytes(urlencode(self._form(proof)).encode())
        try:
            return self._http.request(
                "POST", "", headers, body, timeout_s=settings.read_timeout_s, max_bytes=_MAX_BYTES
            )
        finally:
            self._http.close()

    def _form(self, proof: Secret) -> dict[str, str]:
        settings = self._settings
        form = HiddenValues(grant_type="client_credentials")
        if settings.assertion is not None and settings.assertion.is_grant:
            form = HiddenValues(grant_type=_JWT_BEARER, assertion=proof.reveal())
        elif settings.assertion is not None:
            form |= {"client_assertion_type": _CLIENT_ASSERTION, "client_assertion": proof.reveal()}
            form |= {"client_id": settings.client_id} if settings.client_id else {}
        return form | ({"scope": settings.scope} if settings.scope else {})

    def _credentials(self, proof: Secret) -> str:
        pair = (self._settings.client_id, proof.reveal())
        if self._settings.urlencode:
            pair = (quote_plus(pair[0]), quote_plus(pair[1]))
        return base64.b64encode(":".join(pair).encode()).decode("ascii")

    def _read(self, status: int, body: bytes) -> Token:
        response = _json(body)
        if status != 200:
            names = ("error", "error_description")
            words = [printable(str(response[name])) for name in names if response.get(name)]
            text = f"the token endpoint {self._http.shown} responded {status}"
            text += f" ({': '.join(words)})" if words else ""
            if status in _REFUSALS:
                proved = "client secret" if self._settings.assertion is None else "assertion (key and claims)"
                raise AuthenticationError(f"OAUTHBEARER: {text}: check client id, {proved}, scope and URL")
            raise TokenUnavailableError(text)
        access_token = response.get("access_token", response.get("id_token"))
        if not isinstance(access_token, str):
            raise AuthenticationError(
                f"OAUTHBEARER: the token endpoint {self._http.shown} responded without an access_token"
            )
        token = from_text(access_token)
        lifetime = response.get("expires_in")
        if (
            token.expires_at_s is None
            and isinstance(lifetime, int | float)
            and abs(lifetime) < _MAX_LIFETIME_S
        ):
            return Token(token.text, time.time() + float(lifetime))
        return token


def _json(body: bytes) -> dict[str, Any]:
    try:
        response = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return response if isinstance(response, dict) else {}


_UNKNOWN_LIFETIME_S = 300.0
_TRIES = 3
# The time until the next attempt after a failed renewal while the present token is valid, as in Java.
_RENEW_AGAIN_S = 10.0
Fetch = Callable[[], Token]


class _Kept(NamedTuple):
    token: Token
    refresh_at_s: float
    expires_at_s: float


class TokenSource:
    """The token of one set of options. Thread-safe: one thread fetches a token, and other threads use the
    present one, or wait if it has expired.

    ``wall_clock_s`` is in seconds since 1970, as in tokens. ``wait`` sleeps between attempts.
    """

    def __init__(
        self,
        settings: TokenSettings,
        fetch: Fetch,
        wall_clock_s: Callable[[], float] = time.time,
        wait: Callable[[float], None] = time.sleep,
        random: Callable[[], float] = RANDOM.random,
    ) -> None:
        self._settings = settings
        self._fetch = fetch
        self._wall_clock_s = wall_clock_s
        self._wait = wait
        self._random = random
        base_ms, max_ms = settings.retry_backoff_s * 1000, settings.retry_backoff_max_s * 1000
        self._backoff = ExponentialBackoff(base_ms, max_ms, random)
        # The thread that fetches a token holds this lock and sets `_kept`. Without it, each connection would
        # fetch its own token when the present one expires.
        self._lock = threading.Lock()
        self._kept: _Kept | None = None

    def get(self) -> Token:
        """Return a valid token. Blocks while it is fetched. Raises AuthenticationError if the endpoint
        refuses, and TokenUnavailableError if it cannot be reached. A token that is still valid is returned
        instead."""
        kept = self._kept
        is_valid = kept is not None and self._wall_clock_s() < kept.expires_at_s
        if not self._lock.acquire(blocking=not is_valid):
            # A hanging endpoint must not hold up connections while the present token is valid.
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
        except (TokenUnavailableError, AuthenticationError, ConfigurationError):
            if kept is None or self._wall_clock_s() >= kept.expires_at_s:
                raise
            again = self._wall_clock_s() + _RENEW_AGAIN_S
            self._kept = kept._replace(refresh_at_s=min(again, kept.expires_at_s))
        return self._kept.token

    def _fetched(self) -> Token:
        for attempts in range(1, _TRIES):
            with suppress(TokenUnavailableError):
                return self._fetch()
            self._wait(self._backoff.delay_ms(attempts) / 1000)
        return self._fetch()

    def _keeping(self, token: Token) -> _Kept:
        """Compute when to renew the token, as Java's login thread does: at a share of its lifetime, some time
        before its end, and not before a minimum age."""
        settings, now = self._settings, self._wall_clock_s()
        expires = now + _UNKNOWN_LIFETIME_S if token.expires_at_s is None else token.expires_at_s
        lifetime = expires - now
        if lifetime <= 0:
            raise AuthenticationError("OAUTHBEARER: the fetched token has already expired")
        refresh = now + lifetime * (settings.refresh_factor + settings.refresh_jitter * self._random())
        if lifetime > settings.refresh_buffer_s + settings.refresh_min_s:
            refresh = min(refresh, expires - settings.refresh_buffer_s)
            refresh = max(refresh, now + settings.refresh_min_s)
        return _Kept(token, min(refresh, expires), expires)


# Without the lock, two threads could make two sources for the same settings, and fetch twice. A source has a
# lock of its own, which a forked child must not inherit either.
_sources: ProcessEntries[dict[TokenSettings, TokenSource]] = ProcessEntries({})


def token_source(settings: TokenSettings) -> TokenSource:
    """Return this process's source for the settings. Raises AuthenticationError if the provider cannot be
    imported."""
    with _sources.lock:
        source = _sources.entries.get(settings)
        if source is None:
            source = _sources.entries[settings] = TokenSource(settings, _fetch_of(settings))
        return source


def _fetch_of(settings: TokenSettings) -> Fetch:
    if settings.provider:
        return provided_tokens(settings.provider)
    if settings.url.lower().startswith("file:"):
        path = unquote(urlsplit(settings.url).path)
        return lambda: from_text(_read_file(path))
    return TokenEndpoint(settings).fetch


def _read_file(path: str) -> str:
    try:
        content = content_of(Store("kafka.sasl.oauthbearer.token.endpoint.url", "JWT", path))
    except ConfigurationError as error:
        raise TokenUnavailableError(f"{error}") from None
    # Bytes that are not ASCII become characters that `from_text` refuses.
    return content.decode("latin-1").strip()


# -- assertions -------------------------------------------------------------------------------------


def assertion_of(settings: AssertionSettings, now_s: float) -> Secret:
    """Return an assertion. ``now_s`` is in seconds since 1970. Raises ConfigurationError with the option and
    the file that cannot be used."""
    if settings.file is not None:
        return _ready_made(settings.file)
    from kafka_sink.security.key_material import signature

    assert settings.key is not None
    template = {} if settings.template is None else _template(settings.template)
    header = template.get("header", {}) | {"alg": settings.algorithm, "typ": "JWT"}
    # Computed claims replace claims of the template, and these replace claims of the options, as in Java.
    claims = dict(settings.claims) | template.get("payload", {})
    claims |= {"iat": int(now_s), "exp": int(now_s) + settings.exp_s, "nbf": int(now_s) - settings.nbf_s}
    if settings.jti:
        claims["jti"] = str(uuid.uuid4())
    signed = ".".join(_base64(json.dumps(part).encode()) for part in (header, claims))
    proof = signature(settings.key, settings.algorithm, signed.encode())
    return Secret.known(f"{signed}.{_base64(proof)}")


def _ready_made(store: Store) -> Secret:
    assertion = Secret.known(content_of(store).decode("utf-8", "replace").strip())
    text = assertion.reveal()
    is_jwt = text.count(".") == 2 and text.isascii() and text.isprintable()
    text = ""
    if not is_jwt:
        raise ConfigurationError(f"{named(store)} contains no JWT, which has three parts separated by dots")
    return assertion


def _template(store: Store) -> dict[str, dict[str, Any]]:
    try:
        # NaN is not valid JSON. The endpoint would refuse the assertion without saying why.
        template = json.loads(content_of(store), parse_constant=_no_number)
    except (ValueError, RecursionError):
        template = None
    is_valid = isinstance(template, dict) and template.keys() <= {"header", "payload"}
    if not is_valid or not all(isinstance(part, dict) for part in template.values()):
        raise ConfigurationError(
            f'{named(store)} is not of the form {{"header": {{...}}, "payload": {{...}}}}'
        )
    return dict(template)


def _no_number(text: str) -> None:
    raise ValueError(text)


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")
