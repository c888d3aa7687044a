"""kafka-python's clients with the sink's options, for the tools that look at a cluster or read a topic.

The sink itself writes and plans with its own client; its TLS contexts and tokens serve here, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kafka.net.sasl.oauth import AbstractTokenProvider

from kafka_sink.options import SinkOptions
from kafka_sink.security.preparation import Security
from kafka_sink.security.sasl import scram_name
from kafka_sink.security.settings import SaslSettings, SecuritySettings
from kafka_sink.security.tls_context import make_context
from kafka_sink.security.token import token_source

if TYPE_CHECKING:
    from kafka_sink.security.settings import TokenSettings

_TIMEOUT_MS = 10_000


class _Tokens(AbstractTokenProvider):  # type: ignore[misc]  # kafka-python has no annotations
    """What kafka-python asks for OAUTHBEARER's tokens."""

    def __init__(self, settings: TokenSettings) -> None:
        self._settings = settings

    def token(self) -> str:
        return token_source(self._settings).get().text.reveal()

    def extensions(self) -> dict[str, str]:
        return dict(self._settings.extensions)

    def close(self) -> None:
        """kafka-python calls it."""


def client_settings(options: SinkOptions) -> dict[str, Any]:
    """Arguments of kafka-python's clients. Raises ConfigurationError for files that cannot be used."""
    security = SecuritySettings.from_options(options)
    Security(security).check()
    settings: dict[str, Any] = {
        "bootstrap_servers": [f"{host}:{port}" for host, port in options.bootstrap_servers],
        "security_protocol": security.protocol,
        "client_id": options.client_id or "kafka-chunked",
        "request_timeout_ms": max(_TIMEOUT_MS, options.request_timeout_ms),
    }
    if security.tls is not None:
        settings["ssl_context"] = make_context(security.tls)
        settings["ssl_check_hostname"] = security.tls.check_host
    if security.sasl is not None:
        settings |= _login(security.sasl)
    return settings


def _login(sasl: SaslSettings) -> dict[str, Any]:
    """AWS_MSK_IAM takes AWS's usual chain of credentials."""
    settings: dict[str, Any] = {"sasl_mechanism": sasl.mechanism}
    if sasl.password is not None:
        is_scram = sasl.mechanism.startswith("SCRAM")
        settings["sasl_plain_username"] = scram_name(sasl.username) if is_scram else sasl.username
        settings["sasl_plain_password"] = sasl.password.reveal()
    if sasl.tokens is not None:
        settings["sasl_oauth_token_provider"] = _Tokens(sasl.tokens)
    if sasl.kerberos is not None:
        settings["sasl_kerberos_service_name"] = sasl.kerberos.service_name
    return settings
