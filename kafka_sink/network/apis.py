"""The Kafka APIs that this client uses, and the modules with their codecs.

A codec module is imported when its API is first used, which for most tasks never happens.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from kafka_sink.errors import BrokerVersionError

PRODUCE = 0
METADATA = 3
OFFSET_FETCH = 9
FIND_COORDINATOR = 10
SASL_HANDSHAKE = 17
API_VERSIONS = 18
CREATE_TOPICS = 19
INIT_PRODUCER_ID = 22
ADD_PARTITIONS_TO_TXN = 24
ADD_OFFSETS_TO_TXN = 25
END_TXN = 26
TXN_OFFSET_COMMIT = 28
DESCRIBE_CONFIGS = 32
SASL_AUTHENTICATE = 36
DESCRIBE_TRANSACTIONS = 65
LIST_TRANSACTIONS = 66
GET_TELEMETRY_SUBSCRIPTIONS = 71
PUSH_TELEMETRY = 72

_KIB, _MIB = 1024, 1024 * 1024
# The largest text that a response contains for a topic, partition or key: a host name, the metadata of a
# committed offset (4,096 bytes, which count for a partition and a topic), or a broker's message. The longest
# message of Apache Kafka quotes three rejected records.
_TEXT_BYTES = 4 * _KIB
# The same for a rejected record. Apache Kafka's longest message has 70 characters and the partition's name,
# which has up to 260 (LogValidator).
_RECORD_ERROR_BYTES = 512
_NEVER = 32_767


class Api(NamedTuple):
    """One API. ``module`` is its codec module in this package.

    ``versions`` are the oldest and the newest version that the module reads and writes.

    ``response_bytes`` is the largest response that is accepted, without the part that depends on the request
    (see ``largest_response``). The bounds follow what brokers send: a Metadata response for a million
    partitions with three replicas has 42 MB, and one request may ask for all of them.

    ``first_client_throttled`` is the first version in which brokers respond at once and the client has to
    pause (KIP-219). With earlier versions, brokers delay the response.

    ``first_flexible`` is the first version whose messages have compact lengths and tagged fields (KIP-482).
    """

    name: str
    module: str
    versions: tuple[int, int]
    response_bytes: int
    first_client_throttled: int
    first_flexible: int

    def largest_response(self, request_bytes: int, asked: int, records: int) -> int:
        """The largest size of a response. ``asked`` and ``records`` are those of ``Request``. A response
        repeats names of its request. It may also contain a text for each topic, partition and key in the
        request, and for each record of a Produce request (KIP-467)."""
        return self.response_bytes + request_bytes + _TEXT_BYTES * asked + _RECORD_ERROR_BYTES * records


APIS: Mapping[int, Api] = {
    PRODUCE: Api("Produce", "produce", (3, 13), _MIB, 6, 9),
    # Version 4 is the first that can forbid auto-creation; version 10 adds topic ids.
    METADATA: Api("Metadata", "requests", (4, 13), 64 * _MIB, 6, 9),
    # 4 KiB for each of thousands of progress markers.
    # Version 8 fetches many groups at once (KIP-709).
    OFFSET_FETCH: Api("OffsetFetch", "transaction_requests", (8, 8), 32 * _MIB, 4, 6),
    # Version 4 looks up many keys at once (KIP-699).
    FIND_COORDINATOR: Api("FindCoordinator", "transaction_requests", (4, 5), _MIB, 2, 3),
    # Version 0, for brokers before 1.0, is followed by bytes without frames.
    SASL_HANDSHAKE: Api("SaslHandshake", "authentication", (1, 1), 64 * _KIB, 0, _NEVER),
    API_VERSIONS: Api("ApiVersions", "requests", (0, 4), 64 * _KIB, 2, 3),
    CREATE_TOPICS: Api("CreateTopics", "admin_requests", (2, 4), 256 * _KIB, 3, 5),
    INIT_PRODUCER_ID: Api("InitProducerId", "requests", (0, 5), 64 * _KIB, 1, 2),
    # From version 4 on, the API is only for brokers.
    ADD_PARTITIONS_TO_TXN: Api("AddPartitionsToTxn", "transaction_requests", (3, 3), _MIB, 1, 3),
    ADD_OFFSETS_TO_TXN: Api("AddOffsetsToTxn", "transaction_requests", (3, 4), 64 * _KIB, 1, 3),
    END_TXN: Api("EndTxn", "transaction_requests", (3, 5), 64 * _KIB, 1, 3),
    TXN_OFFSET_COMMIT: Api("TxnOffsetCommit", "transaction_requests", (3, 5), _MIB, 1, 3),
    DESCRIBE_CONFIGS: Api("DescribeConfigs", "admin_requests", (0, 2), 256 * _KIB, 2, 4),
    # Kerberos tickets may have about 64 KiB.
    SASL_AUTHENTICATE: Api("SaslAuthenticate", "authentication", (0, 2), 256 * _KIB, 0, 2),
    DESCRIBE_TRANSACTIONS: Api("DescribeTransactions", "transaction_requests", (0, 0), 16 * _MIB, 0, 0),
    # Version 2 filters ids by an RE2 pattern (KIP-1152).
    LIST_TRANSACTIONS: Api("ListTransactions", "transaction_requests", (0, 2), 64 * _MIB, 0, 0),
    GET_TELEMETRY_SUBSCRIPTIONS: Api("GetTelemetrySubscriptions", "admin_requests", (0, 0), 256 * _KIB, 0, 0),
    PUSH_TELEMETRY: Api("PushTelemetry", "admin_requests", (0, 0), 64 * _KIB, 0, 0),
}


def common_version(
    broker: str, api_key: int, theirs: Mapping[int, tuple[int, int]], ours: tuple[int, int] | None = None
) -> int:
    """The newest version in the broker's versions (``theirs``) and in ``APIS``, or instead in ``ours``.
    Raises BrokerVersionError if there is none."""
    name, (oldest, newest) = APIS[api_key].name, ours or APIS[api_key].versions
    if api_key not in theirs:
        raise BrokerVersionError(
            f"{broker} does not support {name} requests; Apache Kafka 2.1 or later is needed"
        )
    low, high = theirs[api_key]
    if min(high, newest) < max(low, oldest):
        raise BrokerVersionError(
            f"{broker} speaks {name} in versions {low} to {high}, this sink in {oldest} to {newest}; "
            "Apache Kafka 2.1 or later is needed"
        )
    return min(high, newest)


OnTrailing = Callable[[str], object]
Decoder = Callable[..., Any]


class Decoders(dict[int, Decoder]):
    """The decoders by API. A codec module registers its own when it is imported, at the first use of an API.

    The arguments of a decoder are the version, the response with its header, the number of topics,
    partitions, keys and records in the request, and a function to call if bytes follow the response
    (``OnTrailing``). Without it, such bytes are a ProtocolError, as all unreadable bytes are.
    """

    def __missing__(self, api_key: int) -> Decoder:
        importlib.import_module(f"{__package__}.{APIS[api_key].module}")
        return self[api_key]


DECODERS = Decoders()
