"""Turns the options of a Spark job into SinkOptions. All options are checked here, before any work starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from kafka_sink.errors import ConfigurationError
from kafka_sink.options import unsupported
from kafka_sink.options.checks import settle
from kafka_sink.options.table import (
    BREAKER_BY_NAME,
    BY_NAME,
    FAILURE_RATE_OPTIONS,
    SPECS,
    BreakerSettings,
    OptionSpec,
    ParsedOptions,
    SinkOptions,
    breaker_option_name,
)
from kafka_sink.options.values import (
    BREAKER_PREFIX,
    KAFKA_PREFIX,
    TOPIC_CONFIG_PREFIX,
    looks_like_key,
    schemes,
    without_unit,
)
from kafka_sink.printable import printable
from kafka_sink.secret import HIDDEN, Secret

# How similar a name must be (difflib's ratio) to be taken for a misspelt option. No option of Spark or Kafka
# is this similar to an option of this sink.
_MISSPELT = 0.8
_BREAKER_OFF = "none"
_SINK_NAMES = [name for name in BY_NAME if not name.startswith(KAFKA_PREFIX)]
KAFKA_NAMES = [
    *(name.removeprefix(KAFKA_PREFIX) for name in BY_NAME if name.startswith(KAFKA_PREFIX)),
    *unsupported.WITHOUT_EFFECT,
    *unsupported.NOT_SUPPORTED,
]


def texts(options: Mapping[str, Any]) -> dict[str, str]:
    """Convert the options that a program passes to the texts that ``parse`` expects. As in Spark, None is
    ignored.

    Raises ConfigurationError if ``options`` is not a mapping, or if a value is not a text, number, True or
    False.
    """
    if not isinstance(options, Mapping):
        raise ConfigurationError(
            "options must be a mapping of names to values, such as {'kafka.bootstrap.servers': '...'}, not "
            + type(options).__name__
        )
    given: dict[str, str] = {}
    for name, value in options.items():
        if not isinstance(name, str) or not isinstance(value, str | bool | int | float | None):
            # The message omits the value, because it may be a secret of the wrong type.
            raise ConfigurationError(
                f"Option '{name}' must be a text, a number, True or False, not {type(value).__name__}"
            )
        if value is not None:
            given[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return given


def parse(raw: Mapping[str, str]) -> ParsedOptions:
    """Check and convert the options of one job.

    ``raw`` maps names to texts. Names may have any case, because Spark converts them to lower case. Raises
    ConfigurationError, whose message has the option, the problem and, for an unknown option, the most similar
    known option. Errors and warnings never contain values of secret, unsupported or unknown options.
    """
    # From here on, Secret hides the values: error trackers collect the local variables of every frame.
    given, doubled = _lowered(raw)
    del raw
    if doubled:
        raise ConfigurationError(f"Option '{doubled}' is given twice with different values")
    breaker: dict[str, Secret] = {}
    topic_config: dict[str, str] = {}
    settings: dict[str, tuple[str, Secret]] = {}
    ineffective, stray = [], []
    for name, text in given.items():
        kafka_name = name.removeprefix(KAFKA_PREFIX)
        if name in BY_NAME:
            _note(settings, BY_NAME[name], name, text)
        elif name.startswith(TOPIC_CONFIG_PREFIX):
            topic_config[name.removeprefix(TOPIC_CONFIG_PREFIX)] = text.reveal()
        elif kafka_name == name:
            if name not in unsupported.SPARK_OWN:
                _require_no_mistake(name)
                stray.append(name)
        elif kafka_name.startswith(BREAKER_PREFIX) and kafka_name != BREAKER_PREFIX:
            breaker[kafka_name.removeprefix(BREAKER_PREFIX)] = text
        elif _is_without_effect(kafka_name, text):
            ineffective.append(name)
    _require(settings, stray)
    values = {
        spec.attribute: _convert(spec, *settings[spec.attribute])
        for spec in SPECS
        if spec.attribute in settings
    }
    settled, warnings = settle(values)
    options = SinkOptions(
        **settled, breaker=_breaker_settings(breaker), topic_config=tuple(sorted(topic_config.items()))
    )
    _check_topic_config(options)
    _check_schemes(settings["bootstrap_servers"][1].reveal(), options)
    return ParsedOptions(options, (*_about_ignored(ineffective, stray), *warnings))


def _lowered(raw: Mapping[str, str]) -> tuple[dict[str, Secret], str]:
    """The stripped values by lower-case name, and the name of an option that has two values, or ""."""
    given: dict[str, Secret] = {}
    doubled = ""
    for key, text in raw.items():
        name, value = key.strip().lower(), Secret(text.strip())
        if given.setdefault(name, value) != value:
            doubled = name
    return given, doubled


def _note(settings: dict[str, tuple[str, Secret]], spec: OptionSpec, name: str, text: Secret) -> None:
    """Record a supported option. If it is given under two names, both must have the same value."""
    earlier = settings.get(spec.attribute)
    if earlier and earlier[1] != text:
        raise ConfigurationError(f"Options '{earlier[0]}' and '{name}' are the same option: give only one")
    settings[spec.attribute] = (name, text)


def _convert(spec: OptionSpec, name: str, text: Secret) -> Any:
    if not spec.secret and looks_like_key(text.reveal()):
        wanted = "a path" if name.endswith(".location") else "something else"
        raise ConfigurationError(
            f"Option '{name}' holds a private key or a certificate where {wanted} belongs, got {HIDDEN}. "
            "Such a text goes into kafka.ssl.keystore.key, .certificate.chain or "
            "kafka.ssl.truststore.certificates; a file is safer"
        )
    try:
        if spec.kind.is_number:
            return spec.kind.parse(without_unit(spec.name, text.reveal()))
        return spec.kind.parse(text.reveal())
    except ValueError as error:
        problem = str(error)
    # An @ in a list of addresses means that it contains a password. The error is raised outside the except
    # block, because a traceback that includes the cause would show the value.
    shown = HIDDEN if spec.secret or "@" in text.reveal() else f"'{printable(text.reveal())}'"
    raise ConfigurationError(f"Option '{name}' {problem}, got {shown}")


def _is_without_effect(kafka_name: str, text: Secret) -> bool:
    """Whether the option is one of Kafka's and is set, but changes nothing here.

    Raises ConfigurationError if the option is unknown, or is set to something that this sink does not
    support.
    """
    if kafka_name in unsupported.WITHOUT_EFFECT or kafka_name.startswith("metrics.context."):
        default, _ = unsupported.WITHOUT_EFFECT.get(kafka_name, ("", ""))
        return not unsupported.same_setting(text.reveal(), default)
    found = unsupported.not_supported(kafka_name)
    if found:
        default, reason = found
        serializer = kafka_name in ("key.serializer", "value.serializer")
        if serializer or not unsupported.same_setting(text.reveal(), default):
            raise ConfigurationError(f"Kafka option '{kafka_name}' {reason}")
        return False
    nearest = get_close_matches(kafka_name, KAFKA_NAMES, n=1, cutoff=0.6)
    hint = f". Did you mean 'kafka.{nearest[0]}'?" if nearest else ""
    if kafka_name in _SINK_NAMES:
        hint = f". Did you mean '{kafka_name}', without the prefix 'kafka.'?"
    raise ConfigurationError(f"Unknown option 'kafka.{kafka_name}'{hint}")


def _require_no_mistake(name: str) -> None:
    """Refuse an option that was meant for this sink but would have no effect.

    The job would otherwise run without the setting, for example at least once or without a rate limit.
    """
    guards = name in KAFKA_NAMES and name.startswith(("ssl.", "sasl.", "transactional."))
    if guards or KAFKA_PREFIX + name in BY_NAME:
        raise ConfigurationError(
            f"Option '{name}' has no effect without the prefix 'kafka.': write 'kafka.{name}'"
        )
    nearest = get_close_matches(name, BY_NAME, n=1, cutoff=_MISSPELT)
    if nearest and name not in KAFKA_NAMES:
        raise ConfigurationError(
            f"Unknown option '{name}'. Did you mean '{BY_NAME[nearest[0]].name}'? Remove it if it is "
            "not meant for this sink"
        )


def _require(settings: Mapping[str, tuple[str, Secret]], stray: list[str]) -> None:
    for spec in SPECS:
        if spec.required and spec.attribute not in settings:
            wanted = spec.name.removeprefix(KAFKA_PREFIX)
            near = get_close_matches(wanted, stray, n=1, cutoff=0.7)
            hint = f" (found '{near[0]}': the name is '{spec.name}')" if near else ""
            raise ConfigurationError(f"Option '{spec.name}' must be specified{hint}")


def _check_topic_config(options: SinkOptions) -> None:
    if options.topic_config and not options.topic_create:
        name = TOPIC_CONFIG_PREFIX + options.topic_config[0][0]
        raise ConfigurationError(f"Option '{name}' has no effect without topic.create=true")


def _check_schemes(addresses: str, options: SinkOptions) -> None:
    """Refuse an address with another protocol in front. Java ignores it, and would send rows unencrypted."""
    if others := schemes(addresses) - {options.security_protocol}:
        raise ConfigurationError(
            f"Option 'kafka.bootstrap.servers' names the protocol {sorted(others)[0]} in front of an "
            f"address, but kafka.security.protocol is {options.security_protocol}"
        )


def _about_ignored(ineffective: list[str], stray: list[str]) -> list[str]:
    warnings = []
    if ineffective:
        names = ", ".join(sorted(ineffective))
        warnings.append(f"These Kafka options have no effect on this sink: {names}")
    if stray:
        names = ", ".join(name + _suggestion(name) for name in sorted(stray))
        warnings.append(f"Unknown options are ignored: {names}")
    return warnings


def _suggestion(name: str) -> str:
    if name == "subscribe":
        return " (did you mean 'topic'?)"
    nearest = get_close_matches(name, KAFKA_NAMES, n=1, cutoff=_MISSPELT)
    return f" (did you mean '{KAFKA_PREFIX}{nearest[0]}'?)" if nearest else ""


def _breaker_settings(given: Mapping[str, Secret]) -> BreakerSettings:
    path = breaker_value("class", given)
    return BreakerSettings(
        None if path.lower() == _BREAKER_OFF else path,
        breaker_value("mute.retry.interval", given),
        breaker_value("muted.buffer.memory.perc", given),
        tuple(sorted((name, text.reveal()) for name, text in given.items())),
    )


@dataclass(frozen=True)
class FailureRateSettings:
    """The options of the default breaker class. If ``slow_request_min_ms`` is 0, slow brokers are not
    muted."""

    trigger_message_count: int
    trigger_failure_perc: int
    slow_request_min_ms: int
    slow_request_factor: int
    mute_in_flight_full: bool


def failure_rate_settings(given: Mapping[str, str]) -> FailureRateSettings:
    """The settings of the default class. Raises ConfigurationError for invalid values and unknown names."""
    for name in given:
        if name not in BREAKER_BY_NAME:
            nearest = get_close_matches(name, BREAKER_BY_NAME, n=1, cutoff=0.6)
            hint = f". Did you mean '{breaker_option_name(nearest[0])}'?" if nearest else ""
            raise ConfigurationError(f"Unknown option '{breaker_option_name(name)}'{hint}")
    texts = {name: Secret(text.strip()) for name, text in given.items()}
    return FailureRateSettings(*(breaker_value(option.name, texts) for option in FAILURE_RATE_OPTIONS))


def breaker_value(name: str, given: Mapping[str, Secret]) -> Any:
    option = BREAKER_BY_NAME[name]
    return _convert(option, breaker_option_name(name), given[name]) if name in given else option.default
