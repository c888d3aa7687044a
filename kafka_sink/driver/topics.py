"""Checks on the driver, before tasks start: brokers are usable, and the topics exist or are created.

Every micro-batch imports this module, and few ask brokers: their client, which takes 0.1 s to import, is
imported then.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from kafka_sink import spark_application
from kafka_sink.options import SinkOptions

if TYPE_CHECKING:
    from kafka_sink.cluster.topic_state import MetadataSnapshot

# A stream repeats the checks after this time. A query restarted in the same application thus notices if its
# topic is gone, and few micro-batches pay for the checks.
STREAM_RECHECK_S = 60.0
# Bounds connecting. The caller bounds requests.
CONNECT_BOUND_MS = 9_000.0


def prepare_topic(
    options: SinkOptions, *, is_streaming: bool = False, connect_bound_ms: float = CONNECT_BOUND_MS
) -> MetadataSnapshot | None:
    """Connect to the cluster and look up the option ``topic``. Create it if ``topic.create`` is true.

    Returns what tasks may use of the look-up; None where there was none, or the topic had no leaders yet.

    Blocks for max.block.ms at most, plus about 10 s for connections. A stream that was connected before waits
    up to max.block.ms for connections, because brokers may be restarting. A stream skips the checks if they
    succeeded within the last minute.

    Raises BrokersUnreachableError or AuthenticationError if no broker is usable, ConfigurationError if the
    topic is missing, not permitted or could not be created, MetadataTimeoutError if brokers do not respond.
    """
    # The key contains the redacted security options, so that another login is checked at once.
    done = f"topics are there: {options.redacted()}"
    if is_streaming and spark_application.happened_within(done, STREAM_RECHECK_S):
        return None
    from kafka_sink.cluster.topic_state import snapshot_of
    from kafka_sink.driver.planning_client import PlanningClient
    from kafka_sink.driver.topic_preparation import TopicPreparation

    was_connected = is_streaming and spark_application.happened_within(done, math.inf)
    bound_ms = options.max_block_ms if was_connected else min(connect_bound_ms, options.max_block_ms)
    with PlanningClient(options, bound_ms) as client:
        update = TopicPreparation(options, client, named_topics(options)).run()
    spark_application.remember(done)
    return None if options.topic is None else snapshot_of(update, options.topic)


def named_topics(options: SinkOptions) -> dict[str, str]:
    """The topics that options name, each with its option."""
    named: dict[str | None, str] = {
        **dict.fromkeys(options.topic_create_names, "topic.create.names"),
        options.errors_deadletterqueue_topic_name: "errors.deadletterqueue.topic.name",
        options.topic: "topic",
    }
    return {topic: option for topic, option in named.items() if topic is not None}
