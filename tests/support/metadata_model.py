"""A slow model of ClusterMetadata that follows KIP-526's text and walks over all topics at every look."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from kafka_sink.cluster.metadata import ClusterMetadata
from kafka_sink.model import NO_LEADER, MetadataUpdate, Node, PartitionMetadata
from kafka_sink.options import SinkOptions
from tests.support.topic_metadata import topic_of

NAMES = [f"t{number:02}" for number in range(36)]
NODES = (Node(1, "a", 1), Node(2, "b", 2))
BACKOFF, BACKOFF_MAX = 100.0, 1000.0
ELECTION_TRIES = 8
# Rows count as waiting for a topic for this long after they were last seen.
WAITED_FOR = 1500.0
UNKNOWN, DENIED = 3, 29

# The states of one topic that a broker may report.
OK, NEWER_EPOCH, LEADERLESS, MISSING, FORBIDDEN, SILENT = "ok", "newer", "leaderless", "missing", "denied", ""
ANSWERS = [OK, OK, OK, NEWER_EPOCH, LEADERLESS, MISSING, FORBIDDEN, SILENT]


def backoff(attempts: int) -> float:
    return float(min(BACKOFF * 2 ** (attempts - 1), BACKOFF_MAX))


@dataclass
class Known:
    used: float
    epoch: int | None = None  # None means no metadata.
    leaderless: bool = False
    refreshed: float = 0.0
    stale: bool = False
    denied_at: float | None = None
    denied_but_wanted: bool = False
    # Whether its last response was an error.
    failed: bool = False
    bad_responses: int = 0
    wait_until: float = -math.inf
    marked_in_flight: bool = False

    @property
    def urgent(self) -> bool:
        denied = self.denied_at is not None and not self.denied_but_wanted
        return self.stale or (self.epoch is None and not denied)

    def has_rows(self, now: float) -> bool:
        return now - self.used < WAITED_FOR


@dataclass
class Model:
    max_age: float
    idle: float
    topics: dict[str, Known] = field(default_factory=dict)
    in_flight: list[str] | None = None
    failures: int = 0
    blocked_until: float = -math.inf
    answered: float = -math.inf

    def use(self, name: str, now: float) -> None:
        known = self.topics.get(name)
        if known and now - known.used < self.idle:
            known.used = now
            if known.denied_at is None or now - known.denied_at < self.max_age:
                return
        self.topics[name] = Known(now)

    def mark(self, name: str, now: float) -> None:
        known = self.topics.get(name)
        if known is None or now - known.used >= self.idle:
            self.topics[name] = Known(now)
            return
        known.used = now
        if known.epoch is None:
            known.denied_but_wanted = known.denied_at is not None
            return
        known.marked_in_flight = self.in_flight is not None and name in self.in_flight
        if not known.stale and now > known.wait_until + BACKOFF_MAX:
            known.bad_responses = 0
        known.stale = True

    def ask(self, now: float) -> tuple[set[str], list[str]] | None:
        """Urgent topics, and non-urgent ones in their order."""
        self.topics = {name: one for name, one in self.topics.items() if now - one.used < self.idle}
        if self.in_flight is not None or now < self.blocked_until:
            return None
        cached = [one for one in self.topics.values() if one.epoch is not None]
        target = max(20, int(len(cached) / (self.max_age / 1000) * 10))
        urgent, soon, aging = set(), set(), []
        gathered = now >= self.answered + BACKOFF
        for name, one in self.topics.items():
            if one.urgent:
                if (one.epoch is None or one.failed) and not one.has_rows(now):
                    continue
                if one.wait_until <= now and (one.epoch is None or gathered):
                    urgent.add(name)
                elif one.wait_until <= now + BACKOFF:
                    soon.add(name)
            elif one.epoch is not None and now - one.refreshed >= self.max_age:
                urgent.add(name)
            elif one.epoch is not None and now - one.refreshed >= self.max_age * 0.5:
                aging.append((one.refreshed, name))
        oldest = [name for _, name in sorted(aging)]
        if urgent:
            urgent |= soon
            oldest = oldest[: max(0, target - len(urgent))]
        elif len(oldest) >= target:
            oldest = oldest[:target]
        else:
            return None
        self.in_flight = [*urgent, *oldest]
        return urgent, oldest

    def fail(self, now: float) -> None:
        self._unmark()
        self.failures += 1
        self.blocked_until = now + backoff(self.failures)

    def answer(self, responses: dict[str, str], now: float) -> None:
        self.failures, self.blocked_until, self.answered = 0, -math.inf, now
        here = {name: said for name, said in responses.items() if name in self.topics}
        marked = {name for name in here if self.topics[name].marked_in_flight}
        self._unmark()
        for name, said in here.items():
            known = self.topics[name]
            before = (known.epoch, known.leaderless)
            if said:
                known.failed = said in (MISSING, FORBIDDEN)
            was_stale = known.stale
            if said in (OK, NEWER_EPOCH, LEADERLESS):
                known.epoch = (known.epoch or 0) + (said == NEWER_EPOCH)
                known.leaderless = said == LEADERLESS
                known.refreshed, known.denied_at = now, None
            elif said == FORBIDDEN and known.epoch is None:
                known.denied_at, known.denied_but_wanted = now, False
            elif said == MISSING:
                # The last error counts.
                known.denied_at = None
            changed = before != (known.epoch, known.leaderless)
            answered = said in (OK, NEWER_EPOCH, LEADERLESS)
            unmended = answered and was_stale and name in marked and not changed
            electing = said == LEADERLESS and known.bad_responses < ELECTION_TRIES
            known.stale = known.epoch is not None and (not answered or unmended or electing)
            good = said in (OK, NEWER_EPOCH) and not unmended and (changed or not was_stale)
            known.bad_responses = 0 if good else known.bad_responses + 1
            known.wait_until = now + backoff(max(1, known.bad_responses))

    def _unmark(self) -> None:
        self.in_flight = None
        for known in self.topics.values():
            known.marked_in_flight = False


def update(model: Model, responses: dict[str, str]) -> MetadataUpdate:
    topics, errors = [], {}
    for name, said in responses.items():
        known = model.topics.get(name)
        epoch = ((known.epoch if known else 0) or 0) + (said == NEWER_EPOCH)
        if said in (OK, NEWER_EPOCH, LEADERLESS):
            leader = NO_LEADER if said == LEADERLESS else 1
            topics.append(topic_of(name, b"i" * 16, (PartitionMetadata(name, 0, leader, epoch),)))
        elif said:
            errors[name] = UNKNOWN if said == MISSING else DENIED
    return MetadataUpdate(NODES, tuple(topics), errors)


class Pair:
    """Drives both with the same facts and compares each decision."""

    def __init__(self, max_age: float, idle: float) -> None:
        self.now = 0.0
        self.model = Model(max_age, idle)
        self.cache = ClusterMetadata(
            SinkOptions(
                bootstrap_servers=(),
                metadata_max_age_ms=int(max_age),
                metadata_max_idle_ms=int(idle),
                retry_backoff_ms=int(BACKOFF),
                retry_backoff_max_ms=int(BACKOFF_MAX),
            ),
            random=lambda: 0.5,
        )
        self.asked: tuple[str, ...] = ()

    def look(self) -> None:
        delay = self.cache.next_request_delay_ms(self.now)
        asked = self.cache.next_request(self.now)
        expected = self.model.ask(self.now)
        if expected is None:
            assert asked is None
            assert self.cache.next_request_delay_ms(self.now) > 0, "a loop would spin"
        else:
            urgent, aging = expected
            assert asked is not None, f"{urgent} are due"
            assert delay == 0
            assert len(set(asked)) == len(asked)
            assert set(asked[: len(urgent)]) == urgent
            assert list(asked[len(urgent) :]) == aging
            self.asked = asked
            assert self.cache.next_request_delay_ms(self.now) == math.inf

    def advance(self, by: float) -> None:
        """Time goes by; nothing may fall due before the cache said so."""
        delay = self.cache.next_request_delay_ms(self.now)
        if 1 < delay < by:
            self.now += delay - 0.5
            self.look()
            assert self.model.in_flight is None, "a request before its time"
            self.now += by - delay + 0.5
        else:
            self.now += by

    def respond(self, choose: Callable[[int], str]) -> None:
        if self.model.in_flight is None:
            return
        responses = {name: choose(index) for index, name in enumerate(self.asked)}
        self.cache.on_response(update(self.model, responses), self.asked, self.now)
        self.model.answer(responses, self.now)
        for name, known in self.model.topics.items():
            metadata = self.cache.topic(name)
            assert (metadata is None) == (known.epoch is None)
            if metadata is not None:
                assert metadata.partitions[0].leader_epoch == known.epoch
            is_denied = "AUTHORIZATION" in (self.cache.describe_lookup_error(name) or "")
            assert (metadata is None and is_denied) == (known.denied_at is not None)

    def fail(self) -> None:
        if self.model.in_flight is not None:
            self.cache.on_failure(self.now)
            self.model.fail(self.now)
