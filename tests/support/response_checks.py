# ruff: noqa: ARG001 - all checks have one signature
"""What each decoder must make of a response, by Kafka's own message schemas."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

from kafka_sink.errors import ProtocolError
from kafka_sink.network import admin_requests, apis, authentication, produce, requests
from kafka_sink.network import transaction_requests as transactions

Values = dict[str, Any]
HOSTS = ["b1", "10.0.0.7", "::1", "b.example.org"]
# So that addresses and their ids are some, and partitions those of a topic.
GIVEN: Values = {
    "Host": lambda chance: chance.choice(HOSTS),
    "Port": lambda chance: chance.randint(1, 65_535),
    "NodeId": lambda chance: chance.randint(0, 2**31 - 1),
}


def fields(response: Any, values: Values, *names: str, **absent: Any) -> None:
    """The response has what the message has of these names, and ``absent`` of those that it may lack."""
    for name in (*names, *absent):
        expected = values.get("".join(map(str.capitalize, name.split("_"))), absent.get(name))
        expected = tuple(expected) if isinstance(expected, list) else expected
        assert getattr(response, name) == expected, name


def flat(topics: Any, rows: str) -> list[tuple[Values, Values]]:
    """The rows of a message's topics, each with its topic."""
    return [(topic, row) for topic in topics for row in topic[rows]]


def of_node(node: Any) -> tuple[Any, ...]:
    return node.id, node.host, node.port, node.rack


def of_produce(response: produce.ProduceResponse, values: Values, version: int) -> None:
    rows = flat(values["Responses"], "PartitionResponses")
    for found, (topic, row) in zip(response.partitions, rows, strict=True):
        assert found.topic == topic.get("Name")
        assert found.topic_id == (topic.get("TopicId") if any(topic.get("TopicId", b"")) else None)
        assert found.partition == row["Index"]
        fields(found, row, "error_code", "base_offset", "log_append_time_ms", log_start_offset=-1)
        fields(found, row, error_message=None)
        errors = row.get("RecordErrors", [])
        assert list(found.record_errors.places) == [one["BatchIndex"] for one in errors]
        assert found.record_errors.reason == (errors[0]["BatchIndexErrorMessage"] if errors else None)
        leader = row.get("CurrentLeader", {"LeaderId": -1})
        assert found.current_leader == (tuple(leader.values()) if leader["LeaderId"] >= 0 else None)
    fields(response, values, "throttle_time_ms")
    expected = [tuple(node.values()) for node in values.get("NodeEndpoints", [])]
    assert list(map(of_node, response.node_endpoints)) == expected


def of_metadata(response: requests.MetadataResponse, values: Values, version: int) -> None:
    update = response.update
    assert list(map(of_node, update.nodes)) == [tuple(node.values()) for node in values["Brokers"]]
    fields(response, values, "controller_id", "throttle_time_ms", error_code=0)
    fields(update, values, "cluster_id")
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


def of_versions(response: requests.ApiVersionsResponse, values: Values, version: int) -> None:
    ranges = {one["ApiKey"]: (one["MinVersion"], one["MaxVersion"]) for one in values["ApiKeys"]}
    features = {one["Name"]: one["MaxVersionLevel"] for one in values.get("FinalizedFeatures", [])}
    assert (response.ranges, response.features) == (ranges, features)
    fields(response, values, throttle_time_ms=0)


def of_producer_id(response: requests.ProducerIdResponse, values: Values, version: int) -> None:
    fields(response, values, "throttle_time_ms", "error_code", "producer_id", "producer_epoch")


def of_coordinators(response: transactions.CoordinatorsResponse, values: Values, version: int) -> None:
    fields(response, values, "throttle_time_ms")
    last = {one["Key"]: one for one in values["Coordinators"]}
    assert response.found.keys() == last.keys()
    for key, one in last.items():
        found = response.found[key]
        fields(found, one, "error_code", "error_message")
        node = found.node
        assert (node is None) == bool(one["ErrorCode"])
        assert node is None or of_node(node)[:3] == (one["NodeId"], one["Host"], one["Port"])


def of_added(response: transactions.PartitionErrors, values: Values, version: int) -> None:
    rows = flat(values["ResultsByTopicV3AndBelow"], "ResultsByPartition")
    expected = {(topic["Name"], row["PartitionIndex"]): row["PartitionErrorCode"] for topic, row in rows}
    assert response.errors == expected


def of_committed(response: transactions.PartitionErrors, values: Values, version: int) -> None:
    rows = flat(values["Topics"], "Partitions")
    assert response.errors == {
        (topic["Name"], row["PartitionIndex"]): row["ErrorCode"] for topic, row in rows
    }


def of_offsets(response: transactions.OffsetFetchResponse, values: Values, version: int) -> None:
    expected = {}
    for group in values["Groups"]:
        expected[group["GroupId"]] = (
            group["ErrorCode"],
            {
                (topic["Name"], row["PartitionIndex"]): transactions.CommittedOffset(
                    row["CommittedOffset"], row["Metadata"] or "", row["ErrorCode"]
                )
                for topic, row in flat(group["Topics"], "Partitions")
            },
        )
    assert response.groups == expected


