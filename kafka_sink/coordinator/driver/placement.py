"""Whether an application has a coordinator, and where that listens: the administrator before the job.

An administrator sets environment variables of the driver (``KAFKA_CHUNKED_COORDINATOR_PORT``) or Spark's
configuration (``spark.kafka-chunked.coordinator.port``), a job the option ``coordinator.port``.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kafka_sink.coordinator.driver.driver_conf import OWN_PREFIX
from kafka_sink.coordinator.wire.address import without_brackets
from kafka_sink.errors import ConfigurationError
from kafka_sink.options import SinkOptions
from kafka_sink.options.table import SPECS

_ENABLED, _PORT, _ADDRESS = "coordinator.enabled", "coordinator.port", "coordinator.bind.address"
_KINDS = {spec.name: spec.kind for spec in SPECS if spec.name in (_ENABLED, _PORT, _ADDRESS)}
_ANY = ("0.0.0.0", "::")
# Reserved for documentation: nothing is sent to it, the system is only asked which way it would take.
_ELSEWHERE = ("192.0.2.1", 9)
_NO_CONF: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True)
class Placement:
    """``address`` is a name or an address, without brackets; ``port`` 0 is a free one."""

    address: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this host can connect to it."""
        try:
            return ipaddress.ip_address(self.address).is_loopback
        except ValueError:
            return self.address == "localhost"

    @property
    def local_host(self) -> str:
        """Where this host connects to it."""
        return "localhost" if self.address in _ANY else self.address


def is_enabled(options: SinkOptions, environ: Mapping[str, str], conf: Mapping[str, str] = _NO_CONF) -> bool:
    """False where either the job or the administrator says so. Raises ConfigurationError."""
    return options.coordinator_enabled and _administered(_ENABLED, environ, conf) is not False


def placement(options: SinkOptions, environ: Mapping[str, str], conf: Mapping[str, str]) -> Placement:
    """Raises ConfigurationError for a setting of the administrator's that makes no sense."""
    port = _administered(_PORT, environ, conf)
    address = _administered(_ADDRESS, environ, conf) or options.coordinator_bind_address
    return Placement(
        without_brackets(address or _drivers_address(environ, conf)),
        options.coordinator_port if port is None else port,
    )


def _administered(name: str, environ: Mapping[str, str], conf: Mapping[str, str]) -> Any:
    """The administrator's value of an option; None where there is none."""
    variable = "KAFKA_CHUNKED_" + name.upper().replace(".", "_")
    for source, text in ((variable, environ.get(variable)), (OWN_PREFIX + name, conf.get(OWN_PREFIX + name))):
        if text is None or not text.strip():
            continue
        try:
            return _KINDS[name].parse(text.strip())
        except ValueError as problem:
            raise ConfigurationError(f"'{source}' {problem}, got '{text.strip()}'") from None
    return None


def _drivers_address(environ: Mapping[str, str], conf: Mapping[str, str]) -> str:
    """What the driver itself listens on, by Spark's own rules."""
    return (
        conf.get("spark.driver.bindAddress")
        or conf.get("spark.driver.host")
        or environ.get("SPARK_LOCAL_HOSTNAME")
        or environ.get("SPARK_LOCAL_IP")
        or _own_address()
    )


def _own_address() -> str:
    """The address of this host's name, or where that is loopback, of the interface that leads elsewhere."""
    try:
        found = [one[4][0] for one in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)]
    except OSError:
        found = []
    for address in map(str, found):
        if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            return address
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(_ELSEWHERE)
            return str(probe.getsockname()[0])
    except OSError:
        return "127.0.0.1"
