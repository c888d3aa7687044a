"""Keeps the producers of a worker process between tasks.

Spark reuses workers for several tasks and micro-batches. A producer with the same options is reused as well,
so its connections, metadata and producer id survive. A task that fails discards its producer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from kafka_sink.cluster.topic_state import MetadataSnapshot
from kafka_sink.coordinator.address import CoordinatorAddress
from kafka_sink.coordinator.live.messages import TaskIdentity
from kafka_sink.options import SinkOptions
from kafka_sink.process_entries import ProcessEntries
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.task.producer import NO_TASK, Producer

_CACHED_PRODUCERS = 4


class ProducerCache:
    """The idle producers of this process. The least recently used one is dropped first."""

    def __init__(self) -> None:
        # Without the lock, a producer could be handed to two threads.
        self._idle = ProcessEntries(OrderedDict[SinkOptions, Producer]())

    def take(self, options: SinkOptions, *, new: bool = False) -> Producer:
        """Return an idle producer with these options, or a new one. With ``new``, always a new one."""
        with self._idle.lock:
            producer = self._idle.entries.pop(options, None)
        if producer is not None and producer.is_reusable and not new:
            return producer
        if producer is not None:
            # The caller wants a new producer, or the sender of this one ended while it was idle.
            producer.close()
        return Producer(options)

    def put_back(self, producer: Producer) -> None:
        """Keep a healthy producer for the next task with the same options; close any other producer."""
        if not producer.is_reusable:
            producer.close()
            return
        producer.go_idle()
        with self._idle.lock:
            idle = self._idle.entries
            replaced = idle.pop(producer.options, None)
            idle[producer.options] = producer
            dropped = [replaced] if replaced is not None else []
            while len(idle) > _CACHED_PRODUCERS:
                dropped.append(idle.popitem(last=False)[1])
        for old in dropped:
            old.close()

    def close(self) -> None:
        with self._idle.lock:
            idle = list(self._idle.entries.values())
            self._idle.entries.clear()
        for producer in idle:
            producer.close()


PRODUCERS = ProducerCache()


@contextmanager
def task_producer(
    options: SinkOptions,
    plan: ColumnPlan,
    coordinator: CoordinatorAddress | None = None,
    snapshot: MetadataSnapshot | None = None,
    *,
    task: TaskIdentity = NO_TASK,
    tasks_at_once: int = 1,
    again: bool = False,
) -> Iterator[Producer]:
    """A producer for one task, whose columns ``plan`` describes.

    An exception inside the context discards the producer with everything that was not acknowledged. The task
    shares metadata and mutes through ``coordinator``. For ``snapshot``, ``task`` and ``tasks_at_once`` see
    ``Producer.begin``. ``again`` means that an earlier attempt of the task failed. The task then gets a new
    producer, because an idle one may have the same wrong metadata, as after a cluster was replaced.
    """
    # One producer serves all topics, and options that only planning reads must not lead to another producer.
    producer = PRODUCERS.take(options.for_tasks(), new=again)
    try:
        producer.begin(coordinator, snapshot, task, tasks_at_once)
        producer.plan = plan
        yield producer
    except BaseException:
        producer.close(abort=True)
        raise
    PRODUCERS.put_back(producer)