def of_described(response: transactions.DescribeTransactionsResponse, values: Values, version: int) -> None:
    expected = {}
    for one in values["TransactionStates"]:
        count = len(flat(one["Topics"], "Partitions"))
        expected[one["TransactionalId"]] = transactions.TransactionDescription(
            one["ErrorCode"], one["TransactionState"], one["ProducerId"], one["ProducerEpoch"],
            one["TransactionStartTimeMs"], one["TransactionTimeoutMs"], count,
        )  # fmt: skip
    assert response.transactions == expected


def of_listed(response: transactions.ListTransactionsResponse, values: Values, version: int) -> None:
    fields(response, values, "error_code")
    assert response.ids == [one["TransactionalId"] for one in values["TransactionStates"]]


def of_end(response: Any, values: Values, version: int) -> None:
    fields(response, values, "error_code", "throttle_time_ms")
    if isinstance(response, transactions.EndTxnResponse):
        fields(response, values, producer_id=-1, producer_epoch=-1)


def of_created(response: admin_requests.CreateTopicResponse, values: Values, version: int) -> None:
    (topic,) = values["Topics"]
    assert (response.error_code, response.error_message) == (topic["ErrorCode"], topic["ErrorMessage"] or "")


def of_configs(response: admin_requests.BrokerConfigs, values: Values, version: int) -> None:
    (broker,) = values["Results"]
    fields(response, broker, "error_code")
    given = [one for one in broker["Configs"] if one["Value"] is not None]
    assert response.configs == {one["Name"]: one["Value"] for one in given}


def of_handshake(response: authentication.HandshakeResponse, values: Values, version: int) -> None:
    assert (response.error_code, list(response.mechanisms)) == (values["ErrorCode"], values["Mechanisms"])


def of_login(response: authentication.AuthenticateResponse, values: Values, version: int) -> None:
    fields(response, values, "auth_bytes")
    assert response.error_message == (values["ErrorMessage"] or "")
    assert response.session_ms == max(0, values.get("SessionLifetimeMs", 0))


def of_subscription(response: admin_requests.Subscription, values: Values, version: int) -> None:
    fields(response, values, "error_code", "subscription_id", "push_interval_ms", "throttle_time_ms")
    assert response.instance_id == values["ClientInstanceId"]
    assert response.compression_types == tuple(values["AcceptedCompressionTypes"])
    assert (response.max_bytes, response.delta) == (values["TelemetryMaxBytes"], values["DeltaTemporality"])
    assert response.requested == tuple(values["RequestedMetrics"])


DIGITS = {"PartitionIndex": lambda chance: chance.randint(0, 2), "len(Topics)": 2}
NO_ERROR = {"ErrorCode": lambda _: 0}
PRODUCER = {
    "ProducerId": lambda chance: chance.randint(0, 2**63 - 1),
    "ProducerEpoch": lambda chance: chance.randint(0, 2**15 - 1),
}


def every_version(api: int) -> range:
    oldest, newest = apis.APIS[api].versions
    return range(oldest, newest + 1)


Case = tuple[Callable[[Any, Values, int], None], Values]
CASES: dict[int, Case] = {
    apis.PRODUCE: (of_produce, {}),
    apis.METADATA: (of_metadata, DIGITS),
    # A response with an error is in version 0's format.
    apis.API_VERSIONS: (of_versions, NO_ERROR),
    apis.INIT_PRODUCER_ID: (of_producer_id, PRODUCER),
    apis.FIND_COORDINATOR: (of_coordinators, {}),
    apis.ADD_PARTITIONS_TO_TXN: (of_added, {}),
    apis.TXN_OFFSET_COMMIT: (of_committed, {}),
    apis.OFFSET_FETCH: (of_offsets, {}),
    apis.DESCRIBE_TRANSACTIONS: (of_described, {}),
    apis.LIST_TRANSACTIONS: (of_listed, {}),
    apis.ADD_OFFSETS_TO_TXN: (of_end, {}),
    apis.END_TXN: (of_end, {}),
    apis.CREATE_TOPICS: (of_created, {"len(Topics)": 1}),
    apis.DESCRIBE_CONFIGS: (of_configs, {"len(Results)": 1}),
    apis.GET_TELEMETRY_SUBSCRIPTIONS: (of_subscription, {}),
    apis.PUSH_TELEMETRY: (of_end, {}),
    apis.SASL_HANDSHAKE: (of_handshake, {}),
    apis.SASL_AUTHENTICATE: (of_login, {}),
}


def cost(decode: Callable[[], Any]) -> tuple[int, float, bool]:
    """Peak of memory in bytes, processor time in milliseconds, and whether the response was refused.

    Only this thread's, and without collections of garbage: those walk through all that other tests have left.
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
