"""How large a topic's batches may get if its brokers accept less than batch.size."""

from __future__ import annotations

import contextlib
import json
import threading

from kafka_sink import application_markers

# How long a limit learnt by an earlier producer is used: an administrator may have raised it since.
_BELIEVED_S = 3600.0
# The refused size is divided by these.
_AFTER_SPLIT, _AFTER_LOSS = 2, 8


class BatchSizeLimits:
    """Limits in bytes by topic. Thread-safe: the sender learns them, the task's thread cuts batches by them.

    They outlive the producer. If a broker refuses a batch as too large after the batch's connection broke,
    the batch may not be split. Its task fails then, and the task's Python worker ends. A new worker that
    began with batch.size again would fail alike, in every attempt that Spark allows. ``cluster`` identifies
    the brokers; with None the limits are not kept.
    """

    def __init__(self, batch_size: int, cluster: str | None = None) -> None:
        self._batch_size = batch_size
        self._key = None if cluster is None else f"batch size limits of {cluster}"
        self._lock = threading.Lock()  # guards the dictionary
        self._by_topic = self._kept()

    def of(self, topic: str) -> int:
        """The topic's limit: batch.size, or less if brokers have refused that."""
        with self._lock:
            return min(self._by_topic.get(topic, self._batch_size), self._batch_size)

    def learnt(self, topic: str) -> int | None:
        """The limit of a topic whose brokers have refused batches as too large, None for any other."""
        with self._lock:
            return self._by_topic.get(topic)

    def refused(self, topic: str, size: int, *, costs_task: bool = False) -> None:
        """A broker refused a batch of ``size`` bytes. If it was within the limit, the broker's own is lower.

        The new limit is half the size, since splitting a batch costs a walk over its records. It is an eighth
        if the refusal ``costs_task``, since Spark allows four attempts by default.
        """
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
