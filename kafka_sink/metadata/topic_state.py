"""One topic in the metadata cache: what is known of it, since when, and what it waits for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kafka_sink.kafka_errors import error_of
from kafka_sink.metadata.topic_merge import TopicIdentity, TopicIdHistory, goes_back, merge
from kafka_sink.model import TopicMetadata


@dataclass(slots=True)
class TopicState:
    """Times are monotonic milliseconds."""

    used_ms: float
    # False for what only a hint told of: kept in case it is used, never asked for.
    in_use: bool = True
    metadata: TopicMetadata | None = None
    observed_ms: float = -math.inf
    # Told to be out of date, or not answered well: urgent although there is metadata.
    stale: bool = False
    stale_ms: float = -math.inf
    error: int = 0
    error_ms: float = -math.inf
    # Rows wait for it in spite of a final error.
    retry: bool = False
    # Answers in a row that did not help, and the end of the wait after the last one.
    unhelpful: int = 0
    not_before_ms: float = -math.inf
    topic_ids: TopicIdHistory = field(default_factory=TopicIdHistory)
    # When a topic without id was found to be recreated: what was observed before is of another topic.
    replaced_ms: float = -math.inf

    @property
    def final(self) -> bool:
        """Whether nothing is known but an error that asking again hardly mends.

        A broker that has not loaded its authorizer's rules yet sends such an error, too. So known metadata
        outlives it, and rows that wait for the topic have it asked for again.
        """
        return self.metadata is None and error_of(self.error).final_for_topic

    def take_answer(self, incoming: TopicMetadata, now_ms: float) -> bool:
        """Merges a broker's answer; False where it speaks of a former topic of this name, or may."""
        known = self.metadata
        if known is None:
            self.metadata = incoming
        else:
            back = goes_back(known, incoming)
            verdict = self.topic_ids.judge(known.topic_id, incoming.topic_id, goes_back=back)
            if verdict is TopicIdentity.FORMER:
                if back:
                    # Of some partitions it may know more all the same.
                    self.metadata = merge(known, incoming, later=False)
                return False
            self.metadata = merge(known, incoming, later=True) if verdict is TopicIdentity.SAME else incoming
            if back:
                self.replaced_ms = now_ms
        self._observed(now_ms)
        return True

    def take_hint(self, incoming: TopicMetadata, observed_ms: float, replaced_ms: float) -> bool:
        """Merges what another cache observed; False where ours is later and cannot be reconciled.

        ``replaced_ms``: as here, in the other cache.
        """
        known = self.metadata
        if self.final and observed_ms <= self.error_ms:
            return False
        if known is None:
            self.metadata = incoming
        elif incoming.topic_id is None and known.topic_id is None and observed_ms <= self.replaced_ms:
            return False
        elif incoming.topic_id is None and known.topic_id is None and replaced_ms > self.observed_ms:
            self.metadata = incoming
        elif incoming.topic_id is None or known.topic_id is None or incoming.topic_id == known.topic_id:
            self.metadata = merge(known, incoming, later=observed_ms > self.observed_ms)
        else:
            if observed_ms <= self.observed_ms or incoming.topic_id in self.topic_ids.former:
                return False
            self.topic_ids.judge(known.topic_id, incoming.topic_id)
            self.metadata = incoming
        self.replaced_ms = max(self.replaced_ms, replaced_ms)
        self._observed(max(self.observed_ms, observed_ms))
        return True

    def _observed(self, at_ms: float) -> None:
        self.observed_ms = at_ms
        self.error, self.retry = 0, False
