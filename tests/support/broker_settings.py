"""Settings in which the tests' real brokers differ from a default broker."""

from __future__ import annotations

SETTINGS = {
    # Transactions that time out are aborted within a second, not ten.
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": 1000,
    # Each of these threads, by default 8 and 3 for each listener, wakes up three times a second in an idle
    # broker, too. With these, an idle broker costs 1.8 s of processor time in 100 s, not 2.6.
    "num.io.threads": 2,
    "num.network.threads": 1,
}
# These are for three brokers that are killed often: a broker may register again only when its session is
# over.
SHORT_SESSIONS = {**SETTINGS, "broker.session.timeout.ms": 3000, "replica.lag.time.max.ms": 5000}
