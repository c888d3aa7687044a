"""Options under ``kafka.producer.circuit.breaker.`` (KIP-693): one table, checked at planning.

A user's breaker class may have its own options, so unknown names are errors for the default class only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from kafka_sink.errors import ConfigurationError
from kafka_sink.options import values
from kafka_sink.options.values import BREAKER_PREFIX, KAFKA_PREFIX, LONG_MAX, Kind
from kafka_sink.secret import HIDDEN, Secret

DEFAULT_CLASS = "kafka_sink.breaker.FailureRateCircuitBreaker"
SWITCHED_OFF = "none"


# A probe needs one round trip, up to 300 ms between continents. With a shorter interval every probe would be
# given up before its response could arrive.
_MIN_RETRY_INTERVAL_MS = 100


def _retry_interval() -> Kind:
    kind = values.integer(_MIN_RETRY_INTERVAL_MS, LONG_MAX)

    def parse(text: str) -> int:
        try:
            return int(kind.parse(text))
        except ValueError as problem:
            reason = ": a probe needs a round trip" if "bounds" in str(problem) else ""
            raise ValueError(f"{problem}{reason}") from None

    return Kind(kind.label, kind.allowed, parse)


@dataclass(frozen=True)
class BreakerOption:
    """One option. With ``of_default_class`` another breaker class may give the name its own meaning."""

    name: str
    kind: Kind
    default: Any
    doc: str
    of_default_class: bool = True


BREAKER_OPTIONS: tuple[BreakerOption, ...] = (
    BreakerOption(
        "class",
        values.string(),
        DEFAULT_CLASS,
        "Dotted path of a subclass of `PartitionCircuitBreaker` that every executor can import. `none` "
        "disables the breaker. A class of your own gets all options under this prefix.",
        of_default_class=False,
    ),
    BreakerOption(
        "mute.retry.interval",
        _retry_interval(),
        2_000,
        "Milliseconds from a mute, or from a failed probe, to the next probe. A broker is probed with a "
        "request without rows, a partition with one batch. A successful probe ends the mute. With the "
        "coordinator, the whole job sends one probe per interval.",
        of_default_class=False,
    ),
    BreakerOption(
        "muted.buffer.memory.perc",
        values.integer(1, 100),
        50,
        "Percentage of `kafka.buffer.memory` that rows for muted partitions may use. These are rows with a "
        "key or a partition column; keyless rows go to other partitions. Beyond this limit such rows wait, "
        "and the task waits once the other rows that arrived with them are appended.",
        of_default_class=False,
    ),
    BreakerOption(
        "trigger.message.count",
        values.integer(1, LONG_MAX),
        1_000,
        "Minimum number of rows that must have been sent before failures can mute a partition. With the "
        "coordinator, rows of all tasks count.",
    ),
    BreakerOption(
        "trigger.failure.perc",
        values.integer(1, 100),
        50,
        "Percentage of failed batches within the last 10 s at which a partition is muted. At least three "
        "batches must have failed, each sent after the previous failure was known. With the coordinator, the "
        "same percentage of the tasks that write to the partition must have seen failures.",
    ),
    BreakerOption(
        "slow.request.min.ms",
        values.integer(0, LONG_MAX),
        500,
        "A broker is muted when a request to it has had no response for this long and for "
        "`slow.request.factor` times the broker's usual latency. Nothing is muted while all brokers with "
        "requests are silent. `0` disables this. Before a broker's first response, the limit is "
        "`slow.request.factor` times the slowest first response of another broker, but between two and six "
        "times this value; it is six times this value while no broker has responded. It never exceeds half "
        "of `kafka.request.timeout.ms`. While a connection is being set up, the limit is "
        "`slow.request.factor` times the duration of this broker's last setup (or of the slowest other one), "
        "and at least four times this value. After a refused or lost connection it is this value.",
    ),
    BreakerOption(
        "slow.request.factor",
        values.integer(1),
        5,
        "Multiple of a broker's usual latency; see `slow.request.min.ms`.",
    ),
    BreakerOption(
        "enable.mute.inflight.full",
        values.boolean(),
        False,
        "Keyless rows of a task avoid a broker while the task has a request in flight to it. Requires "
        "`kafka.max.in.flight.requests.per.connection=1`. This is no mute: the manager of a breaker class "
        "does not list such brokers as muted, and no metric, log line, probe or other task shows them.",
    ),
)
_BY_NAME = {option.name: option for option in BREAKER_OPTIONS}


@dataclass(frozen=True)
class BreakerSettings:
    """Settings for every breaker class. ``class_path`` is None if the breaker is off.

    ``given`` has all options under the prefix, as the user wrote them, by their names without the prefix. A
    user's class may take credentials, so ``repr`` hides them.
    """

    class_path: str | None = DEFAULT_CLASS
    mute_retry_interval_ms: float = _BY_NAME["mute.retry.interval"].default
    muted_buffer_perc: int = _BY_NAME["muted.buffer.memory.perc"].default
    given: tuple[tuple[str, str], ...] = field(default=(), repr=False)


def breaker_settings(given: Mapping[str, Secret]) -> BreakerSettings:
    # The other options may be credentials, and error trackers collect the local variables of every frame.
    common = {
        option.name: given[option.name].reveal()
        for option in BREAKER_OPTIONS
        if option.name in given and not option.of_default_class
    }
    path = value_of("class", common)
    return BreakerSettings(
        None if path.lower() == SWITCHED_OFF else path,
        value_of("mute.retry.interval", common),
        value_of("muted.buffer.memory.perc", common),
        tuple(sorted((name, text.reveal()) for name, text in given.items())),
    )


@dataclass(frozen=True)
class FailureRateSettings:
    """Options of the default class. If ``slow_request_min_ms`` is 0, slow brokers are not muted."""

    trigger_message_count: int
    trigger_failure_perc: int
    slow_request_min_ms: int
    slow_request_factor: int
    mute_in_flight_full: bool


def failure_rate_settings(given: Mapping[str, str]) -> FailureRateSettings:
    """Settings from the options under the prefix. Raises ConfigurationError, also for unknown names."""
    require_known(given)
    return FailureRateSettings(
        value_of("trigger.message.count", given),
        value_of("trigger.failure.perc", given),
        value_of("slow.request.min.ms", given),
        value_of("slow.request.factor", given),
        value_of("enable.mute.inflight.full", given),
    )


def value_of(name: str, given: Mapping[str, str]) -> Any:
    option = _BY_NAME[name]
    text = given.get(name)
    if text is None:
        return option.default
    try:
        return option.kind.parse(text.strip())
    except ValueError as problem:
        shown = HIDDEN if "@" in text else f"'{text.strip()}'"
        raise ConfigurationError(f"Option '{full_name(name)}' {problem}, got {shown}") from None


def require_known(given: Mapping[str, str]) -> None:
    for name in given:
        if name not in _BY_NAME:
            nearest = get_close_matches(name, _BY_NAME, n=1, cutoff=0.6)
            hint = f". Did you mean '{full_name(nearest[0])}'?" if nearest else ""
            raise ConfigurationError(f"Unknown option '{full_name(name)}'{hint}")


def full_name(name: str) -> str:
    return f"{KAFKA_PREFIX}{BREAKER_PREFIX}{name}"
