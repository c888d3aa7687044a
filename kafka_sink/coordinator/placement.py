"""Whether an application has a coordinator, and where it listens.

Environment variables of the driver (``KAFKA_CHUNKED_COORDINATOR_PORT``) and Spark's configuration
(``spark.kafka-chunked.coordinator.port``) override the job's option ``coordinator.port``.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kafka_sink.coordinator.address import ANY_ADDRESSES, without_brackets
from kafka_sink.driver.driver_conf import OWN_PREFIX
from kafka_sink.errors import ConfigurationError
from kafka_sink.options import SinkOptions
from kafka_sink.options.table import SPECS

_ENABLED, _PORT, _ADDRESS = "coordinator.enabled", "coordinator.port", "coordinator.bind.address"
_UI_PORT, _UI_ADDRESS = "ui.port", "ui.bind.address"
ADMINISTERED = (_ENABLED, _PORT, _ADDRESS, _UI_PORT, _UI_ADDRESS)
_KINDS = {spec.name: spec.kind for spec in SPECS if spec.name in ADMINISTERED}
# An address reserved for documentation. Nothing is sent to it; the system only looks up its route.
_REMOTE_ADDRESS = ("192.0.2.1", 9)
_NO_CONF: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Placement:
    """``address`` is a host name or an IP address without brackets. ``port`` 0 means any free port."""

    address: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only processes on this host can connect."""
        try:
            return ipaddress.ip_address(self.address).is_loopback
        except ValueError:
            return self.address == "localhost"

    @property
    def local_host(self) -> str:
        """The address for connections from this host."""
        # This is not a name, because a name may lead to another address, where another process has this port.
        if self.address == "::" and not socket.has_dualstack_ipv6():
            return "::1"
        return "127.0.0.1" if self.address in ANY_ADDRESSES else self.address

    def listen(self, backlog: int) -> socket.socket:
        """A socket that listens here. Raises OSError."""
        where = self.address, self.port
        family = socket.getaddrinfo(*where, type=socket.SOCK_STREAM)[0][0]
        # The address that means all interfaces covers IPv4 as well.
        dual = self.address == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(where, family=family, dualstack_ipv6=dual, backlog=backlog)


def is_enabled(options: SinkOptions, environ: Mapping[str, str], conf: Mapping[str, str] = _NO_CONF) -> bool:
    """False if the job or the administrator disables it. Raises ConfigurationError for an invalid setting."""
    return options.coordinator_enabled and bool(_administered(_ENABLED, environ, conf, True))


def placement(options: SinkOptions, environ: Mapping[str, str], conf: Mapping[str, str]) -> Placement:
    """Where the coordinator listens. Raises ConfigurationError for an administrator's invalid setting."""
    port = _administered(_PORT, environ, conf, options.coordinator_port)
    address = _administered(_ADDRESS, environ, conf, options.coordinator_bind_address)
    return Placement(without_brackets(address or _drivers_address(environ, conf)), port)


def ui_placement(
    options: SinkOptions, environ: Mapping[str, str], conf: Mapping[str, str] = _NO_CONF
) -> Placement | None:
    """Where the live view listens, or None if it is off. Raises the same error as ``placement``."""
    port = _administered(_UI_PORT, environ, conf, options.ui_port)
    address = _administered(_UI_ADDRESS, environ, conf, options.ui_bind_address)
    return Placement(without_brackets(address), port) if port >= 0 else None


def _administered(name: str, environ: Mapping[str, str], conf: Mapping[str, str], jobs: Any) -> Any:
    """The administrator's value of an option, or the job's."""
    variable = "KAFKA_CHUNKED_" + name.upper().replace(".", "_")
    for source, text in ((variable, environ.get(variable)), (OWN_PREFIX + name, conf.get(OWN_PREFIX + name))):
        if text is None or not text.strip():
            continue
        try:
            return _KINDS[name].parse(text.strip())
        except ValueError as problem:
            raise ConfigurationError(f"'{source}' {problem}, got '{text.strip()}'") from None
    return jobs


def _drivers_address(environ: Mapping[str, str], conf: Mapping[str, str]) -> str:
    """The address that the driver listens on, according to Spark's own rules."""
    return (
        conf.get("spark.driver.bindAddress")
        or conf.get("spark.driver.host")
        or environ.get("SPARK_LOCAL_HOSTNAME")
        or environ.get("SPARK_LOCAL_IP")
        or _own_address()
    )


def _own_address() -> str:
    """The address of this host's name. If that is loopback, the address of the interface to other hosts."""
    try:
        entries = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
    except OSError:
        entries = []
    for address in (str(entry[4][0]) for entry in entries):
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            return address
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(_REMOTE_ADDRESS)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
