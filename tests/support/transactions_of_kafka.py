"""Kafka's transactions as values: transaction protocols 1 and 2, with markers that take their time.

Brokers exist only as former coordinators, which answer from memory until they learn that other brokers took
their place. Left out: failures of brokers (an operation is repeated until its response is there).
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kafka_sink.transactions.operations import (
    NO_TRANSACTION,
    OPEN,
    Describe,
    Described,
    EndTransaction,
    Failed,
    FetchOffsets,
    FetchStableOffsets,
    InitProducer,
    ListOpen,
    LookUp,
    OffsetKey,
    ProducerEpoch,
    RecordOffsets,
)

Row = tuple[int, int]


@dataclass(frozen=True)
class Produce:
    """A task's rows; response: whether Kafka took them."""

    transactional_id: str
    producer: ProducerEpoch
    rows: tuple[Row, ...]


@dataclass(frozen=True)
class RaiseEpoch:
    """The request that the client sends after an EndTxn with protocol 1; its response is the next epoch."""

    transactional_id: str
    producer: ProducerEpoch


class NotYet(Exception):
    """Kafka responds so that the request is repeated: CONCURRENT_TRANSACTIONS, UNSTABLE_OFFSET_COMMIT."""


@dataclass
class Transaction:
    producer: ProducerEpoch
    state: str = "Empty"
    # The epoch with which the last transaction was ended, which a repeated EndTxn carries.
    ended_with: ProducerEpoch | None = None
    # The epoch from which its owner has raised it, by a request that named that epoch (KIP-360).
    raised_from: ProducerEpoch | None = None
    # Rows written under the present epoch: copies of them are not written.
    written: set[Row] = field(default_factory=set)
    rows: list[Row] = field(default_factory=list)
    offsets: dict[OffsetKey, str] = field(default_factory=dict)
    # Committed, and not reported yet by a group's coordinator that takes its time.
    late_offsets: dict[OffsetKey, str] = field(default_factory=dict)
    began_ms: int = -1
    # The value of Kafka.inits when it was last taken over.
    taken: int = 0


