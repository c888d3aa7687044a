"""The values that each decoder must make of a response, according to Kafka's own message schemas."""

from __future__ import annotations

import gc
import time
import tracemalloc
from array import array
from collections.abc import Callable
from typing import Any

from kafka_sink.errors import ProtocolError
from kafka_sink.model import NO_RECORD_ERRORS, Node, RecordErrors, TopicPartition
from kafka_sink.network import admin_requests, apis, authentication, produce, requests, wire
from kafka_sink.network import transaction_requests as transactions

Values = dict[str, Any]
HOSTS = ["b1", "10.0.0.7", "::1", "b.example.org"]
# Generators for these fields, so that addresses and ids are plausible and partitions belong to a topic.
GIVEN: Values = {
    "Host": lambda chance: chance.choice(HOSTS),
    "Port": lambda chance: chance.randint(1, 65_535),
    "NodeId": lambda chance: chance.randint(0, 2**31 - 1),
}


def of_metadata(response: requests.MetadataResponse, values: Values, version: int) -> None:
    update = response.update
    assert list(update.nodes) == [Node(*node.values()) for node in values["Brokers"]]
    assert (response.controller_id, update.cluster_id) == (values["ControllerId"], values["ClusterId"])
    assert (response.throttle_time_ms, response.error_code) == (
        values["ThrottleTimeMs"],
        values.get("ErrorCode", 0),
    )
    named = [one for one in values["Topics"] if one["Name"] is not None]
    assert {one["Name"] for one in named} == {*update.errors, *(topic.name for topic in update.topics)}
    for topic in update.topics:
        ids = [one.get("TopicId", b"") for one in named if one["Name"] == topic.name]
        assert topic.topic_id in [one if any(one) else None for one in ids]
        theirs = [one for one in named if one["Name"] == topic.name and not one["ErrorCode"]]
        found = [(at, row.leader, row.leader_epoch) for at, row in enumerate(topic.partitions)]
        assert found in [
            sorted(
                (
                    row["PartitionIndex"],
                    -1 if row["ErrorCode"] == 5 else row["LeaderId"],
                    row["LeaderEpoch"] if version >= 9 else -1,
                )
                for row in one["Partitions"]
            )
            for one in theirs
        ]


# -- responses that are equal to the expected ones ----------------------------------------------------------


def produced(values: Values) -> produce.ProduceResponse:
    rows = []
    for topic, row in ((one, row) for one in values["Responses"] for row in one["PartitionResponses"]):
        topic_id = topic["TopicId"] if any(topic.get("TopicId", b"")) else None
        errors = row.get("RecordErrors", [])
        places = array("i", [one["BatchIndex"] for one in errors])
        reasons = RecordErrors(places, errors[0]["BatchIndexErrorMessage"]) if errors else NO_RECORD_ERRORS
        leader = tuple(row.get("CurrentLeader", {"LeaderId": -1}).values())
        rows.append(
            produce.ProducePartitionResponse(
                topic.get("Name"), topic_id, row["Index"], row["ErrorCode"], row["BaseOffset"],
                row["LogAppendTimeMs"], row.get("LogStartOffset", -1), row.get("ErrorMessage"), reasons,
                leader if leader[0] >= 0 else None,
            )
        )  # fmt: skip
    nodes = tuple(Node(*node.values()) for node in values.get("NodeEndpoints", []))
    return produce.ProduceResponse(tuple(rows), values["ThrottleTimeMs"], nodes)


def versions(values: Values) -> requests.ApiVersionsResponse:
    return requests.ApiVersionsResponse(
        values["ErrorCode"],
        {one["ApiKey"]: (one["MinVersion"], one["MaxVersion"]) for one in values["ApiKeys"]},
        values.get("ThrottleTimeMs", 0),
        {one["Name"]: one["MaxVersionLevel"] for one in values.get("FinalizedFeatures", [])},
    )


def coordinators(values: Values) -> transactions.CoordinatorsResponse:
    found = {}
    for one in values["Coordinators"]:
        node = None if one["ErrorCode"] else Node(one["NodeId"], one["Host"], one["Port"])
        found[one["Key"]] = transactions.FoundCoordinator(node, one["ErrorCode"], one["ErrorMessage"])
    return transactions.CoordinatorsResponse(found, values["ThrottleTimeMs"])


def partition_errors(topics: str, rows: str, error: str) -> Callable[[Values], transactions.PartitionErrors]:
    """The errors by partition; the arguments are the names of the fields that contain them."""

    def made(values: Values) -> transactions.PartitionErrors:
        errors = {
            TopicPartition(topic["Name"], row["PartitionIndex"]): row[error]
            for topic in values[topics]
            for row in topic[rows]
        }
        return transactions.PartitionErrors(errors, values["ThrottleTimeMs"])

    return made


def offsets(values: Values) -> transactions.OffsetFetchResponse:
    groups = {}
    for group in values["Groups"]:
        found = {
            TopicPartition(topic["Name"], row["PartitionIndex"]): transactions.CommittedOffset(
                row["CommittedOffset"], row["Metadata"] or "", row["ErrorCode"]
            )
            for topic in group["Topics"]
            for row in topic["Partitions"]
        }
        groups[group["GroupId"]] = (group["ErrorCode"], found)
    return transactions.OffsetFetchResponse(groups, values["ThrottleTimeMs"])


