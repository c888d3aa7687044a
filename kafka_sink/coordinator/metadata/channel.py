"""A task's side of metadata: sends requests and reports, and imports the hints that come back."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, Protocol

from kafka_sink.clock import Clock
from kafka_sink.coordinator.metadata.messages import (
    KIND,
    MAX_STALE,
    MAX_TOPICS,
    decode_snapshot,
    in_parts,
    use_interval_ms,
)
from kafka_sink.coordinator.transport.channel import Channel
from kafka_sink.metadata.cluster_metadata import HintSource
from kafka_sink.metadata.topic_state import MetadataSnapshot
from kafka_sink.model import TopicPartition
from kafka_sink.timing_bounds import GATHER_STALE_MS, HINT_WAIT_MS, next_beat_ms

# A task without other messages checks this often that the coordinator still replies.
_HEARTBEAT_MS = 6000.0


class HintSink(Protocol):
    """The part of ClusterMetadata that takes hints."""

    def import_hints(self, snapshot: MetadataSnapshot, now_ms: float) -> int: ...
    def hold(self, until_ms: float) -> None: ...
    def release(self, now_ms: float) -> None: ...
    def share_refreshes(self, shared: bool) -> None: ...


class MetadataChannel(Channel, HintSource):
    """Asks the coordinator for metadata, and passes on what a ClusterMetadata learns.

    Before the first connection the channel accepts requests, so that a task's first topics wait for it up to
    ``HINT_WAIT_MS``. After ``on_lost`` it accepts none until there is a connection again.
    """

    kind = KIND

    def __init__(self, view: HintSink, clock_ms: Clock, report_interval_ms: float, idle_ms: float) -> None:
        self._view = view
        self._clock_ms = clock_ms
        super().__init__()
        self._use_interval_ms = use_interval_ms(idle_ms)
        self._interval_ms = min(report_interval_ms, self._use_interval_ms)
        self._lock = threading.Lock()  # guards all below
        self._reachable = True
        self._asks: deque[list[str]] = deque()
        self._asking = 0
        self._stale: dict[str, float] = {}
        self._leaders: dict[TopicPartition, list[Any]] = {}
        self._reported_ms: dict[str, float] = {}
        self._used: dict[str, None] = {}
        self._checked_ms = self._sent_ms = -math.inf

    # -- HintSource: the task's and the sender's thread -------------------------------------------

    def ask(self, topics: Iterable[str]) -> bool:
        with self._lock:
            if not self._reachable:
                return False
            self._asks.extend(in_parts(topics))
        self._wake()
        return True

    def note_use(self, topics: Iterable[str]) -> None:
        with self._lock:
            self._used.update(dict.fromkeys(topics))

    def report_stale(self, topic: str) -> None:
        with self._lock:
            first = not self._stale
            # Bounded by the number of topics that the task writes to.
            self._stale.setdefault(topic, self._clock_ms())
        if first:
            self._wake()

    def report_leader(
        self, partition: TopicPartition, leader: int, epoch: int, topic_id: bytes | None
    ) -> None:
        encoded_id = None if topic_id is None else topic_id.hex()
        with self._lock:
            self._leaders[partition] = [partition.topic, encoded_id, partition.partition, leader, epoch]
        self.report_stale(partition.topic)

    # -- Channel: the client's thread -------------------------------------------------------------

    def next_message(self, now_ms: float) -> Mapping[str, Any] | None:
        with self._lock:
            if not self._asks and now_ms < self._report_ms():
                return None
            asked = self._asks.popleft() if self._asks else []
            self._asking += bool(asked)
            self._reported_ms.update(dict.fromkeys(asked, now_ms))
            if asked:
                self._sent_ms = now_ms
                return {"ask": asked}
            self._checked_ms = now_ms
            used = self._take_use(now_ms)
            # The sender may have read the clock after ``now_ms``, hence the maximum with 0.
            reported = list(islice(self._stale, MAX_STALE))
            stale = [[name, max(0.0, now_ms - self._stale.pop(name))] for name in reported]
            leaders = [self._leaders.pop(one) for one in list(islice(self._leaders, MAX_STALE))]
            if not used and not stale and not leaders and now_ms < next_beat_ms(self._sent_ms, _HEARTBEAT_MS):
                return None
            self._sent_ms = now_ms
            report: dict[str, Any] = {"use": used, "stale": stale}
            return {**report, "leaders": leaders} if leaders else report

    def _take_use(self, now_ms: float) -> list[str]:
        used, self._used = self._used, {}
        report_before_ms = now_ms - self._use_interval_ms
        due = [name for name in used if self._reported_ms.get(name, -math.inf) < report_before_ms]
        self._used.update(dict.fromkeys(due[MAX_TOPICS:]))
        self._reported_ms.update(dict.fromkeys(due[:MAX_TOPICS], now_ms))
        if len(self._reported_ms) > 2 * MAX_TOPICS:
            self._reported_ms = {name: at for name, at in self._reported_ms.items() if at > report_before_ms}
        return due[:MAX_TOPICS]

    def hurry(self) -> None:
        with self._lock:
            if self._stale or self._leaders:
                self._checked_ms = -math.inf

    def next_message_delay_ms(self, now_ms: float) -> float:
        with self._lock:
            return 0.0 if self._asks else max(0.0, self._report_ms() - now_ms)

    def _report_ms(self) -> float:
        if self._stale or self._leaders:
            return self._checked_ms + min(self._interval_ms, GATHER_STALE_MS)
        return next_beat_ms(self._checked_ms, self._interval_ms)

    def on_reply(self, body: Mapping[str, Any], last: bool, now_ms: float) -> None:
        with self._lock:
            # A report gets one last reply, too, but without ``asked``.
            is_ask = bool(body.get("asked"))
            if last and is_ask:
                self._asking -= 1
            waiting = self._asking > 0 or bool(self._asks)
        if "topics" in body:
            self._view.import_hints(decode_snapshot(body), now_ms)
        if waiting:
            self._view.hold(now_ms + HINT_WAIT_MS)
        elif last and is_ask:
            self._view.release(now_ms)

    def on_push(self, body: Mapping[str, Any], now_ms: float) -> None:
        self._view.import_hints(decode_snapshot(body), now_ms)

    def on_connected(self, now_ms: float) -> None:
        with self._lock:
            self._reachable = True
            self._asking = 0
            self._reported_ms.clear()
            self._checked_ms = self._sent_ms = -math.inf
        self._view.share_refreshes(True)

    def on_lost(self, now_ms: float) -> None:
        with self._lock:
            self._reachable = False
            self._asks.clear()
            self._asking = 0
        self._view.share_refreshes(False)
        self._view.release(now_ms)