class Kafka:
    """Executes operations; ``visible`` counts the rows that readers of committed rows see."""

    def __init__(self, last_epoch: int = 32_766, protocol: int = 2, *, delays_offsets: bool = False) -> None:
        # The protocol that the next client speaks.
        self.protocol = protocol
        # Whether offsets are reported some time after their transaction is over, as by brokers of Kafka 3.
        self._delays_offsets = delays_offsets
        # After this epoch an id gets another producer id.
        self._last_epoch = last_epoch
        self.transactions: dict[str, Transaction] = {}
        self.offsets: dict[OffsetKey, str] = {}
        self.visible: Counter[Row] = Counter()
        self._producer_ids = 0
        # Answers of former coordinators of groups, which have not learnt that other brokers took their place.
        self.former: dict[str, dict[OffsetKey, str]] = {}
        # Answers of former coordinators of transactional ids.
        self.former_ids: dict[str, Transaction] = {}
        # The number of times that ids were taken over.
        self.inits = 0
        # The brokers' clock.
        self.now_ms = 0

    def execute(self, operation: Any) -> Any:
        """The operation's response. Raises NotYet."""
        response, follows = self.send(operation)
        return response if follows is None else self.execute(follows)

    def send(self, operation: Any) -> tuple[Any, RaiseEpoch | None]:
        """Execute only an operation's first request, and return the request that follows it: under protocol 1
        the client raises the epoch after most ends, once the markers are written."""
        match operation:
            case EndTransaction(name, producer, commit, afresh, of_task):
                if afresh:
                    self._find_again(name)
                ended = self.end_txn(name, producer, commit)
                follows = self.protocol == 1 and not isinstance(ended, Failed) and not (of_task and commit)
                return ended, RaiseEpoch(name, producer) if follows else None
            case RaiseEpoch(name, producer):
                raised = self.raise_epoch(name, producer)
                return producer if isinstance(raised, Failed) else raised, None
        return self._answer(operation), None

    def _answer(self, operation: Any) -> Any:
        match operation:
            case InitProducer(name, of):
                return self.init(name) if of is None else self.raise_epoch(name, of)
            case Describe(names, afresh, once_ended):
                if afresh:
                    self._find_again(*names)
                if once_ended and set(names) & set(self.pending_markers()):
                    raise NotYet
                return self.describe(names)
            case ListOpen(prefix):
                # All brokers are asked.
                named = [*self.transactions.items(), *self.former_ids.items()]
                states = (OPEN,) if self.protocol == 1 else (OPEN, NO_TRANSACTION)
                live = [name for name, one in named if one.state in states]
                return list(dict.fromkeys(name for name in live if name.startswith(f"{prefix}-task-")))
            case Produce(name, producer, rows):
                return self.write(name, producer, rows, {}) is None
            case RecordOffsets(name, producer, group, entries):
                # A former coordinator cannot take them, and the client looks for the present one.
                self.former.pop(group, None)
                offsets = {OffsetKey(group, partition): text for partition, text in entries}
                return self.write(name, producer, (), offsets)
            case FetchOffsets(groups, keys):
                known = {key.group for key in keys}.union(groups)
                found = {key: text for group in known for key, text in self.answers(group).items()}
                return {key: text for key, text in found.items() if not keys or key in keys}
            case LookUp():
                return None
            case FetchStableOffsets(keys):
                return self.fetch_stable(keys)
        raise AssertionError(operation)

    def describe(self, names: tuple[str, ...]) -> dict[str, Described]:
        known = {**self.transactions, **self.former_ids}
        return {
            name: Described(
                known[name].state,
                known[name].producer,
                known[name].began_ms,
                ends_raise_epoch=self.protocol == 2,
            )
            for name in names
            if name in known and known[name].producer.epoch >= 0
        }

    def _find_again(self, *names: str) -> None:
        for name in names:
            self.former_ids.pop(name, None)

    def init(self, name: str) -> ProducerEpoch:
        # Only the present coordinator can take an id over.
        self._find_again(name)
        found = self.transactions.get(name)
        if found is None:
            self._producer_ids += 1
            found = self.transactions[name] = Transaction(ProducerEpoch(self._producer_ids, -1))
        if found.state.startswith("Prepare"):
            raise NotYet
        if found.state == OPEN:
            self.time_out(name)
        self._begin_epoch(found)
        self.inits += 1
        found.taken = self.inits
        return found.producer

    def raise_epoch(self, name: str, of: ProducerEpoch) -> ProducerEpoch | Failed:
        """InitProducerId that names an epoch: once, or again."""
        self._find_again(name)
        found = self.transactions.get(name)
        if found is None:
            return self.init(name)
        if of.producer_id not in (found.producer.producer_id, (found.raised_from or of).producer_id):
            return Failed("PRODUCER_FENCED")
        if found.state.startswith("Prepare"):
            raise NotYet
        if found.state == OPEN:
            # It does not matter who has it open: brokers compare epochs after that.
            self.time_out(name)
        if of != found.producer and found.producer.epoch == self._last_epoch:
            # Brokers fail here, whoever has raised the epoch, and so does the request.
            return Failed("UNKNOWN_SERVER_ERROR")
        if of not in (found.producer, found.raised_from):
            return Failed("PRODUCER_FENCED")
        if of == found.producer:
            self._begin_epoch(found)
            found.raised_from = of
            self.inits += 1
            found.taken = self.inits
        return found.producer

    def _begin_epoch(self, found: Transaction) -> None:
        found.producer = self._next(found.producer)
        found.state, found.ended_with, found.raised_from = NO_TRANSACTION, None, None
        found.written = set()

    def _next(self, producer: ProducerEpoch) -> ProducerEpoch:
        if producer.epoch < self._last_epoch:
            return ProducerEpoch(producer.producer_id, producer.epoch + 1)
        self._producer_ids += 1
        return ProducerEpoch(self._producer_ids, 0)

    def time_out(self, name: str) -> None:
        """Abort the transaction, under an epoch that no client has seen, as transaction.timeout.ms has
        passed."""
        found = self.transactions[name]
        found.rows, found.offsets = [], {}
        self._begin_epoch(found)
        found.state = "CompleteAbort"

    def write(
        self, name: str, producer: ProducerEpoch, rows: tuple[Row, ...], offsets: dict[OffsetKey, str]
    ) -> Failed | None:
        found = self.transactions.get(name)
        is_ending = found is not None and found.state.startswith("Prepare") and found.ended_with == producer
        # With protocol 1 the group is first added to the transaction, which is refused meanwhile.
        is_ending &= self.protocol == 2
        if found is not None and is_ending and offsets.keys() & found.offsets.keys():
            # A partition that has not got the marker yet takes it into the transaction that is being ended.
            found.offsets.update(offsets)
            return None
        if found is None or found.producer != producer:
            return Failed("INVALID_PRODUCER_EPOCH")
        if found.state.startswith("Prepare"):
            raise NotYet
        if found.state != OPEN:
            found.state, found.began_ms = OPEN, self.now_ms
        # A repeated batch has its sequence number and is not written twice.
        found.rows.extend(row for row in rows if row not in found.written)
        found.written.update(rows)
        found.offsets.update(offsets)
        return None

    def end_txn(self, name: str, producer: ProducerEpoch, commit: bool) -> ProducerEpoch | Failed:
        former = self.former_ids.get(name)
        if former is not None:
            remembered = self._end_of(copy.deepcopy(former), producer, commit)
            if isinstance(remembered, Failed) or former.ended_with == producer:
                return remembered
            # The coordinator would have to append to its log, which it cannot.
            self._find_again(name)
        return self._end_of(self.transactions.get(name), producer, commit)

    def _end_of(
        self, found: Transaction | None, producer: ProducerEpoch, commit: bool
    ) -> ProducerEpoch | Failed:
        if found is None:
            return Failed("INVALID_PRODUCER_ID_MAPPING")
        complete = "CompleteCommit" if commit else "CompleteAbort"
        if found.state.startswith("Prepare") and producer in (found.ended_with, found.producer):
            if not commit:
                return Failed("INVALID_TXN_STATE")
            raise NotYet
        if found.ended_with == producer and found.state == complete:
            return found.producer
        if found.producer != producer:
            return Failed("INVALID_PRODUCER_EPOCH")
        if found.state != OPEN and (commit or self.protocol == 1):
            return Failed("INVALID_TXN_STATE")
        found.ended_with = producer
        if self.protocol == 2:
            found.producer, found.raised_from = self._next(producer), producer
            found.written = set()
        if commit:
            found.state = "PrepareCommit"
        else:
            found.rows, found.offsets, found.state = [], {}, "CompleteAbort"
        return found.producer

    def pending_markers(self) -> list[str]:
        return [name for name, one in self.transactions.items() if one.state == "PrepareCommit"]

    def write_markers(self, name: str) -> None:
        found = self.transactions[name]
        self.tell_offsets(name)
        self.visible.update(found.rows)
        found.late_offsets = dict(found.offsets)
        found.rows, found.offsets, found.state = [], {}, "CompleteCommit"
        if not self._delays_offsets:
            self.tell_offsets(name)

    def late_offsets(self) -> list[str]:
        """Ids whose commit is over, and whose offsets are not reported yet."""
        return [name for name, one in self.transactions.items() if one.late_offsets]

    def tell_offsets(self, name: str) -> None:
        found = self.transactions[name]
        self.offsets.update(found.late_offsets)
        found.late_offsets = {}

    def open(self) -> list[str]:
        return [name for name, one in self.transactions.items() if one.state == OPEN]

    def replace_coordinator(self, group: str) -> Callable[[], None]:
        """The group has another coordinator from now on, which the former one does not know yet. Returns what
        has the former one answer once more, after it was found out."""
        known = {key: text for key, text in self.offsets.items() if key.group == group}
        self.former[group] = known
        return lambda: self.former.update({group: known})

    def replace_coordinator_of_id(self, name: str) -> Callable[[], None]:
        """Replace a transactional id's coordinator, as ``replace_coordinator`` does; the id may be new."""
        known = self.transactions.get(name, Transaction(ProducerEpoch(-1, -1), "Dead"))
        known = self.former_ids[name] = copy.deepcopy(known)
        return lambda: self.former_ids.update({name: known})

    def expire_offsets(self, family: str) -> None:
        """offsets.retention.minutes has passed for the offsets of these groups, whose names begin so."""
        for name in self.late_offsets():
            self.tell_offsets(name)
        self.offsets = {
            key: text
            for key, text in self.offsets.items()
            if key.group != family and not key.group.startswith(f"{family}-")
        }

    def expire_ids(self) -> None:
        """transactional.id.expiration.ms has passed for ids without a transaction."""
        self.transactions = {
            name: one for name, one in self.transactions.items() if one.state in (OPEN, "PrepareCommit")
        }

    def answers(self, group: str) -> dict[OffsetKey, str]:
        if group in self.former:
            return self.former[group]
        return {key: text for key, text in self.offsets.items() if key.group == group}

    def fetch_stable(self, keys: tuple[OffsetKey, ...]) -> dict[OffsetKey, str | None]:
        current = [key for key in keys if key.group not in self.former]
        pending = {key for one in self.transactions.values() for key in current if key in one.offsets}
        if any(key in one.late_offsets for one in self.transactions.values() for key in current) or any(
            one.state == "PrepareCommit" for one in self.transactions.values() if pending & set(one.offsets)
        ):
            # Soon they are not, and the client waits for it.
            raise NotYet
        answers = {key: None if key in pending else self.answers(key.group).get(key) for key in keys}
        return {key: text for key, text in answers.items() if text is not None or key in pending}
