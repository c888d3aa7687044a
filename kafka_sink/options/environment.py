"""Option values that differ from host to host: ``${env:NAME}`` is read from each process's environment."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping

from kafka_sink.errors import ConfigurationError

_log = logging.getLogger(__name__)
# The same form as in Kafka's EnvVarConfigProvider.
_VARIABLE = re.compile(r"\$\{env:([^}]+)\}")
_MAX_BYTES = 32_767
# Warnings that this process has logged.
_warned: set[str] = set()


def has_variables(value: str) -> bool:
    return _VARIABLE.search(value) is not None


def expanded(option: str, value: str, environ: Mapping[str, str] = os.environ) -> str:
    """The value of this option with its variables filled in. A warning names variables that are not set.
    Raises ConfigurationError for a text that is too long for a request."""
    missing = [name for name in _VARIABLE.findall(value) if not environ.get(name)]
    if missing:
        warning = (
            f"{option}={value}: this process has no environment variable {', '.join(missing)}, so that part "
            "is left empty. Set it in the environment of the driver and the executors "
            f"(spark.executorEnv.{missing[0]}, or conf/spark-env.sh)"
        )
        if warning not in _warned:
            _warned.add(warning)
            _log.warning("%s", warning)
    text = _VARIABLE.sub(lambda match: environ.get(match[1], ""), value)
    # Variables may hold bytes that are not valid UTF-8.
    data = text.encode("utf-8", "surrogateescape")
    if len(data) > _MAX_BYTES:
        raise ConfigurationError(
            f"Option '{option}' has {len(data)} bytes with the variables of this process, more than the "
            f"{_MAX_BYTES} that a request takes: set a shorter value"
        )
    return data.decode("utf-8", "replace")
