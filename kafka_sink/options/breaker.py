"""What stands under ``kafka.producer.circuit.breaker.`` (KIP-693): one declared table, judged at planning.

A class of the user's takes options of its own, so unknown names are errors for the default class only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from kafka_sink.errors import ConfigurationError
from kafka_sink.options import values
from kafka_sink.options.prefixes import BREAKER_PREFIX, KAFKA_PREFIX
from kafka_sink.options.values import LONG_MAX, Kind
from kafka_sink.secret import HIDDEN, Secret

DEFAULT_CLASS = "kafka_sink.breaker.FailureRateCircuitBreaker"
SWITCHED_OFF = "none"


# A probe's answer takes a round trip, to another continent three tenths of a second: with less than this
# every probe would be given up before it could come.
_MIN_RETRY_INTERVAL_MS = 100


def _retry_interval() -> Kind:
    kind = values.integer(_MIN_RETRY_INTERVAL_MS, LONG_MAX)

    def parse(text: str) -> int:
        try:
            return int(kind.parse(text))
        except ValueError as problem:
            reason = ": a probe's answer takes a round trip" if "bounds" in str(problem) else ""
            raise ValueError(f"{problem}{reason}") from None

    return Kind(kind.label, kind.allowed, parse)


@dataclass(frozen=True)
class BreakerOption:
    """One option; ``of_default_class``: another class may give the name its own meaning."""

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
        "Dotted path of a subclass of `PartitionCircuitBreaker` that every executor can import; `none` "
        "switches the breaker off. An own class gets all options under this prefix.",
        of_default_class=False,
    ),
    BreakerOption(
        "mute.retry.interval",
        _retry_interval(),
        2_000,
        "Milliseconds from a mute, or from a failed probe, to the next probe: of a broker a request without "
        "rows, of a partition one batch. Its success ends the mute. With the coordinator, one probe per "
        "interval for the whole job.",
        of_default_class=False,
    ),
    BreakerOption(
        "muted.buffer.memory.perc",
        values.integer(1, 100),
        50,
        "Share of `kafka.buffer.memory`, in percent, that rows for muted partitions may hold (rows with a "
        "key or a partition column; others go elsewhere). Past it such rows wait, and the task with them "
        "once the other rows of its unit are through.",
        of_default_class=False,
    ),
    BreakerOption(
        "trigger.message.count",
        values.integer(1, LONG_MAX),
        1_000,
        "Least number of rows sent, in all, before failures may mute a partition; with the coordinator, by "
        "all tasks together.",
    ),
    BreakerOption(
        "trigger.failure.perc",
        values.integer(1, 100),
        50,
        "Share of a partition's batches of the last 10 s, in percent, from which on it is muted where they "
        "fail; three must have failed, each sent after the failure before was known. With the coordinator, "
        "also the share of the tasks that write to it.",
    ),
    BreakerOption(
        "slow.request.min.ms",
        values.integer(0, LONG_MAX),
        500,
        "A broker is muted when a request to it has had no answer for this long and for "
        "`slow.request.factor` times its usual latency, unless all brokers that are asked are silent; `0` "
        "never does that. Before a broker's first answer: that factor of the slowest first answer of others, "
        "but two to six times this; six times while none has answered. Half of `kafka.request.timeout.ms` "
        "at most. While a connection is being made: that factor of the time that this broker's last one took "
        "(or the slowest of others), four times this at least; where it was refused or lost, this.",
    ),
    BreakerOption(
        "slow.request.factor",
        values.integer(1),
        5,
        "See `slow.request.min.ms`.",
    ),
    BreakerOption(
        "enable.mute.inflight.full",
        values.boolean(),
        False,
        "Keyless rows avoid a broker while a request to it is unanswered. Needs "
        "`kafka.max.in.flight.requests.per.connection=1`.",
    ),
)
_BY_NAME = {option.name: option for option in BREAKER_OPTIONS}


@dataclass(frozen=True)
class BreakerSettings:
    """What holds for every breaker class. ``class_path`` is None where the breaker is off.

    ``given`` are all options under the prefix, by their names without it, as the user wrote them. A class of
    the user's may take credentials, so their values are hidden.
    """

    class_path: str | None = DEFAULT_CLASS
    mute_retry_interval_ms: float = _BY_NAME["mute.retry.interval"].default
    muted_buffer_perc: int = _BY_NAME["muted.buffer.memory.perc"].default
    given: tuple[tuple[str, str], ...] = field(default=(), repr=False)


def breaker_settings(given: Mapping[str, Secret]) -> BreakerSettings:
    """Settings from the options under the prefix, by their names without it. Raises ConfigurationError."""
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
    """The default class's options. Where ``slow_request_min_ms`` is 0, silence mutes nothing."""

    trigger_message_count: int
    trigger_failure_perc: int
    slow_request_min_ms: int
    slow_request_factor: int
    mute_in_flight_full: bool


def failure_rate_settings(given: Mapping[str, str]) -> FailureRateSettings:
    """Settings from the options under the prefix. Raises ConfigurationError, also for unknown names."""
    refuse_unknown(given)
    return FailureRateSettings(
        value_of("trigger.message.count", given),
        value_of("trigger.failure.perc", given),
        value_of("slow.request.min.ms", given),
        value_of("slow.request.factor", given),
        value_of("enable.mute.inflight.full", given),
    )


def value_of(name: str, given: Mapping[str, str]) -> Any:
    """One option's value, its default where it is not given. Raises ConfigurationError naming it."""
    option = _BY_NAME[name]
    text = given.get(name)
    if text is None:
        return option.default
    try:
        return option.kind.parse(text.strip())
    except ValueError as problem:
        shown = HIDDEN if "@" in text else f"'{text.strip()}'"
        raise ConfigurationError(f"Option '{full_name(name)}' {problem}, got {shown}") from None


def refuse_unknown(given: Mapping[str, str]) -> None:
    """Raises ConfigurationError for options that the default class does not have."""
    for name in given:
        if name not in _BY_NAME:
            nearest = get_close_matches(name, _BY_NAME, n=1, cutoff=0.6)
            hint = f". Did you mean '{full_name(nearest[0])}'?" if nearest else ""
            raise ConfigurationError(f"Unknown option '{full_name(name)}'{hint}")


def full_name(name: str) -> str:
    """As users write it."""
    return f"{KAFKA_PREFIX}{BREAKER_PREFIX}{name}"