def described(values: Values) -> transactions.DescribeTransactionsResponse:
    found = {}
    for one in values["TransactionStates"]:
        count = sum(len(topic["Partitions"]) for topic in one["Topics"])
        found[one["TransactionalId"]] = transactions.TransactionDescription(
            one["ErrorCode"], one["TransactionState"], one["ProducerId"], one["ProducerEpoch"],
            one["TransactionStartTimeMs"], one["TransactionTimeoutMs"], count,
        )  # fmt: skip
    return transactions.DescribeTransactionsResponse(found, values["ThrottleTimeMs"])


def created(values: Values) -> admin_requests.CreateTopicResponse:
    (topic,) = values["Topics"]
    text = topic["ErrorMessage"] or ""
    return admin_requests.CreateTopicResponse(topic["ErrorCode"], text, values["ThrottleTimeMs"])


def configs(values: Values) -> admin_requests.BrokerConfigs:
    (broker,) = values["Results"]
    given = {one["Name"]: one["Value"] for one in broker["Configs"] if one["Value"] is not None}
    return admin_requests.BrokerConfigs(broker["ErrorCode"], given, values["ThrottleTimeMs"])


def listed(values: Values) -> transactions.ListTransactionsResponse:
    ids = [one["TransactionalId"] for one in values["TransactionStates"]]
    return transactions.ListTransactionsResponse(values["ErrorCode"], ids, values["ThrottleTimeMs"])


def logged_in(values: Values) -> authentication.AuthenticateResponse:
    text, session_ms = values["ErrorMessage"] or "", max(0, values.get("SessionLifetimeMs", 0))
    return authentication.AuthenticateResponse(values["ErrorCode"], text, values["AuthBytes"], session_ms)


def of(kind: Any, *names: str) -> Callable[[Values], Any]:
    """The class, made of the fields of these names, with -1 for one that the version lacks."""

    def made(values: Values) -> Any:
        found = (values.get(name, -1) for name in names)
        return kind(*(tuple(one) if isinstance(one, list) else one for one in found))

    return made


_DRAWN: dict[int, Values] = {
    apis.METADATA: {"PartitionIndex": lambda chance: chance.randint(0, 2), "len(Topics)": 2},
    # A response with an error is in version 0's format.
    apis.API_VERSIONS: {"ErrorCode": lambda _: 0},
    apis.INIT_PRODUCER_ID: {
        "ProducerId": lambda chance: chance.randint(0, 2**63 - 1),
        "ProducerEpoch": lambda chance: chance.randint(0, 2**15 - 1),
    },
    apis.CREATE_TOPICS: {"len(Topics)": 1},
    apis.DESCRIBE_CONFIGS: {"len(Results)": 1},
}


def given_for(api: int) -> Values:
    return {**GIVEN, **_DRAWN.get(api, {})}


def every_version(api: int) -> range:
    oldest, newest = apis.APIS[api].versions
    return range(oldest, newest + 1)


PRODUCER_FIELDS = ("ErrorCode", "ProducerId", "ProducerEpoch", "ThrottleTimeMs")
SUBSCRIPTION = (
    *("ErrorCode", "ClientInstanceId", "SubscriptionId", "PushIntervalMs", "TelemetryMaxBytes"),
    *("DeltaTemporality", "RequestedMetrics", "ThrottleTimeMs"),
)
EXPECTED: dict[int, Callable[[Values], Any]] = {
    apis.PRODUCE: produced,
    apis.API_VERSIONS: versions,
    apis.INIT_PRODUCER_ID: of(requests.ProducerIdResponse, *PRODUCER_FIELDS),
    apis.FIND_COORDINATOR: coordinators,
    apis.ADD_PARTITIONS_TO_TXN: partition_errors(
        "ResultsByTopicV3AndBelow", "ResultsByPartition", "PartitionErrorCode"
    ),
    apis.TXN_OFFSET_COMMIT: partition_errors("Topics", "Partitions", "ErrorCode"),
    apis.OFFSET_FETCH: offsets,
    apis.DESCRIBE_TRANSACTIONS: described,
    apis.LIST_TRANSACTIONS: listed,
    apis.ADD_OFFSETS_TO_TXN: of(wire.ErrorResponse, "ErrorCode", "ThrottleTimeMs"),
    apis.END_TXN: of(requests.ProducerIdResponse, *PRODUCER_FIELDS),
    apis.CREATE_TOPICS: created,
    apis.DESCRIBE_CONFIGS: configs,
    apis.GET_TELEMETRY_SUBSCRIPTIONS: of(admin_requests.Subscription, *SUBSCRIPTION),
    apis.PUSH_TELEMETRY: of(wire.ErrorResponse, "ErrorCode", "ThrottleTimeMs"),
    apis.SASL_HANDSHAKE: of(authentication.HandshakeResponse, "ErrorCode", "Mechanisms"),
    apis.SASL_AUTHENTICATE: logged_in,
}


def check(api: int, response: Any, values: Values, version: int) -> None:
    """Assert that the response equals the expected one for the values."""
    if api == apis.METADATA:
        of_metadata(response, values, version)
    else:
        assert response == EXPECTED[api](values)


def cost(decode: Callable[[], Any]) -> tuple[int, float, bool]:
    """Peak of memory in bytes, processor time in milliseconds, and whether the response was refused.

    Only this thread is measured, without garbage collections: those walk through all objects of other tests.
    """
    refused = False
    gc.disable()
    began = time.thread_time()
    try:
        decode()
    except ProtocolError:
        refused = True
    finally:
        spent_ms = (time.thread_time() - began) * 1000
        gc.enable()
    tracemalloc.start()
    try:
        decode()
    except ProtocolError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak, spent_ms, refused
