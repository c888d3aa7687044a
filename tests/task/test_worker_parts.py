"""The parts of a producer that outlive a task."""

from __future__ import annotations

from kafka_sink.options import parse
from kafka_sink.task.worker_parts import WorkerParts


def test_closed_parts_have_returned_all_memory_also_that_of_dead_letters() -> None:
    parts = WorkerParts(parse({"kafka.bootstrap.servers": "127.0.0.1:1"}).options)
    parts.sender.start()
    for allocator in (parts.allocator, parts.dead_letter_memory):
        buffer = allocator.try_open(1)
        assert buffer is not None
        buffer.release()
    pools = [parts.allocator.pool, parts.dead_letter_memory.pool]
    assert pools[0] is not pools[1]
    assert all(pool.metrics().allocated_bytes for pool in pools)
    parts.close(abort=False)
    assert [pool.metrics().allocated_bytes for pool in pools] == [0, 0]
    assert not parts.sender.is_alive()
