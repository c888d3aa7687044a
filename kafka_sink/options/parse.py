"""Turns the options of a Spark job into SinkOptions. All options are checked here, before any work starts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kafka_sink.errors import ConfigurationError
from kafka_sink.options import unsupported
from kafka_sink.options.checks import settle
from kafka_sink.options.suggestions import nearest
from kafka_sink.options.table import (
    BREAKER_BY_NAME,
    BY_NAME,
    DEFAULT_BREAKER,
    FAILURE_RATE_OPTIONS,
    SPECS,
    BreakerSettings,
    FailureRateSettings,
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
from kafka_sink.secret import HIDDEN, HiddenValues, Secret

_BREAKER_OFF = "none"
# Half a pair, which no text of Unicode contains.
_SURROGATE = re.compile("[\ud800-\udfff]")
KAFKA_NAMES = [
    *(name.removeprefix(KAFKA_PREFIX) for name in BY_NAME if name.startswith(KAFKA_PREFIX)),
    *unsupported.WITHOUT_EFFECT,
    *unsupported.NOT_SUPPORTED,
    *unsupported.OF_OTHER_CLIENTS,
]


def texts(options: Mapping[str, Any]) -> dict[str, str]:
    """Convert the options that a program passes to the texts that ``parse`` expects. As in Spark, None is
    ignored. Raises ConfigurationError if ``options`` is not a mapping, or if a value is not a text, number,
    True or False."""
    if not isinstance(options, Mapping):
        raise ConfigurationError(
            "options must be a mapping of names to values, such as {'topic': 'orders'}, not "
            + ("int: use kafka_sink.foreach_batch({...})" if type(options) is int else type(options).__name__)
        )
    given: dict[str, str] = {}
    for name, value in options.items():
        if not isinstance(name, str) or not isinstance(value, str | bool | int | float | None):
            # The message omits the value, because it may be a secret of the wrong type.
            spec = BY_NAME.get(str(name).lower())
            is_list = spec is not None and spec.kind.label == "list" and isinstance(value, list | tuple)
            joined = "; join its items with commas" if is_list else ""
            raise ConfigurationError(
                f"Option '{name}' must be a text, a number, True or False, not {type(value).__name__}{joined}"
            )
        if value is not None:
            given[name] = str(value).lower() if isinstance(value, bool) else str(value)
    return given


def parse(raw: Mapping[str, str]) -> ParsedOptions:
    """Check and convert the options of one job.

    ``raw`` maps names to texts. Names may have any case, because Spark converts them to lower case. Raises
    ConfigurationError, whose message has the option, the problem and, for a misspelt option, the option that
    is probably meant. It lists all options that are unknown, not supported or have an invalid value. Errors
    and warnings never contain values of secret, unsupported or unknown options.
    """
    # From here on, Secret hides the values: error trackers collect the local variables of every frame.
    secrets = [(name.strip().lower(), Secret(text.strip())) for name, text in raw.items()]
    del raw
    given = _Given()
    for name, text in secrets:
        given.add(name, text)
    settings = given.settings
    settled, warnings = settle(given.values())
    options = SinkOptions(
        **settled,
        breaker=_breaker_settings(given.breaker),
        topic_config=tuple(sorted(given.topic_config.items())),
        given=",".join(settings),
    )
    if options.breaker.class_path == DEFAULT_BREAKER:
        failure_rate_settings(
            HiddenValues(options.breaker.given), options.max_in_flight_requests_per_connection
        )
    elif options.breaker.class_path is None:
        given.ineffective += [breaker_option_name(name) for name in given.breaker if name != "class"]
    if options.topic_config and not options.topic_create:
        name = TOPIC_CONFIG_PREFIX + options.topic_config[0][0]
        raise ConfigurationError(f"Option '{name}' has no effect without topic.create=true")
    _check_schemes(settings["bootstrap_servers"][1].reveal(), options)
    return ParsedOptions(options, (*given.warnings(), *warnings))


class _Given:
    """The options of a job, sorted by what is done with them. ``ineffective`` and ``stray`` options are
    ignored with a warning."""

    def __init__(self) -> None:
        self.settings: dict[str, tuple[str, Secret]] = {}
        self.breaker: dict[str, Secret] = {}
        self.topic_config: dict[str, str] = {}
        self.ineffective: list[str] = []
        self.stray: list[str] = []
        self._all: dict[str, Secret] = {}
        self._unknown: list[str] = []
        self._problems: list[str] = []

    def add(self, name: str, text: Secret) -> None:
        """Add one option. Raises ConfigurationError for a second value of it, and for an invalid text."""
        if _SURROGATE.search(text.reveal()):
            raise ConfigurationError(
                f"Option '{name}' is not valid Unicode: it contains half a surrogate pair, as a text "
                "does that was read from bytes that are not UTF-8"
            )
        if self._all.setdefault(name, text) != text:
            raise ConfigurationError(f"Option '{name}' is given twice with different values")
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
            self._problems.append(f"Option '{name}' {reason}")
        elif unsupported.is_ineffective(kafka_name, text.reveal()):
            self.ineffective.append(name)

    def values(self) -> dict[str, Any]:
        """The converted values by attribute. Raises one ConfigurationError for all options that are unknown,
        not supported or have an invalid value, and one for an option that is missing."""
        values: dict[str, Any] = {}
        for spec in SPECS:
            if spec.attribute in self.settings:
                try:
                    values[spec.attribute] = _convert(spec, *self.settings[spec.attribute])
                except ConfigurationError as error:
                    self._problems.append(str(error))
        self._require_valid()
        return values

    def _require_valid(self) -> None:
        if self._unknown:
            options = "options" if len(self._unknown) > 1 else "option"
            names = ", ".join(f"'{name}'{_did_you_mean(name)}" for name in self._unknown)
            self._problems.insert(0, f"Unknown {options} {names}")
        if self._problems:
            raise ConfigurationError("; ".join(self._problems))
        for spec in SPECS:
            if spec.required and spec.attribute not in self.settings:
                near = next((name for name in self.stray if _meant(name) == spec.name), None)
                example = ", as in broker1:9092,broker2:9092"
                hint = f" (found '{near}': the name is '{spec.name}')" if near else example
                raise ConfigurationError(f"Option '{spec.name}' must be specified{hint}")

    def warnings(self) -> Iterator[str]:
        if self.ineffective:
            yield f"These Kafka options have no effect on this sink: {', '.join(sorted(self.ineffective))}"
        if self.stray:
            names = ", ".join(name + _did_you_mean(name) for name in sorted(self.stray))
            yield f"Unknown options are ignored: {names}"
        if "path" in self._all:
            yield "The path of save() or start() is ignored: option or column 'topic' decides where rows go"

    def _add_setting(self, spec: OptionSpec, name: str, text: Secret) -> None:
        earlier = self.settings.get(spec.attribute)
        if earlier and earlier[1] != text:
            raise ConfigurationError(
                f"Options '{earlier[0]}' and '{name}' are the same option: give only one"
            )
        # Spark's names are in lower case. Messages have the name as the documentation has it: txnVersion.
        self.settings[spec.attribute] = (spec.name if name == spec.name.lower() else name, text)

    def _add_without_prefix(self, name: str) -> None:
        if name in unsupported.SPARK_OWN:
            return
        is_of_kafka = name in KAFKA_NAMES
        # The author would not notice the loss of these options.
        if KAFKA_PREFIX + name in BY_NAME or (
            is_of_kafka and name.startswith(("ssl.", "sasl.", "transactional."))
        ):
            self._problems.append(
                f"Option '{name}' has no effect without the prefix 'kafka.': write 'kafka.{name}'"
            )
        # Without an option of this sink that is misspelt, the job would write at least once instead of
        # exactly once, without a limit, or otherwise than its author thinks.
        elif not is_of_kafka and nearest(name, BY_NAME):
            self._unknown.append(name)
        else:
            self.stray.append(name)


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


def _did_you_mean(name: str) -> str:
    meant = _meant(name)
    return f" (did you mean '{meant}'?)" if meant else ""


def _meant(name: str) -> str:
    """The option that an unknown name is probably meant to be; "" if there is none."""
    kafka_name = name.removeprefix(KAFKA_PREFIX)
    # The option of Spark's Kafka source.
    if name == "subscribe":
        return "topic"
    if kafka_name in BY_NAME:
        return kafka_name
    if option := nearest(name, BY_NAME):
        return BY_NAME[option].name
    option = unsupported.OF_LIBRDKAFKA.get(kafka_name) or nearest(kafka_name, KAFKA_NAMES)
    return KAFKA_PREFIX + option if option else ""


def _check_schemes(addresses: str, options: SinkOptions) -> None:
    """Refuse an address with another protocol in front. Java ignores it, and would send rows unencrypted."""
    if other_schemes := schemes(addresses) - {options.security_protocol}:
        raise ConfigurationError(
            f"Option 'kafka.bootstrap.servers' has the protocol {sorted(other_schemes)[0]} in front of an "
            f"address, but kafka.security.protocol is {options.security_protocol}"
        )


def _breaker_settings(given: Mapping[str, Secret]) -> BreakerSettings:
    path = breaker_value("class", given)
    return BreakerSettings(
        None if path.lower() == _BREAKER_OFF else path,
        breaker_value("mute.retry.interval", given),
        breaker_value("muted.buffer.memory.perc", given),
        tuple(sorted((name, text.reveal()) for name, text in given.items())),
    )


def failure_rate_settings(given: Mapping[str, str], max_in_flight: int = 1) -> FailureRateSettings:
    """The settings of the default class. Raises ConfigurationError for invalid values and unknown names."""
    for name in given:
        if name not in BREAKER_BY_NAME:
            meant = nearest(name, BREAKER_BY_NAME)
            hint = f" (did you mean '{breaker_option_name(meant)}'?)" if meant else ""
            raise ConfigurationError(f"Unknown option '{breaker_option_name(name)}'{hint}")
    texts = {name: Secret(text.strip()) for name, text in given.items()}
    settings = FailureRateSettings(*(breaker_value(option.name, texts) for option in FAILURE_RATE_OPTIONS))
    if settings.mute_in_flight_full and max_in_flight != 1:
        raise ConfigurationError(
            f"Option '{breaker_option_name('enable.mute.inflight.full')}' needs "
            "kafka.max.in.flight.requests.per.connection=1: with more requests in flight, a request without "
            "a response is normal. Set that option, or remove this one"
        )
    return settings


def breaker_value(name: str, given: Mapping[str, Secret]) -> Any:
    option = BREAKER_BY_NAME[name]
    return _convert(option, breaker_option_name(name), given[name]) if name in given else option.default
