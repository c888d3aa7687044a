"""Kerberos logins (GSSAPI), with the package gssapi as an extra."""

from __future__ import annotations

from typing import Any

from kafka_sink.errors import AuthenticationError
from kafka_sink.security.sasl import SaslExchange, driven_by
from kafka_sink.security.settings import KerberosSettings


def exchange(settings: KerberosSettings, host: str) -> SaslExchange:
    """A login for one broker; blocks while a ticket is fetched. Raises AuthenticationError."""
    try:
        import gssapi
    except (ImportError, OSError):
        raise AuthenticationError(
            "SASL GSSAPI needs the package gssapi and the system's Kerberos library: pip install "
            "gssapi on driver and executors"
        ) from None
    from kafka.net.sasl.gssapi import SaslMechanismGSSAPI

    class Mechanism(SaslMechanismGSSAPI):  # type: ignore[misc]  # kafka-python has no annotations
        """With credentials of a keytab where one is named."""

        def __init__(self) -> None:
            self._is_done = self._is_authenticated = False
            self.auth_id = f"{settings.service_name}@{host}"
            name = gssapi.Name(self.auth_id, name_type=gssapi.NameType.hostbased_service)
            self.gssapi_name = name.canonicalize(gssapi.MechType.kerberos)
            self._client_ctx = gssapi.SecurityContext(
                name=self.gssapi_name, usage="initiate", creds=_credentials(gssapi, settings)
            )
            self._next_token = self._client_ctx.step(None)

    try:
        return driven_by("GSSAPI", Mechanism())
    except gssapi.exceptions.GSSError as error:
        problem = " ".join(str(error).split())
    raise AuthenticationError(
        f"SASL GSSAPI: no ticket for {settings.service_name}@{host}: {problem}; kinit on every host, or "
        "name a keytab in kafka.sasl.jaas.config (useKeyTab=true keyTab=... principal=...)"
    )


def _credentials(gssapi: Any, settings: KerberosSettings) -> Any:
    if not settings.keytab and not settings.principal:
        return None
    name = gssapi.Name(settings.principal, gssapi.NameType.kerberos_principal) if settings.principal else None
    # Tickets of a keytab stay in this process.
    store = {"client_keytab": settings.keytab, "ccache": "MEMORY:kafka-chunked"} if settings.keytab else None
    return gssapi.Credentials(name=name, usage="initiate", store=store)
