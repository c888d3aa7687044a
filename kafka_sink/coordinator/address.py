"""How a planned write's tasks find the coordinator, and the warning when it cannot be used."""

from __future__ import annotations

from dataclasses import dataclass, field

from kafka_sink import spark_application
from kafka_sink.cluster.topic_state import MetadataSnapshot
from kafka_sink.driver import driver_log

# The addresses that mean all interfaces, for IPv4 and for IPv6.
ANY_ADDRESSES = ("0.0.0.0", "::")  # noqa: S104 - compared with, not bound to


@dataclass(frozen=True, slots=True)
class CoordinatorAddress:
    """The coordinator's address, and the secrets that prove who it and its tasks are. Spark pickles it.

    ``host``: a name or an address without brackets. ``fingerprint``, ``name`` and ``token``: see
    ``transport``. ``group``: a hash of the brokers' addresses and the principal, to which tasks add their
    client id. ``has_view``: True if there is a live view, so that tasks report what they do.
    """

    host: str
    port: int
    fingerprint: bytes
    name: str = field(repr=False)
    token: bytes = field(repr=False)
    group: str = ""
    has_view: bool = False


@dataclass(frozen=True, slots=True)
class PlannedCoordinator:
    """Planning's results for a write's tasks: the coordinator's address, and the metadata of their topics.

    ``address`` has no host if tasks connect to ``spark.driver.host``, which tasks know and planning does not.
    The driver looks up its own address: ``rendezvous.address_for_driver``.
    """

    address: CoordinatorAddress | None = None
    snapshot: MetadataSnapshot | None = None


def without_brackets(host: str) -> str:
    """Spark writes IPv6 addresses as ``[::1]``; sockets take ``::1``."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


# The marker that is renewed each time the coordinator could not be started.
UNAVAILABLE = "kafka-chunked: no coordinator"


def warn_of_no_coordinator(problem: str, about: str = "") -> None:
    """Warn once for all workers that share a folder, or otherwise once for each worker and ``about``."""
    if spark_application.first_time(f"no coordinator: {spark_application.folder() or about}"):
        driver_log.warn(
            f"kafka-chunked: {problem}. Writes continue without it, and each task asks the brokers directly"
        )


def warn_once(address: CoordinatorAddress, error: Exception) -> None:
    """Warn that this coordinator cannot be used, once on each host whose workers share a folder."""
    where = f"{address.host}:{address.port}"
    warn_of_no_coordinator(
        f"the coordinator at {where} cannot be used ({error}); tasks try again later. If tasks cannot reach "
        "the driver, set coordinator.port and coordinator.bind.address, or coordinator.enabled=false",
        # Planning and tasks may use different names for its host.
        about=f"port {address.port}",
    )
