"""Whether brokers with transaction protocol 1 refuse late writes of a transaction that has ended.

Exactly once depends on it there: see "Brokers with transaction protocol 1" in docs/exactly-once-proof.md.
"""

from __future__ import annotations

from kafka_sink import application_markers
from kafka_sink.driver import driver_log
from kafka_sink.errors import ConfigurationError
from kafka_sink.transactions.client import PROTOCOL_1, TransactionClient

# KIP-890's first part. On by default.
SETTING = "transaction.partition.verification.enable"
# It may be changed while brokers run.
_ASK_AGAIN_S = 600.0


def require_verified_writes(client: TransactionClient, bootstrap_servers: str, timeout_ms: float) -> None:
    """Raise ConfigurationError where a broker does not verify writes.

    It asks once in a while in an application, and warns where brokers do not let the principal know.
    """
    if client.protocol != PROTOCOL_1:
        return
    key = f"{SETTING} is on at {bootstrap_servers}"
    if application_markers.happened_within(key, _ASK_AGAIN_S):
        return
    found = client.broker_settings(SETTING, timeout_ms)
    off = sorted(node for node, value in found.items() if value == "false")
    if off:
        raise ConfigurationError(
            f"delivery.guarantee=exactly-once needs {SETTING}=true on all brokers where transaction.version "
            f"is below 2, and it is false on {'broker' if len(off) == 1 else 'brokers'} "
            f"{', '.join(map(str, off))}: a late write of an aborted transaction could become part of a "
            "committed one. Set it, or use delivery.guarantee=at-least-once"
        )
    application_markers.remember(key)
    unknown = sorted(node for node, value in found.items() if value is None)
    if unknown and application_markers.only_once(f"{key} is not known"):
        driver_log.warn(
            f"kafka-chunked: whether {SETTING} is on could not be read from {len(unknown)} of {len(found)} "
            "brokers, as this needs DescribeConfigs on the cluster. It is on by default. With it off, a late "
            "write of an aborted transaction can become part of a committed one"
        )
