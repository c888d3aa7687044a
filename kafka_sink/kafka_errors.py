"""Kafka's error codes that responses to this client may contain, and what each one means for it.

Source: https://kafka.apache.org/protocol#protocol_error_codes. All retriable codes are listed, since brokers
other than Apache Kafka send some of them where Kafka never does. What happens to a batch after an error
depends on more than the code; ``engine.response_classifier`` decides it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class KafkaError:
    """One error code.

    ``retriable``: the same request may succeed later (Java's RetriableException). ``is_of_metadata``: it may
    have failed because metadata is out of date (Java's InvalidMetadataException). ``final_for_topic``: after
    this error in a Metadata response, asking again is unlikely to help. ``blames_broker``: the circuit
    breaker counts the attempt against the broker. Every other error is about the batch, the metadata or the
    client's rights.
    """

    code: int
    name: str
    retriable: bool = False
    is_of_metadata: bool = False
    final_for_topic: bool = False
    blames_broker: bool = False

    @property
    def label(self) -> str:
        """Name and code for messages, such as ``NOT_LEADER_OR_FOLLOWER (error 6)``."""
        return f"{self.name} (error {self.code})" if self.name.isupper() else self.name


_MEANINGS: dict[int, dict[str, bool]] = {}


def _error(code: int, **meaning: bool) -> int:
    """Add a row to the table. The error's name is that of the constant to which the result is assigned."""
    _MEANINGS[code] = meaning
    return code


UNKNOWN_SERVER_ERROR = _error(-1, blames_broker=True)
NONE = _error(0)
CORRUPT_MESSAGE = _error(2, retriable=True)
UNKNOWN_TOPIC_OR_PARTITION = _error(3, retriable=True, is_of_metadata=True)
LEADER_NOT_AVAILABLE = _error(5, retriable=True, is_of_metadata=True)
NOT_LEADER_OR_FOLLOWER = _error(6, retriable=True, is_of_metadata=True)
REQUEST_TIMED_OUT = _error(7, retriable=True, blames_broker=True)
# Java's client does not retry it, as Kafka's brokers no longer send it. Redpanda's do, in Produce responses.
BROKER_NOT_AVAILABLE = _error(8, retriable=True, is_of_metadata=True)
REPLICA_NOT_AVAILABLE = _error(9, retriable=True, is_of_metadata=True)
MESSAGE_TOO_LARGE = _error(10)
OFFSET_METADATA_TOO_LARGE = _error(12)
NETWORK_EXCEPTION = _error(13, retriable=True, is_of_metadata=True, blames_broker=True)
COORDINATOR_LOAD_IN_PROGRESS = _error(14, retriable=True)
COORDINATOR_NOT_AVAILABLE = _error(15, retriable=True)
NOT_COORDINATOR = _error(16, retriable=True)
INVALID_TOPIC_EXCEPTION = _error(17, final_for_topic=True)
RECORD_LIST_TOO_LARGE = _error(18)
NOT_ENOUGH_REPLICAS = _error(19, retriable=True, blames_broker=True)
NOT_ENOUGH_REPLICAS_AFTER_APPEND = _error(20, retriable=True, blames_broker=True)
INVALID_REQUIRED_ACKS = _error(21)
ILLEGAL_GENERATION = _error(22)
INVALID_GROUP_ID = _error(24)
UNKNOWN_MEMBER_ID = _error(25)
REBALANCE_IN_PROGRESS = _error(27)
INVALID_COMMIT_OFFSET_SIZE = _error(28)
TOPIC_AUTHORIZATION_FAILED = _error(29, final_for_topic=True)
GROUP_AUTHORIZATION_FAILED = _error(30)
CLUSTER_AUTHORIZATION_FAILED = _error(31)
INVALID_TIMESTAMP = _error(32)
UNSUPPORTED_SASL_MECHANISM = _error(33)
ILLEGAL_SASL_STATE = _error(34)
UNSUPPORTED_VERSION = _error(35)
TOPIC_ALREADY_EXISTS = _error(36)
INVALID_PARTITIONS = _error(37)
INVALID_REPLICATION_FACTOR = _error(38)
INVALID_CONFIG = _error(40)
NOT_CONTROLLER = _error(41, retriable=True)
INVALID_REQUEST = _error(42)
UNSUPPORTED_FOR_MESSAGE_FORMAT = _error(43)
POLICY_VIOLATION = _error(44)
OUT_OF_ORDER_SEQUENCE_NUMBER = _error(45)
DUPLICATE_SEQUENCE_NUMBER = _error(46)
INVALID_PRODUCER_EPOCH = _error(47)
INVALID_TXN_STATE = _error(48)
INVALID_PRODUCER_ID_MAPPING = _error(49)
INVALID_TRANSACTION_TIMEOUT = _error(50)
CONCURRENT_TRANSACTIONS = _error(51, retriable=True)
TRANSACTION_COORDINATOR_FENCED = _error(52)
TRANSACTIONAL_ID_AUTHORIZATION_FAILED = _error(53)
SECURITY_DISABLED = _error(54)
OPERATION_NOT_ATTEMPTED = _error(55)
KAFKA_STORAGE_ERROR = _error(56, retriable=True, is_of_metadata=True, blames_broker=True)
SASL_AUTHENTICATION_FAILED = _error(58)
UNKNOWN_PRODUCER_ID = _error(59)
GROUP_ID_NOT_FOUND = _error(69)
FETCH_SESSION_ID_NOT_FOUND = _error(70, retriable=True)
INVALID_FETCH_SESSION_EPOCH = _error(71, retriable=True)
LISTENER_NOT_FOUND = _error(72, retriable=True, is_of_metadata=True)
FENCED_LEADER_EPOCH = _error(74, retriable=True, is_of_metadata=True)
UNKNOWN_LEADER_EPOCH = _error(75, retriable=True)
UNSUPPORTED_COMPRESSION_TYPE = _error(76)
OFFSET_NOT_AVAILABLE = _error(78, retriable=True)
PREFERRED_LEADER_NOT_AVAILABLE = _error(80, retriable=True, is_of_metadata=True)
FENCED_INSTANCE_ID = _error(82)
ELIGIBLE_LEADERS_NOT_AVAILABLE = _error(83, retriable=True, is_of_metadata=True)
ELECTION_NOT_NEEDED = _error(84, retriable=True, is_of_metadata=True)
INVALID_RECORD = _error(87)
UNSTABLE_OFFSET_COMMIT = _error(88, retriable=True)
THROTTLING_QUOTA_EXCEEDED = _error(89, retriable=True, blames_broker=True)
PRODUCER_FENCED = _error(90)
UNKNOWN_TOPIC_ID = _error(100, retriable=True, is_of_metadata=True)
INCONSISTENT_TOPIC_ID = _error(103, retriable=True, is_of_metadata=True)
TRANSACTIONAL_ID_NOT_FOUND = _error(105)
FETCH_SESSION_TOPIC_ID_ERROR = _error(106, retriable=True)
UNKNOWN_SUBSCRIPTION_ID = _error(117)
TELEMETRY_TOO_LARGE = _error(118)
TRANSACTION_ABORTABLE = _error(120)
SHARE_SESSION_NOT_FOUND = _error(122, retriable=True)
INVALID_SHARE_SESSION_EPOCH = _error(123, retriable=True)
REBOOTSTRAP_REQUIRED = _error(129)
SHARE_SESSION_LIMIT_REACHED = _error(133, retriable=True)

ERRORS: Mapping[int, KafkaError] = MappingProxyType(
    {
        code: KafkaError(code, name, **_MEANINGS[code])
        for name, code in list(globals().items())
        if isinstance(code, int)
    }
)


def error_of(code: int) -> KafkaError:
    """The table's entry. An unlisted code is neither retriable nor final, and does not blame the broker."""
    return ERRORS.get(code) or KafkaError(code, f"error {code}")
