"""The table of error codes against kafka-python's, and against the rules for batches."""

from __future__ import annotations

from kafka.errors import for_code

from kafka_sink import kafka_errors
from kafka_sink.engine.response_classifier import Action, AttemptFacts, classify_response
from kafka_sink.kafka_errors import ERRORS, KafkaError, error_of
from kafka_sink.model import TopicPartition

# Kafka renamed these, or kafka-python uses other words; the table has the names of Kafka's protocol guide.
_NAMES_IN_KAFKA_PYTHON = {
    "UNKNOWN_SERVER_ERROR": "UNKNOWN",
    "NONE": "NO_ERROR",
    "NOT_LEADER_OR_FOLLOWER": "NOT_LEADER_FOR_PARTITION",
    "MESSAGE_TOO_LARGE": "MESSAGE_SIZE_TOO_LARGE",
    "INVALID_TOPIC_EXCEPTION": "INVALID_TOPIC",
}
# kafka-python does not know these codes.
_UNKNOWN_TO_KAFKA_PYTHON = {kafka_errors.REBOOTSTRAP_REQUIRED, kafka_errors.SHARE_SESSION_LIMIT_REACHED}
_KNOWN = [error for error in ERRORS.values() if error.code not in _UNKNOWN_TO_KAFKA_PYTHON]


def test_each_constant_has_one_entry_of_its_name() -> None:
    constants = {name: value for name, value in vars(kafka_errors).items() if isinstance(value, int)}
    assert {error.name: error.code for error in ERRORS.values()} == constants


def test_codes_and_names_are_kafkas() -> None:
    """``tests/options/test_kafka_names.py`` compares which of them are retriable, with Java's exceptions."""
    for error in _KNOWN:
        theirs = for_code(error.code)
        if theirs.message is not None:  # one code has a second class without a name
            assert theirs.message == _NAMES_IN_KAFKA_PYTHON.get(error.name, error.name)


def test_a_batch_is_retried_after_retriable_errors() -> None:
    for code in ERRORS:
        decision = classify_response(AttemptFacts(TopicPartition("t", 0), code, is_next_expected=True))
        # A broker reports UNKNOWN_SERVER_ERROR wherever an append goes wrong: trying again is worth it.
        expected = error_of(code).retriable or code == kafka_errors.UNKNOWN_SERVER_ERROR
        assert (decision.action is Action.RETRY) == expected, error_of(code).name


def test_an_unknown_code_says_nothing() -> None:
    assert error_of(12345) == KafkaError(12345, "error 12345")
