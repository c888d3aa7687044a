"""Before a task starts, on the driver: brokers can be reached and used, and the topic is there or is created.

This module is imported for every micro-batch, so what speaks to brokers is loaded only when it is needed.
"""

from __future__ import annotations

import math

from kafka_sink import application_markers
from kafka_sink.options import SinkOptions

# A stream looks again once this long has passed, so that a restart in the same application finds out what
# became of its topic, and no micro-batch pays for it.
STREAM_LOOKS_AGAIN_S = 60.0


def prepare_topic(options: SinkOptions, *, is_streaming: bool = False) -> None:
    """Connect to the cluster; look the option ``topic`` up, and create it where ``topic.create`` says so.

    Blocks for no longer than max.block.ms, and some 10 s for connections; a stream that was connected before
    waits for those, too, up to max.block.ms, as brokers restart. Raises BrokersUnreachableError or
    AuthenticationError where no broker can be used, ConfigurationError where the topic stays missing, may not
    be used or could not be created, MetadataTimeoutError where brokers do not answer. For a stream it does
    nothing where this was done within the last minute.
    """
    # With what shows of the security: another login is tried at once.
    done = f"topic {options.topic} is there: {options.redacted()}"
    if is_streaming and application_markers.happened_within(done, STREAM_LOOKS_AGAIN_S):
        return
    from kafka_sink.planning_client import CONNECT_BOUND_MS, PlanningClient
    from kafka_sink.topic_preparation import TopicPreparation

    was_connected = is_streaming and application_markers.happened_within(done, math.inf)
    bound_ms = options.max_block_ms if was_connected else min(CONNECT_BOUND_MS, options.max_block_ms)
    with PlanningClient(options, bound_ms) as client:
        TopicPreparation(options, client).run()
    application_markers.remember(done)
