"""ProducerBatch: one record batch, from its first row to its final state."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from enum import Enum

from kafka_sink.cluster.partition import Partition
from kafka_sink.cluster.topic_limits import SAFETY, projected_size
from kafka_sink.errors import IllegalTransitionError
from kafka_sink.memory.buffer import Memory
from kafka_sink.model import CompressionType, TopicPartition
from kafka_sink.records import batch_header
from kafka_sink.records.batch_header import NO_SEQUENCE, ProducerSequence
from kafka_sink.records.compression import BlockCodec, WholeCodec
from kafka_sink.records.encoder import Records


class BatchState(Enum):
    """The states of a batch. ``TRANSITIONS`` lists the legal moves."""

    OPEN = "open"  # takes rows
    CLOSED = "closed"  # takes no more rows, not yet compressed
    SEALED = "sealed"  # its bytes are final except the header; it waits to be sent (again)
    IN_FLIGHT = "in flight"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    SPLIT = "split"  # its records live on in smaller batches

    # Enum's own hash is a Python function, which took 2 of the 45 us that a batch of a few rows costs.
    __hash__ = object.__hash__


TRANSITIONS: dict[BatchState, frozenset[BatchState]] = {
    BatchState.OPEN: frozenset({BatchState.CLOSED, BatchState.FAILED}),
    BatchState.CLOSED: frozenset({BatchState.SEALED, BatchState.FAILED}),
    BatchState.SEALED: frozenset({BatchState.IN_FLIGHT, BatchState.FAILED, BatchState.SPLIT}),
    BatchState.IN_FLIGHT: frozenset(
        {BatchState.SEALED, BatchState.SUCCEEDED, BatchState.FAILED, BatchState.SPLIT}
    ),
    # A response after a failure is late, which is legal and changes nothing. After a success it is a bug.
    BatchState.FAILED: frozenset(
        {BatchState.FAILED, BatchState.SUCCEEDED, BatchState.SEALED, BatchState.SPLIT}
    ),
    BatchState.SUCCEEDED: frozenset(),
    BatchState.SPLIT: frozenset(),
}
_ordinals = itertools.count()
_NO_HEADER = bytes(batch_header.SIZE)
TERMINAL = frozenset({BatchState.SUCCEEDED, BatchState.FAILED, BatchState.SPLIT})


@dataclass(slots=True, eq=False)
class ProducerBatch:
    """Rows of one partition that are sent as one record batch of Kafka's format V2.

    The buffer contains [header][body][raw tail]. With a block codec the body is compressed, and the tail is
    at most one block. With a whole-batch codec everything is tail until the batch is sealed. Without
    compression body and tail are the same.

    Which attributes may go together:

    - OPEN, CLOSED: the batch may be held. Only the task's thread uses a held batch. If it is not held, the
      task may take hold of it while it is open, and the sender may take or fail it. If an exception ends an
      append pass, its batches stay held, because they may lack rows; only
      RecordAccumulator.abort_incomplete lets them go.
    - SEALED: the batch is held until the task lets it go. Then the sender may take it, with or without a
      sequence.
    - IN_FLIGHT: the header has the batch's sequence, and one request refers to its memory.
    - SUCCEEDED, FAILED, SPLIT: the memory is released once no request refers to it.

    The sequence of the idempotent producer (NO_SEQUENCE without idempotence) is

    - not assigned until the first attempt, or, for a piece, until its parent is split;
    - then assigned: while no request is in flight, it may be replaced (KIP-360);
    - and fixed once ``possibly_written`` is true: a request has failed, but the broker may have carried it
      out. From then on neither the sequence nor the rows change.
    """

    # The partition in whose queue it waits, and to which it goes back after a failed attempt.
    queue: Partition
    buffer: Memory
    codec: BlockCodec | WholeCodec | None
    compression: CompressionType
    # The expected compression ratio. It is fixed when the batch opens, so that the end of a batch depends
    # only on the rows before it.
    ratio: float
    base_timestamp: int
    created_ms: float
    # Whether all rows may go to any partition of the topic, because neither a key nor a column chose this
    # one.
    is_movable: bool = False
    # Whether the records are dead letters, which do not count as rows of the task.
    dead_letters: bool = False
    # Whether the task's thread has it: see the class. The task sets and clears it under the accumulator's
    # lock. Without it the sender could send the batch while rows are written into it.
    held: bool = False
    state: BatchState = field(init=False, default=BatchState.OPEN)
    # The topic and partition number of ``queue``.
    topic_partition: TopicPartition = field(init=False)
    # The append order within the partition, which retries keep. A piece's ordinal extends its parent's.
    ordinal: tuple[int, ...] = field(init=False)
    max_timestamp: int = field(init=False)
    record_count: int = field(init=False, default=0)
    raw_bytes: int = field(init=False, default=0)
    attempts: int = field(init=False, default=0)
    # Whether its rows were in a request, perhaps as part of the batch that this one is a piece of.
    was_sent: bool = field(init=False, default=False)
    # Failed attempts that count against ``retries``. An attempt that failed only because of an earlier batch
    # does not count.
    retries_spent: int = field(init=False, default=0)
    # True from when the sender takes the batch out of its queue until no request refers to its memory. Only
    # ``Partition.take`` and ``Partition.give_back`` write it, under the accumulator's lock. Without it the
    # memory of a batch that expires could be reused while the socket still reads it.
    in_request: bool = field(init=False, default=False)
    last_error: Exception | None = field(init=False, default=None)
    # The producer's id and epoch and the base sequence.
    sequence: ProducerSequence = field(init=False, default=NO_SEQUENCE)
    # Whether the broker may have written it, although no response confirms it. Neither the sequence nor the
    # rows change from then on.
    possibly_written: bool = field(init=False, default=False)
    # The sequence in the buffer's header; None before the header is written.
    _header_sequence: ProducerSequence | None = field(init=False, default=None)
    # The codec, if it compresses blocks while the batch fills.
    _blocks: BlockCodec | None = field(init=False, default=None)
    _tail_at: int = field(init=False)

    def __post_init__(self) -> None:
        self.topic_partition = self.queue.id
        self.ordinal = (next(_ordinals),)
        self.max_timestamp = self.base_timestamp
        self.buffer.write_growing(_NO_HEADER)
        if isinstance(self.codec, BlockCodec):
            self._blocks = self.codec
            self.buffer.write_growing(self.codec.prologue)
        self._tail_at = self.buffer.size

    # -- filling: the task's thread, outside the lock -------------------------------------------

    def append(self, records: Records, count: int, max_timestamp: int) -> None:
        """Add ``count`` encoded records. The append pass has reserved room and memory for them.

        Raises IllegalTransitionError if the batch is not held.
        """
        if not self.held:
            raise IllegalTransitionError(
                f"append to a batch of {self.topic_partition} that is {self.state.value}"
            )
        blocks = self._blocks
        if blocks is None:
            self.buffer.write_growing(records[:])
        else:
            self._append_blocks(blocks, records)
        self.raw_bytes += len(records)
        self.record_count += count
        self.max_timestamp = max(self.max_timestamp, max_timestamp)

    def _append_blocks(self, codec: BlockCodec, records: Records) -> None:
        """Compress every block that becomes full and keep the rest raw. Blocks end at fixed raw offsets."""
        size = codec.block_size
        tail = self.buffer.size - self._tail_at
        if tail + len(records) >= size:
            first = size - tail if tail else 0
            packed: list[bytes | memoryview] = []
            if tail:
                packed += codec.compress_block(b"".join([*self.buffer.views(self._tail_at), records[:first]]))
            for at in range(first, len(records) - size + 1, size):
                packed += codec.compress_block(records[at : at + size])
            records = records[len(records) - (tail + len(records)) % size :]
            self.buffer.truncate(self._tail_at)
            # Blocks end in the middle of chunks, so one write of all blocks costs less than one for each.
            self.buffer.write_growing(b"".join(packed))
            self._tail_at = self.buffer.size
        if len(records):
            self.buffer.write_growing(records[:])

    def seal(self) -> None:
        """Compress the raw tail and return unused memory. The thread that closed the batch calls it."""
        if self.state is not BatchState.CLOSED:
            raise IllegalTransitionError(f"seal a batch of {self.topic_partition} that is {self.state.value}")
        if self.codec is not None:
            tail = b"".join(self.buffer.views(self._tail_at))
            self.buffer.truncate(self._tail_at)
            if isinstance(self.codec, WholeCodec):
                self.buffer.write_growing(self.codec.compress(tail))
            else:
                block = self.codec.compress_block(tail) if tail else ()
                self.buffer.write_growing(b"".join((*block, self.codec.epilogue)))
        self.buffer.trim()
        self.move_to(BatchState.SEALED)

    # -- the header and its sequence: the sender's thread -----------------------------------------

    def assign_sequence(self, sequence: ProducerSequence) -> None:
        """Give the batch its sequence. Raises IllegalTransitionError if it has one."""
        if self.sequence is not NO_SEQUENCE:
            raise IllegalTransitionError(
                f"a batch of {self.topic_partition} has the sequence {self.sequence}"
            )
        self.sequence = sequence

    def withdraw_sequence(self) -> None:
        """Take the sequence back, for another one. Raises IllegalTransitionError if it is fixed."""
        if self.possibly_written or self.in_request:
            raise IllegalTransitionError(f"the sequence {self.sequence} of {self.topic_partition} is in use")
        self.sequence = NO_SEQUENCE

    def write_header(self, *, transactional: bool = False) -> list[memoryview]:
        """Write the header into its reserved place, unless a header with this sequence is already there.

        Returns the bytes of the whole batch.
        """
        views = self.buffer.views()
        if self._header_sequence == self.sequence:
            return views
        header = bytearray()
        if len(views[0]) < batch_header.SIZE:
            # The header crosses two chunks: a piece of a split batch may begin near the end of a chunk.
            header += bytes(batch_header.SIZE)
        batch_header.write(
            [memoryview(header), *self.buffer.views(batch_header.SIZE)] if header else views,
            self.buffer.size,
            self.compression | batch_header.TRANSACTIONAL if transactional else self.compression,
            self.record_count,
            self.base_timestamp,
            self.max_timestamp,
            self.sequence,
        )
        if header:
            self.buffer.patch(header)
        self._header_sequence = self.sequence
        return views

    # -- sizes ----------------------------------------------------------------------------------

    @property
    def rows(self) -> int:
        """The number of records that are rows of the task."""
        return 0 if self.dead_letters else self.record_count

    @property
    def size(self) -> int:
        """The bytes written so far. Once the batch is sealed, these are its bytes on the wire."""
        return self.buffer.size

    @property
    def estimated_size(self) -> int:
        """The bytes on the wire, which are estimated until the batch is sealed (estimatedSizeInBytes in
        Kafka)."""
        if self.codec is None or self.state not in (BatchState.OPEN, BatchState.CLOSED):
            return self.buffer.size
        return batch_header.SIZE + int(self.raw_bytes * min(1.0, self.ratio * SAFETY))

    def projected_size_with(self, added: int) -> int:
        """The bytes that header, body and raw tail are expected to have after ``added`` more raw bytes."""
        size, blocks = self.buffer.size, self._blocks
        if blocks is None:
            return size + added
        return projected_size(blocks, self.ratio, self._tail_at, size - self._tail_at + added)

    def raw_bytes_within(self, limit: int) -> int:
        """The number of raw bytes for which ``projected_size_with`` surely stays within ``limit``. It may be
        negative."""
        blocks, tail = self._blocks, self.buffer.size - self._tail_at
        remaining = limit - projected_size(blocks, self.ratio, self._tail_at, 0) - tail
        if blocks is None:
            return remaining
        # Full blocks shrink, but the last block stays raw.
        size = blocks.block_size
        packed = int(size * min(1.0, self.ratio * SAFETY)) + blocks.block_overhead
        return max(remaining, (remaining + tail - size) // packed * size - tail)

    @property
    def observed_ratio(self) -> float:
        """Compressed bytes per raw byte of a sealed batch."""
        return (self.buffer.size - batch_header.SIZE) / self.raw_bytes if self.raw_bytes else 1.0

    # -- states ---------------------------------------------------------------------------------

    def move_to(self, state: BatchState) -> bool:
        """Change the state. Return False if the move is legal but late: then nothing changes.

        Raises IllegalTransitionError and changes nothing if the move is not in the table.
        """
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransitionError(
                f"a batch of {self.topic_partition} cannot go from {self.state.value} to {state.value}"
            )
        if self.state is BatchState.FAILED:
            return False
        self.state = state
        return True

    @property
    def can_move(self) -> bool:
        """Whether the batch may go to another partition: its rows may go to any, and it was surely not
        written. A batch with a sequence has its place among the other batches of the partition."""
        return self.is_movable and not self.possibly_written and self.sequence is NO_SEQUENCE

    def move_to_partition(self, queue: Partition) -> None:
        """Append the batch anew to another partition. Its bytes do not contain the partition, so they stay.

        Raises IllegalTransitionError if the batch may not move or its task writes into it.
        """
        if not self.can_move or self.held or self.terminal:
            raise IllegalTransitionError(
                f"a batch of {self.topic_partition} that is {self.state.value} cannot move"
            )
        self.queue = queue
        self.topic_partition = queue.id
        self.ordinal = (next(_ordinals),)

    @property
    def terminal(self) -> bool:
        return self.state in TERMINAL


def open_batch_of(partition: Partition) -> ProducerBatch | None:
    """The batch of the partition that still takes rows, if there is one. The caller holds the accumulator's
    lock."""
    tail = partition.batches[-1] if partition.batches else None
    return tail if tail is not None and tail.state is BatchState.OPEN else None
