"""Times whose order matters across modules, in milliseconds. A test checks the order.

A time that no other module depends on stays where it is used.
"""

from __future__ import annotations

# -- metadata by way of the coordinator: each waits a little longer than the one it waits for ----------------

# Tasks gather leaders that moved for so long.
GATHER_STALE_MS = 100.0
# The coordinator asks another task to fetch metadata when one has been silent for so long.
FETCH_SILENCE_MS = 1000.0
# A task does not ask brokers while the coordinator may be about to bring the topic. The time begins again
# when a second task is asked. Shorter than COORDINATOR_SILENCE_MS: no task waits for a coordinator that has
# stopped responding.
HINT_WAIT_MS = 1100.0
# A task takes a coordinator that does not answer a sign of life for gone. A driver that stalls for seconds
# must not lose all its tasks at once.
COORDINATOR_SILENCE_MS = 6000.0

# After this time every broker knows a new topic, and one that is unknown is missing.
TOPIC_PROPAGATION_MS = 5000.0

# -- the circuit breaker ---------------------------------------------------------------------------------

# A silent broker is muted only when it is still silent after responses in the socket have been read. Far
# below any sensible slow.request.min.ms.
CONFIRM_SILENCE_MS = 50.0
# Outcomes count in the present window and in the one before it, and so for five to ten seconds.
OUTCOME_WINDOW_MS = 5_000.0
# The coordinator sends mutes that follow one another closely in one message. Below the default of
# coordinator.report.interval.ms, so that gathering adds little to it.
GATHER_MUTES_MS = 50.0
# The sender looks at waiting batches at least this often.
MAX_POLL_MS = 1000.0
# Batches count as waiting for this long after the sender last saw them: longer than it takes to look again.
HELD_MS = 1500.0


# -- topics that are not authorized ------------------------------------------------------------------------

# Brokers reject topics (TOPIC_AUTHORIZATION_FAILED) while they load their ACLs. No row is skipped for it
# before it has lasted for this long.
UNAUTHORIZED_TOPIC_MS = 5000.0


def window_at(now_ms: float) -> int:
    """The number of the window of outcomes that a time lies in."""
    return int(now_ms // OUTCOME_WINDOW_MS)
