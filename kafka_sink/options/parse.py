"""Turns the options of a Spark job into SinkOptions. All options are checked here, before any work starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kafka_sink.errors import ConfigurationError
from kafka_sink.options import unsupported
from kafka_sink.options.checks import settle
from kafka_sink.options.suggestions import nearest
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

_BREAKER_OFF = "none"
_SINK_NAMES = [name for name in BY_NAME if not name.startswith(KAFKA_PREFIX)]
KAFKA_NAMES = [
    *(name.removeprefix(KAFKA_PREFIX) for name in BY_NAME if name.startswith(KAFKA_PREFIX)),
    *unsupported.WITHOUT_EFFECT,
    *unsupported.NOT_SUPPORTED,
    *unsupported.OF_OTHER_CLIENTS,
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
    ConfigurationError, whose message has the option, the problem and, for a misspelt option, the option that
    is probably meant. It lists all options that are unknown or not supported. Errors and warnings never
    contain values of secret, unsupported or unknown options.
    """
    # From here on, Secret hides the values: error trackers collect the local variables of every frame.
    given, doubled = _lowered(raw)
    del raw
    if doubled:
        raise ConfigurationError(f"Option '{doubled}' is given twice with different values")
    found = _Given()
    for name, text in given.items():
        found.add(name, text)
    found.require_known()
    settings = found.settings
    _require(settings, found.stray)
    values = {
        spec.attribute: _convert(spec, *settings[spec.attribute])
        for spec in SPECS
        if spec.attribute in settings
    }
    settled, warnings = settle(values)
    options = SinkOptions(
        **settled,
        breaker=_breaker_settings(found.breaker),
        topic_config=tuple(sorted(found.topic_config.items())),
        given=",".join(settings),
    )
    _check_topic_config(options)
    _check_schemes(settings["bootstrap_servers"][1].reveal(), options)
    return ParsedOptions(options, (*_about_ignored(found.ineffective, found.stray), *warnings))


def _lowered(raw: Mapping[str, str]) -> tuple[dict[str, Secret], str]:
    """The stripped values by lower-case name, and the name of an option that has two values, or "".

    Raises ConfigurationError for a value that cannot be encoded in UTF-8.
    """
    given: dict[str, Secret] = {}
    doubled = ""
    for key, text in raw.items():
        name, value = key.strip().lower(), Secret(text.strip())
        if not _is_unicode(text):
            raise ConfigurationError(
                f"Option '{name}' is not valid Unicode: it contains half a surrogate pair, as a text "
                "does that was read from bytes that are not UTF-8"
            )
        if given.setdefault(name, value) != value:
            doubled = name
    return given, doubled


def _is_unicode(text: str) -> bool:
    # The exception has the text in its arguments, so it ends here.
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _Given:
    """The options of a job, sorted by what is done with them.

    ``ineffective`` and ``stray`` options are ignored with a warning.
    """

    def __init__(self) -> None:
        self.settings: dict[str, tuple[str, Secret]] = {}
        self.breaker: dict[str, Secret] = {}
        self.topic_config: dict[str, str] = {}
        self.ineffective: list[str] = []
        self.stray: list[str] = []
        self._unknown: list[str] = []
        self._problems: list[str] = []

    def add(self, name: str, text: Secret) -> None:
        """Add one option. Raises ConfigurationError if another name of the same option has another value."""
        kafka_name = name.removeprefix(KAFKA_PREFIX)
        if name in BY_NAME:
            self._add_setting(BY_NAME[name], name, text)
        elif name.startswith(TOPIC_CONFIG_PREFIX):
            self.topic_config[name.removeprefix(TOPIC_CONFIG_PREFIX)] = text.reveal()
        elif kafka_name == name:
            self._add_without_prefix(name)
        elif kafka_name.startswith(BREAKER_PREFIX) and kafka_name != BREAKER_PREFIX:
            self.breaker[kafka_name.removeprefix(BREAKER_PREFIX)] = text
        elif kafka_name not in KAFKA_NAMES and not kafka_name.startswith(unsupported.PREFIXES):
            self._unknown.append(name)
        elif reason := unsupported.refusal(kafka_name, text.reveal()):
            self._problems.append(f"Kafka option '{kafka_name}' {reason}")
        elif unsupported.is_ineffective(kafka_name, text.reveal()):
            self.ineffective.append(name)

    def require_known(self) -> None:
        """Raise ConfigurationError for all options that are unknown or not supported."""
        problems = [_about_unknown(self._unknown)] if self._unknown else []
        problems += self._problems
        if problems:
            raise ConfigurationError("; ".join(problems))

    def _add_setting(self, spec: OptionSpec, name: str, text: Secret) -> None:
        earlier = self.settings.get(spec.attribute)
        if earlier and earlier[1] != text:
            raise ConfigurationError(
                f"Options '{earlier[0]}' and '{name}' are the same option: give only one"
            )
        self.settings[spec.attribute] = (name, text)

    def _add_without_prefix(self, name: str) -> None:
        if name in unsupported.SPARK_OWN:
            return
        if _lacks_prefix(name):
            self._problems.append(
                f"Option '{name}' has no effect without the prefix 'kafka.': write 'kafka.{name}'"
            )
        else:
            (self._unknown if _is_misspelt(name) else self.stray).append(name)


