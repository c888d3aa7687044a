"""The SASL login on a connection: SaslHandshake, then SaslAuthenticate as often as needed (KIP-152).

Both are repeated before the session ends (KIP-368). Responses come in and requests go out, without I/O.
"""

from __future__ import annotations

from dataclasses import dataclass

from kafka_sink import kafka_errors
from kafka_sink.errors import AuthenticationError, BrokerVersionError
from kafka_sink.network.apis import SASL_AUTHENTICATE, SASL_HANDSHAKE, common_version
from kafka_sink.network.wire import Reader, Writer, decoder, text_of
from kafka_sink.printable import printable_list
from kafka_sink.security.sasl import SaslExchange

# An upper bound: Kerberos needs four rounds, SCRAM two.
_MAX_ROUNDS = 16


@dataclass(frozen=True, slots=True)
class HandshakeResponse:
    error_code: int
    mechanisms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AuthenticateResponse:
    """The response to SaslAuthenticate. ``session_ms`` is 0 if the login does not expire."""

    error_code: int
    error_message: str
    auth_bytes: bytes
    session_ms: int

    def __repr__(self) -> str:
        return f"AuthenticateResponse({self.error_code})"


# The next request of a login: API key, version and body, whose repr does not show the content.
LoginRequest = tuple[int, int, memoryview]


class Login:
    """One login on one connection. Raises AuthenticationError, which names the broker and the mechanism.
    ``session_ms`` is the session's length after a completed login; 0 if the session does not end."""

    def __init__(self, exchange: SaslExchange, name: str, versions: dict[int, tuple[int, int]]) -> None:
        self._exchange = exchange
        self._name = name
        self._versions = versions
        self._rounds = 0
        self.session_ms = 0

    def begin(self) -> LoginRequest:
        version = self._version(SASL_HANDSHAKE)
        self._version(SASL_AUTHENTICATE)
        request = Writer(SASL_HANDSHAKE, version)
        request.text(self._exchange.mechanism)
        return SASL_HANDSHAKE, version, memoryview(request.finished())

    def on_response(self, response: HandshakeResponse | AuthenticateResponse) -> LoginRequest | None:
        """Return the next request, or None when the login is complete."""
        if isinstance(response, HandshakeResponse):
            self._check_handshake(response)
            return self._authenticate(self._exchange.first())
        if response.error_code:
            raise AuthenticationError(self._refusal(response))
        try:
            following = self._exchange.respond(response.auth_bytes)
        except AuthenticationError as error:
            problem = str(error)
        else:
            self.session_ms = response.session_ms
            return None if following is None else self._authenticate(following)
        raise AuthenticationError(f"login at {self._name} failed: {problem}")

    def _version(self, api: int) -> int:
        try:
            return common_version(self._name, api, self._versions)
        except BrokerVersionError:
            raise AuthenticationError(
                f"login at {self._name} failed: it does not offer SASL: use its SASL listener's port, or "
                "kafka.security.protocol=PLAINTEXT or SSL"
            ) from None

    def _authenticate(self, data: bytes) -> LoginRequest:
        self._rounds += 1
        if self._rounds > _MAX_ROUNDS:
            raise AuthenticationError(
                f"login at {self._name} failed: it sent more than {_MAX_ROUNDS} challenges"
            )
        version = self._version(SASL_AUTHENTICATE)
        request = Writer(SASL_AUTHENTICATE, version)
        request.data(data)
        return SASL_AUTHENTICATE, version, memoryview(request.finished())

    def _check_handshake(self, response: HandshakeResponse) -> None:
        if response.error_code == 0:
            return
        mechanism = self._exchange.mechanism
        if response.error_code == kafka_errors.UNSUPPORTED_SASL_MECHANISM:
            offered = printable_list(response.mechanisms) or "none"
            problem = f"it does not offer {mechanism} but {offered}: set kafka.sasl.mechanism to one of these"
        elif response.error_code == kafka_errors.ILLEGAL_SASL_STATE:
            problem = (
                "its listener does not support a login: use its SASL listener's port, or "
                "kafka.security.protocol=PLAINTEXT or SSL"
            )
        else:
            problem = f"the SASL handshake failed: {kafka_errors.error_of(response.error_code).label}"
        raise AuthenticationError(f"login at {self._name} failed: {problem}")

    def _refusal(self, response: AuthenticateResponse) -> str:
        mechanism = self._exchange.mechanism
        said = f" ({response.error_message})" if response.error_message else ""
        is_usual = response.error_code == kafka_errors.SASL_AUTHENTICATION_FAILED
        code = "" if is_usual else f", error {response.error_code}"
        refused = f"it refuses the credentials for SASL {mechanism}{code}{said}"
        return f"login at {self._name} failed: {refused}: {self._exchange.remedy}"


@decoder(SASL_HANDSHAKE)
def decode_handshake(reader: Reader) -> HandshakeResponse:
    error = reader.short()
    return HandshakeResponse(error, tuple(reader.name_text() for _ in reader.elements("mechanisms")))


@decoder(SASL_AUTHENTICATE)
def decode_authenticate(reader: Reader) -> AuthenticateResponse:
    error, message, data = reader.short(), text_of(reader.text()) or "", reader.data()
    lifetime_ms = max(0, reader.long()) if reader.version > 0 else 0
    return AuthenticateResponse(error, message, data, lifetime_ms)
