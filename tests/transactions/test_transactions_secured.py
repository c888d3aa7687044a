"""Transactions over TLS and logins on a real broker, and rights that are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pyarrow as pa
import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from kafka_sink.errors import ConfigurationError
from kafka_sink.options import SinkOptions, parse
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.task.producer_cache import task_producer
from kafka_sink.transactions import planning
from kafka_sink.transactions.decision import BatchIdentity
from kafka_sink.transactions.task_attempt import TaskAttempt
from tests.support.security.secured_broker import PASSWORD, Secured, secured_broker
from tests.support.waiting import until

_PATIENCE_MS = 60_000.0
_CHECKPOINT = {"checkpointlocation": "s3a://checkpoints/one"}


@pytest.fixture(scope="module")
def secured(_programs: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured_broker(tmp_path_factory.mktemp("secured")) as running:
        running.broker.create_topic("rows", 2)
        yield running


def as_bob(secured: Secured, **more: str) -> SinkOptions:
    raw = secured.options("SASL", sasl_mechanism="PLAIN", sasl_username="bob", sasl_password=PASSWORD)
    return parse({"topic": "rows", "delivery.guarantee": "exactly-once", **raw, **more}).options


def by_certificate(secured: Secured) -> SinkOptions:
    path = secured.client.pkcs12_file(secured.folder / "client.p12", "key")
    raw = secured.options(
        "MUTUAL", ssl_keystore_type="PKCS12", ssl_keystore_location=str(path), ssl_keystore_password="key"
    )
    return parse({"topic": "rows", "delivery.guarantee": "exactly-once", **raw}).options


def write(options: SinkOptions, number: int, checkpoint: str) -> str:
    """One micro-batch of one task, from planning to commit; what the commit says."""
    raw = {"checkpointlocation": f"s3a://checkpoints/{checkpoint}"}
    planned = planning.plan(options, raw, is_streaming=True, for_tasks=True)
    assert planned is not None
    assert planned.handover is not None
    batch = BatchIdentity.of_query("query", number)
    rows = iter([pa.record_batch({"value": pa.array([b"x"] * 100, pa.binary())})])
    with planning.client_of(options) as client:
        attempt = TaskAttempt(client, planned.scope, planned.handover, batch, 0, 0, [0], _PATIENCE_MS)
        with task_producer(options, ColumnPlan.of([("value", "binary")], "rows")) as producer:
            for one in rows:
                attempt.take(one, producer.begin_transaction)
                producer.send(one)
            assert producer.finish(attempt.mark).records == 100
        report = attempt.finish()
    return str(planning.commit(options, planned, [report]))


@pytest.mark.parametrize("login", [as_bob, by_certificate])
def test_batches_are_committed_over_tls_and_logins(
    secured: Secured, login: Callable[[Secured], SinkOptions]
) -> None:
    for number in range(2):
        assert "1 transaction committed" in write(login(secured), number, login.__name__)


def test_rights_that_are_missing_are_named_when_the_write_is_planned(secured: Secured) -> None:
    on_ids = "grant Write and Describe on the transactional"
    denied = [
        (ResourceType.TRANSACTIONAL_ID, "none-", AclOperation.WRITE, on_ids),
        (ResourceType.TRANSACTIONAL_ID, "all-", AclOperation.ALL, on_ids),
        (ResourceType.GROUP, "group-", AclOperation.ALL, "grant Read on the groups that begin with"),
    ]
    admin = AdminClient({"bootstrap.servers": secured.broker.bootstrap_servers, "log_level": 0})
    acls = [
        AclBinding(
            kind, name, ResourcePatternType.PREFIXED, "User:bob", "*", operation, AclPermissionType.DENY
        )
        for kind, name, operation, _ in denied
    ]
    for done in admin.create_acls(acls).values():
        done.result(30)
    for _, name, _, advice in denied:
        options = as_bob(secured, **{"transactional.id.prefix": f"{name}of-bob"})
        # Brokers learn of ACLs some time after they are made.
        said = until(lambda options=options: refusal(options), "a refusal", poll_s=0.1)
        assert advice in said, name
        assert PASSWORD not in said


def refusal(options: SinkOptions) -> str:
    try:
        planning.plan(options, _CHECKPOINT, is_streaming=True, for_tasks=True)
    except ConfigurationError as error:
        return str(error)
    return ""
