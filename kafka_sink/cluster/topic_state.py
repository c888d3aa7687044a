"""One topic in the metadata cache: what is known of it, since when, and what it waits for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kafka_sink.cluster.topic_merge import Incarnations, Verdict, merge
from kafka_sink.model import TopicMetadata

# The name is invalid, or the principal may not see the topic. A broker that has not loaded its authorizer's
# rules yet says so, too: what was known of a topic outlives it, and rows that wait have it asked again.
_FINAL_ERRORS = frozenset({17, 29})


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
    incarnations: Incarnations = field(default_factory=Incarnations)

    @property
    def final(self) -> bool:
        """Whether nothing is known but an error that asking again hardly mends."""
        return self.metadata is None and self.error in _FINAL_ERRORS

    def take_answer(self, told: TopicMetadata, now_ms: float) -> bool:
        """Merges a broker's answer; False where it speaks of a former topic of this name."""
        known = self.metadata
        if known is None:
            self.metadata = told
        else:
            verdict = self.incarnations.judge(known.topic_id, told.topic_id)
            if verdict is Verdict.FORMER:
                return False
            self.metadata = merge(known, told, later=True) if verdict is Verdict.SAME else told
        self.observed_ms = now_ms
        self.error, self.retry = 0, False
        return True

    def take_hint(self, told: TopicMetadata, observed_ms: float) -> bool:
        """Merges what another cache observed; False where ours is later and cannot be reconciled."""
        known = self.metadata
        if self.final and observed_ms <= self.error_ms:
            return False
        if known is None:
            self.metadata = told
        elif told.topic_id is None or known.topic_id is None or told.topic_id == known.topic_id:
            self.metadata = merge(known, told, later=observed_ms > self.observed_ms)
        else:
            if observed_ms <= self.observed_ms or told.topic_id in self.incarnations.former:
                return False
            self.incarnations.judge(known.topic_id, told.topic_id)
            self.metadata = told
        self.observed_ms = max(self.observed_ms, observed_ms)
        self.error, self.retry = 0, False
        return True
