"""Kafka's error codes: those on which this package acts, and what each one means for it.

Source: https://kafka.apache.org/protocol#protocol_error_codes. What happens to a batch after an error depends
on more than the code and is decided in ``sending.response_classifier``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

UNKNOWN_SERVER_ERROR = -1
NONE = 0
CORRUPT_MESSAGE = 2
UNKNOWN_TOPIC_OR_PARTITION = 3
LEADER_NOT_AVAILABLE = 5
NOT_LEADER_OR_FOLLOWER = 6
REQUEST_TIMED_OUT = 7
REPLICA_NOT_AVAILABLE = 9
MESSAGE_TOO_LARGE = 10
OFFSET_METADATA_TOO_LARGE = 12
NETWORK_EXCEPTION = 13
COORDINATOR_LOAD_IN_PROGRESS = 14
COORDINATOR_NOT_AVAILABLE = 15
NOT_COORDINATOR = 16
INVALID_TOPIC_EXCEPTION = 17
RECORD_LIST_TOO_LARGE = 18
NOT_ENOUGH_REPLICAS = 19
NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20
TOPIC_AUTHORIZATION_FAILED = 29
GROUP_AUTHORIZATION_FAILED = 30
CLUSTER_AUTHORIZATION_FAILED = 31
INVALID_TIMESTAMP = 32
UNSUPPORTED_SASL_MECHANISM = 33
ILLEGAL_SASL_STATE = 34
UNSUPPORTED_VERSION = 35
TOPIC_ALREADY_EXISTS = 36
NOT_CONTROLLER = 41
OUT_OF_ORDER_SEQUENCE_NUMBER = 45
DUPLICATE_SEQUENCE_NUMBER = 46
INVALID_PRODUCER_EPOCH = 47
INVALID_TXN_STATE = 48
INVALID_PRODUCER_ID_MAPPING = 49
INVALID_TRANSACTION_TIMEOUT = 50
CONCURRENT_TRANSACTIONS = 51
TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53
OPERATION_NOT_ATTEMPTED = 55
KAFKA_STORAGE_ERROR = 56
SASL_AUTHENTICATION_FAILED = 58
UNKNOWN_PRODUCER_ID = 59
GROUP_ID_NOT_FOUND = 69
FENCED_LEADER_EPOCH = 74
UNSUPPORTED_COMPRESSION_TYPE = 76
INVALID_RECORD = 87
UNSTABLE_OFFSET_COMMIT = 88
THROTTLING_QUOTA_EXCEEDED = 89
PRODUCER_FENCED = 90
UNKNOWN_TOPIC_ID = 100
TRANSACTIONAL_ID_NOT_FOUND = 105
UNKNOWN_SUBSCRIPTION_ID = 117
TELEMETRY_TOO_LARGE = 118
TRANSACTION_ABORTABLE = 120
REBOOTSTRAP_REQUIRED = 129


@dataclass(frozen=True, slots=True)
class KafkaError:
    """One error code.

    ``retriable``: the same request may succeed later (Java's RetriableException). ``final_for_topic``: after
    this error in a Metadata response, asking again hardly helps the topic. ``blames_broker``: the circuit
    breaker counts the attempt against the broker. Every other error is about the batch, the metadata or the
    client's rights.
    """

    code: int
    name: str
    retriable: bool = False
    final_for_topic: bool = False
    blames_broker: bool = False

    @property
    def label(self) -> str:
        """Name and code for messages, such as ``NOT_LEADER_OR_FOLLOWER (error 6)``."""
        return f"{self.name} (error {self.code})" if self.name.isupper() else self.name


_TABLE = (
    KafkaError(UNKNOWN_SERVER_ERROR, "UNKNOWN_SERVER_ERROR", blames_broker=True),
    KafkaError(NONE, "NONE"),
    KafkaError(CORRUPT_MESSAGE, "CORRUPT_MESSAGE", retriable=True),
    KafkaError(UNKNOWN_TOPIC_OR_PARTITION, "UNKNOWN_TOPIC_OR_PARTITION", retriable=True),
    KafkaError(LEADER_NOT_AVAILABLE, "LEADER_NOT_AVAILABLE", retriable=True),
    KafkaError(NOT_LEADER_OR_FOLLOWER, "NOT_LEADER_OR_FOLLOWER", retriable=True),
    KafkaError(REQUEST_TIMED_OUT, "REQUEST_TIMED_OUT", retriable=True, blames_broker=True),
    KafkaError(REPLICA_NOT_AVAILABLE, "REPLICA_NOT_AVAILABLE", retriable=True),
    KafkaError(MESSAGE_TOO_LARGE, "MESSAGE_TOO_LARGE"),
    KafkaError(OFFSET_METADATA_TOO_LARGE, "OFFSET_METADATA_TOO_LARGE"),
    KafkaError(NETWORK_EXCEPTION, "NETWORK_EXCEPTION", retriable=True, blames_broker=True),
    KafkaError(COORDINATOR_LOAD_IN_PROGRESS, "COORDINATOR_LOAD_IN_PROGRESS", retriable=True),
    KafkaError(COORDINATOR_NOT_AVAILABLE, "COORDINATOR_NOT_AVAILABLE", retriable=True),
    KafkaError(NOT_COORDINATOR, "NOT_COORDINATOR", retriable=True),
    KafkaError(INVALID_TOPIC_EXCEPTION, "INVALID_TOPIC_EXCEPTION", final_for_topic=True),
    KafkaError(RECORD_LIST_TOO_LARGE, "RECORD_LIST_TOO_LARGE"),
    KafkaError(NOT_ENOUGH_REPLICAS, "NOT_ENOUGH_REPLICAS", retriable=True, blames_broker=True),
    KafkaError(
        NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        "NOT_ENOUGH_REPLICAS_AFTER_APPEND",
        retriable=True,
        blames_broker=True,
    ),
    KafkaError(TOPIC_AUTHORIZATION_FAILED, "TOPIC_AUTHORIZATION_FAILED", final_for_topic=True),
    KafkaError(GROUP_AUTHORIZATION_FAILED, "GROUP_AUTHORIZATION_FAILED"),
    KafkaError(CLUSTER_AUTHORIZATION_FAILED, "CLUSTER_AUTHORIZATION_FAILED"),
    KafkaError(INVALID_TIMESTAMP, "INVALID_TIMESTAMP"),
    KafkaError(UNSUPPORTED_SASL_MECHANISM, "UNSUPPORTED_SASL_MECHANISM"),
    KafkaError(ILLEGAL_SASL_STATE, "ILLEGAL_SASL_STATE"),
    KafkaError(UNSUPPORTED_VERSION, "UNSUPPORTED_VERSION"),
    KafkaError(TOPIC_ALREADY_EXISTS, "TOPIC_ALREADY_EXISTS"),
    KafkaError(NOT_CONTROLLER, "NOT_CONTROLLER", retriable=True),
    KafkaError(OUT_OF_ORDER_SEQUENCE_NUMBER, "OUT_OF_ORDER_SEQUENCE_NUMBER"),
    KafkaError(DUPLICATE_SEQUENCE_NUMBER, "DUPLICATE_SEQUENCE_NUMBER"),
    KafkaError(INVALID_PRODUCER_EPOCH, "INVALID_PRODUCER_EPOCH"),
    KafkaError(INVALID_TXN_STATE, "INVALID_TXN_STATE"),
    KafkaError(INVALID_PRODUCER_ID_MAPPING, "INVALID_PRODUCER_ID_MAPPING"),
    KafkaError(INVALID_TRANSACTION_TIMEOUT, "INVALID_TRANSACTION_TIMEOUT"),
    KafkaError(CONCURRENT_TRANSACTIONS, "CONCURRENT_TRANSACTIONS", retriable=True),
    KafkaError(TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "TRANSACTIONAL_ID_AUTHORIZATION_FAILED"),
    KafkaError(OPERATION_NOT_ATTEMPTED, "OPERATION_NOT_ATTEMPTED"),
    KafkaError(KAFKA_STORAGE_ERROR, "KAFKA_STORAGE_ERROR", retriable=True, blames_broker=True),
    KafkaError(SASL_AUTHENTICATION_FAILED, "SASL_AUTHENTICATION_FAILED"),
    KafkaError(UNKNOWN_PRODUCER_ID, "UNKNOWN_PRODUCER_ID"),
    KafkaError(GROUP_ID_NOT_FOUND, "GROUP_ID_NOT_FOUND"),
    KafkaError(FENCED_LEADER_EPOCH, "FENCED_LEADER_EPOCH", retriable=True),
    KafkaError(UNSUPPORTED_COMPRESSION_TYPE, "UNSUPPORTED_COMPRESSION_TYPE"),
    KafkaError(INVALID_RECORD, "INVALID_RECORD"),
    KafkaError(UNSTABLE_OFFSET_COMMIT, "UNSTABLE_OFFSET_COMMIT", retriable=True),
    KafkaError(THROTTLING_QUOTA_EXCEEDED, "THROTTLING_QUOTA_EXCEEDED", retriable=True, blames_broker=True),
    KafkaError(PRODUCER_FENCED, "PRODUCER_FENCED"),
    KafkaError(UNKNOWN_TOPIC_ID, "UNKNOWN_TOPIC_ID", retriable=True),
    KafkaError(TRANSACTIONAL_ID_NOT_FOUND, "TRANSACTIONAL_ID_NOT_FOUND"),
    KafkaError(UNKNOWN_SUBSCRIPTION_ID, "UNKNOWN_SUBSCRIPTION_ID"),
    KafkaError(TELEMETRY_TOO_LARGE, "TELEMETRY_TOO_LARGE"),
    KafkaError(TRANSACTION_ABORTABLE, "TRANSACTION_ABORTABLE"),
    KafkaError(REBOOTSTRAP_REQUIRED, "REBOOTSTRAP_REQUIRED"),
)
ERRORS: Mapping[int, KafkaError] = MappingProxyType({error.code: error for error in _TABLE})


def error_of(code: int) -> KafkaError:
    """The table's entry. An unlisted code is not retriable, not final, and says nothing of the broker."""
    known = ERRORS.get(code)
    if known is not None:
        return known
    # Imported here because few processes meet such a code, and kafka-python is slow to import.
    from kafka.errors import for_code

    name = getattr(for_code(code), "message", None)
    return KafkaError(code, f"error {code}" if name in (None, "UNKNOWN") else str(name))
