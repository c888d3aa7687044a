"""Makes the configured breaker object. Called at planning too, so that a faulty class fails there."""

from __future__ import annotations

import importlib

from kafka_sink.breaker.interface import PartitionCircuitBreaker
from kafka_sink.errors import ConfigurationError
from kafka_sink.options import SinkOptions
from kafka_sink.options.breaker import full_name
from kafka_sink.secret import HiddenValues


def load_breaker(options: SinkOptions) -> PartitionCircuitBreaker | None:
    """The breaker of producer.circuit.breaker.class; None if that is ``none``.

    Raises ConfigurationError with the reason if the class cannot be imported, made or configured.
    """
    path = options.breaker.class_path
    if path is None:
        return None
    option = full_name("class")
    module, _, name = path.rpartition(".")
    if not module:
        raise ConfigurationError(
            f"Option '{option}' must be a dotted path such as package.module.Class, got '{path}'"
        )
    problem = f"Option '{option}': '{path}' cannot be loaded: module '{module}'"
    try:
        found = getattr(importlib.import_module(module), name, None)
    except (Exception, SystemExit) as error:
        raise ConfigurationError(f"{problem} cannot be imported: {error!r}") from error
    if found is None:
        raise ConfigurationError(f"{problem} has no class '{name}'")
    if not (isinstance(found, type) and issubclass(found, PartitionCircuitBreaker)):
        raise ConfigurationError(
            f"Option '{option}': '{path}' is not a subclass of kafka_sink.breaker.PartitionCircuitBreaker"
        )
    # A class of the user's may take credentials, and error trackers collect the variables of every frame.
    given = HiddenValues((name, text) for name, text in options.breaker.given if name != "class")
    given["max.in.flight.requests.per.connection"] = str(options.max_in_flight_requests_per_connection)
    given["request.timeout.ms"] = str(options.request_timeout_ms)
    try:
        breaker = found()
        breaker.configure(given)
    except ConfigurationError:
        raise
    except (Exception, SystemExit) as error:
        raise ConfigurationError(f"Option '{option}': '{path}' cannot be configured: {error!r}") from error
    return breaker
