"""How large a topic's batches may get where its brokers take less than batch.size."""

from __future__ import annotations

import contextlib
import json
import threading

from kafka_sink import application_markers

# How long a limit is believed that another producer learnt: an administrator may have raised it since.
_BELIEVED_S = 3600.0
# The refused size is divided by these.
_AFTER_SPLIT, _AFTER_LOSS = 2, 8


class BatchSizeLimits:
    """Limits in bytes by topic. Thread-safe: the sender learns them, the task's thread cuts batches by them.

    They outlive the producer. A batch that a broker refuses as too large after a connection broke under it
    may not be split, so its task fails, and a failed task's Python worker ends: learnt anew from batch.size
    each time, the same would happen in every attempt that Spark allows. ``cluster`` names the brokers; None:
    nothing is kept.
    """

    def __init__(self, batch_size: int, cluster: str | None = None) -> None:
        self._batch_size = batch_size
        self._key = None if cluster is None else f"batch size limits of {cluster}"
        self._lock = threading.Lock()  # guards the dictionary
        self._by_topic = self._kept()

    def of(self, topic: str) -> int:
        """batch.size, or less where less was learnt."""
        with self._lock:
            return min(self._by_topic.get(topic, self._batch_size), self._batch_size)

    def refused(self, topic: str, size: int, *, costs_task: bool = False) -> None:
        """A broker refused a batch of ``size`` bytes. Where that was within the limit the broker's own is
        lower: half the size from now on, since each batch that must be split costs a walk over its records.
        An eighth where it ``costs_task``, since Spark allows four attempts by default."""
        with self._lock:
            if size > min(self._by_topic.get(topic, self._batch_size), self._batch_size):
                return
            self._by_topic[topic] = max(1, size // (_AFTER_LOSS if costs_task else _AFTER_SPLIT))
            if self._key is None:
                return
            kept = self._kept()
            for name, limit in self._by_topic.items():
                kept[name] = min(limit, kept.get(name, limit))
            application_markers.note(self._key, json.dumps(kept))

    def _kept(self) -> dict[str, int]:
        text = None if self._key is None else application_markers.noted_within(self._key, _BELIEVED_S)
        found: object = None
        with contextlib.suppress(ValueError):
            found = json.loads(text or "null")
        if not isinstance(found, dict):
            return {}
        return {topic: limit for topic, limit in found.items() if type(limit) is int and limit > 0}
