"""Kafka's transactions as values: transaction protocol 2, with markers that take their time.

Left out: brokers and their failures (an operation is repeated until its response is there), and expiry of
ids and offsets.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kafka_sink.transactions.operations import (
    OPEN,
    Describe,
    Described,
    EndTransaction,
    FetchOffsets,
    FetchStableOffsets,
    InitProducer,
    ListOpen,
    OffsetKey,
    ProducerEpoch,
    RecordOffsets,
    Refused,
)

Row = tuple[int, int]


@dataclass(frozen=True)
class Produce:
    """A task's rows; response: whether Kafka took them."""

    transactional_id: str
    producer: ProducerEpoch
    rows: tuple[Row, ...]


class NotYet(Exception):
    """Kafka responds so that the request is repeated: CONCURRENT_TRANSACTIONS, UNSTABLE_OFFSET_COMMIT."""


@dataclass
class Transaction:
    """One transactional id."""

    producer: ProducerEpoch
    state: str = "Empty"
    # With which epoch the last transaction was ended, which a repeated EndTxn carries.
    ended_with: ProducerEpoch | None = None
    rows: list[Row] = field(default_factory=list)
    offsets: dict[OffsetKey, str] = field(default_factory=dict)
    began_ms: int = -1


class Kafka:
    """Executes operations; ``visible`` counts the rows that readers of committed rows see."""

    def __init__(self, last_epoch: int = 32_766) -> None:
        # An id gets another producer id behind it.
        self._last_epoch = last_epoch
        self.transactions: dict[str, Transaction] = {}
        self.offsets: dict[OffsetKey, str] = {}
        self.visible: Counter[Row] = Counter()
        self._producer_ids = 0
        # What former coordinators of groups still answer, which have not learnt that others took their place.
        self.former: dict[str, dict[OffsetKey, str]] = {}
        # The brokers' clock.
        self.now_ms = 0

    def execute(self, operation: Any) -> Any:
        """The operation's response. Raises NotYet."""
        match operation:
            case InitProducer(name):
                return self._init(name)
            case Describe(names):
                known = [(name, self.transactions[name]) for name in names if name in self.transactions]
                return {name: Described(one.state, one.producer, one.began_ms) for name, one in known}
            case ListOpen(prefix):
                named = self.transactions.items()
                return [name for name, t in named if name.startswith(f"{prefix}-task-") and t.state == OPEN]
            case Produce(name, producer, rows):
                return self._write(name, producer, rows, {}) is None
            case RecordOffsets(name, producer, group, entries):
                # A former coordinator cannot take them, and the client looks for the present one.
                self.former.pop(group, None)
                offsets = {OffsetKey(group, partition): text for partition, text in entries}
                return self._write(name, producer, (), offsets)
            case EndTransaction(name, producer, commit):
                return self._end(name, producer, commit)
            case FetchOffsets(groups):
                return {key: text for group in groups for key, text in self._answers(group).items()}
            case FetchStableOffsets(keys):
                return self._fetch_stable(keys)
        raise AssertionError(operation)

    def _init(self, name: str) -> ProducerEpoch:
        found = self.transactions.get(name)
        if found is None:
            self._producer_ids += 1
            found = self.transactions[name] = Transaction(ProducerEpoch(self._producer_ids, -1))
        if found.state.startswith("Prepare"):
            raise NotYet
        if found.state == OPEN:
            self.time_out(name)
        found.producer = self._next(found.producer)
        found.state, found.ended_with = "Empty", None
        return found.producer

    def _next(self, producer: ProducerEpoch) -> ProducerEpoch:
        if producer.epoch < self._last_epoch:
            return ProducerEpoch(producer.producer_id, producer.epoch + 1)
        self._producer_ids += 1
        return ProducerEpoch(self._producer_ids, 0)

    def time_out(self, name: str) -> None:
        """transaction.timeout.ms has passed: aborted, under an epoch that no client knows."""
        found = self.transactions[name]
        found.rows, found.offsets = [], {}
        found.producer = self._next(found.producer)
        found.state, found.ended_with = "CompleteAbort", None

    def _write(
        self, name: str, producer: ProducerEpoch, rows: tuple[Row, ...], offsets: dict[OffsetKey, str]
    ) -> Refused | None:
        found = self.transactions.get(name)
        if found is None or found.producer != producer:
            return Refused("INVALID_PRODUCER_EPOCH")
        if found.state.startswith("Prepare"):
            raise NotYet
        if found.state != OPEN:
            found.state, found.began_ms = OPEN, self.now_ms
        # A repeated batch has its sequence number and is not written twice.
        found.rows.extend(row for row in rows if row not in found.rows)
        found.offsets.update(offsets)
        return None

    def _end(self, name: str, producer: ProducerEpoch, commit: bool) -> ProducerEpoch | Refused:
        found = self.transactions.get(name)
        if found is None:
            return Refused("INVALID_PRODUCER_ID_MAPPING")
        complete = "CompleteCommit" if commit else "CompleteAbort"
        if found.ended_with == producer and found.state.startswith("Prepare"):
            raise NotYet
        if found.ended_with == producer and found.state == complete:
            return found.producer
        if found.producer != producer:
            return Refused("INVALID_PRODUCER_EPOCH")
        if found.state != OPEN and commit:
            return Refused("INVALID_TXN_STATE")
        found.ended_with = producer
        found.producer = self._next(producer)
        if commit:
            found.state = "PrepareCommit"
        else:
            found.rows, found.offsets, found.state = [], {}, "CompleteAbort"
        return found.producer

    def pending_markers(self) -> list[str]:
        """Ids whose commit is decided and not visible yet."""
        return [name for name, one in self.transactions.items() if one.state == "PrepareCommit"]

    def write_markers(self, name: str) -> None:
        """Makes a committed transaction visible."""
        found = self.transactions[name]
        self.visible.update(found.rows)
        self.offsets.update(found.offsets)
        found.rows, found.offsets, found.state = [], {}, "CompleteCommit"

    def open(self) -> list[str]:
        """Ids with an open transaction."""
        return [name for name, one in self.transactions.items() if one.state == OPEN]

    def replace_coordinator(self, group: str) -> None:
        """The group has another coordinator from now on, which the former one does not know yet."""
        self.former[group] = {key: text for key, text in self.offsets.items() if key.group == group}

    def _answers(self, group: str) -> dict[OffsetKey, str]:
        if group in self.former:
            return self.former[group]
        return {key: text for key, text in self.offsets.items() if key.group == group}

    def _fetch_stable(self, keys: tuple[OffsetKey, ...]) -> dict[OffsetKey, str]:
        current = [key for key in keys if key.group not in self.former]
        if any(key in one.offsets for one in self.transactions.values() for key in current):
            raise NotYet
        return {key: text for key in keys for text in [self._answers(key.group).get(key)] if text is not None}
