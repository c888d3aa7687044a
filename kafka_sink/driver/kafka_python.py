"""kafka-python's clients with the sink's options, for the tools that look at a cluster or read a topic.

The sink itself writes and plans with its own client; its TLS contexts and tokens serve here, too.
"""

from __future__ import annotations

from typing import Any

from kafka_sink.options import SinkOptions
from kafka_sink.security.preparation import Security
from kafka_sink.security.sasl import TokenProvider, scram_name
from kafka_sink.security.settings import SaslSettings, SecuritySettings
from kafka_sink.security.tls_context import make_context
from kafka_sink.security.token import token_source

_TIMEOUT_MS = 10_000


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
        tokens = token_source(sasl.tokens)
        settings["sasl_oauth_token_provider"] = TokenProvider(
            lambda: tokens.get().text, sasl.tokens.extensions
        )
    if sasl.kerberos is not None:
        settings["sasl_kerberos_service_name"] = sasl.kerberos.service_name
    return settings