def _convert(spec: OptionSpec, name: str, text: Secret) -> Any:
    if not spec.secret and looks_like_key(text.reveal()):
        wanted = "a path" if name.endswith(".location") else "its value"
        raise ConfigurationError(
            f"Option '{name}' contains a private key or a certificate instead of {wanted}, got {HIDDEN}. "
            "Put it into kafka.ssl.keystore.key, kafka.ssl.keystore.certificate.chain or "
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


def _lacks_prefix(name: str) -> bool:
    """Whether the name without ``kafka.`` is that of an option whose loss the author would not notice."""
    guards = name in KAFKA_NAMES and name.startswith(("ssl.", "sasl.", "transactional."))
    return guards or KAFKA_PREFIX + name in BY_NAME


def _is_misspelt(name: str) -> bool:
    """Whether a name is nearly an option of this sink. Without the option the job would write at least once
    instead of exactly once, without a limit, or otherwise than its author thinks."""
    return name not in KAFKA_NAMES and nearest(name, BY_NAME) is not None


def _about_unknown(names: list[str]) -> str:
    """One sentence with all unknown options, and the options that they are probably meant to be."""
    meant = {name: _meant(name) for name in names}
    if len(names) == 1:
        (name,) = names
        hint = f". Did you mean {meant[name]}?" if meant[name] else ""
        removal = "" if name.startswith(KAFKA_PREFIX) else " Remove it if it is not meant for this sink"
        return f"Unknown option '{name}'{hint}{removal}"
    listed = (f"'{name}'" + (f" (did you mean {meant[name]}?)" if meant[name] else "") for name in names)
    return f"Unknown options: {', '.join(listed)}"


def _meant(name: str) -> str:
    """The option that is probably meant, in quotes; "" if there is none. Options of Kafka are suggested for
    names with the prefix ``kafka.`` alone."""
    kafka_name = name.removeprefix(KAFKA_PREFIX)
    if kafka_name == name:
        option = nearest(name, BY_NAME)
        return f"'{BY_NAME[option].name}'" if option else ""
    if kafka_name in _SINK_NAMES:
        return f"'{kafka_name}', without the prefix 'kafka.'"
    option = nearest(kafka_name, (one for one in KAFKA_NAMES if KAFKA_PREFIX + one in BY_NAME))
    return f"'{KAFKA_PREFIX}{option}'" if option else ""


def _require(settings: Mapping[str, tuple[str, Secret]], stray: list[str]) -> None:
    for spec in SPECS:
        if spec.required and spec.attribute not in settings:
            wanted = spec.name.removeprefix(KAFKA_PREFIX)
            near = next((name for name in stray if nearest(name, (wanted,))), None)
            hint = f" (found '{near}': the name is '{spec.name}')" if near else ""
            raise ConfigurationError(f"Option '{spec.name}' must be specified{hint}")


def _check_topic_config(options: SinkOptions) -> None:
    if options.topic_config and not options.topic_create:
        name = TOPIC_CONFIG_PREFIX + options.topic_config[0][0]
        raise ConfigurationError(f"Option '{name}' has no effect without topic.create=true")


def _check_schemes(addresses: str, options: SinkOptions) -> None:
    """Refuse an address with another protocol in front. Java ignores it, and would send rows unencrypted."""
    if others := schemes(addresses) - {options.security_protocol}:
        raise ConfigurationError(
            f"Option 'kafka.bootstrap.servers' has the protocol {sorted(others)[0]} in front of an "
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
    meant = nearest(name, KAFKA_NAMES)
    return f" (did you mean '{KAFKA_PREFIX}{meant}'?)" if meant else ""


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
            meant = nearest(name, BREAKER_BY_NAME)
            hint = f". Did you mean '{breaker_option_name(meant)}'?" if meant else ""
            raise ConfigurationError(f"Unknown option '{breaker_option_name(name)}'{hint}")
    texts = {name: Secret(text.strip()) for name, text in given.items()}
    return FailureRateSettings(*(breaker_value(option.name, texts) for option in FAILURE_RATE_OPTIONS))


def breaker_value(name: str, given: Mapping[str, Secret]) -> Any:
    option = BREAKER_BY_NAME[name]
    return _convert(option, breaker_option_name(name), given[name]) if name in given else option.default
