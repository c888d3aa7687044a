"""The judge of the frozen broker's benchmark: it must see what is lost, doubled and out of order."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from benchmarks import frozen_broker, paced_rows


def stored(*rows: tuple[int, int, int]) -> paced_rows.Stored:
    """(partition, task, number) in the order of appending."""
    by_partition = sorted(range(len(rows)), key=lambda place: rows[place][0])
    columns = np.array([(*rows[place], place) for place in by_partition], dtype=np.int64).T
    partition, task, number, appended = columns
    return paced_rows.Stored(partition, task, number, np.zeros_like(task), appended, np.zeros_like(task))


def counts(found: paced_rows.Stored) -> tuple[int, int, int]:
    return found.lost(4), found.doubled(), found.reordered()


def test_complete_rows_in_order_count_no_faults() -> None:
    # Tasks and partitions may interleave as they like.
    assert counts(stored((1, 0, 1), (0, 1, 0), (0, 0, 0), (1, 1, 1))) == (0, 0, 0)


def test_lost_doubled_and_reordered_rows_are_counted() -> None:
    assert counts(stored((0, 0, 0), (0, 0, 1), (0, 0, 2))) == (1, 0, 0)
    assert counts(stored((0, 0, 0), (0, 0, 1), (0, 0, 2), (1, 0, 2), (0, 0, 3))) == (0, 1, 0)
    assert counts(stored((0, 0, 0), (0, 0, 2), (0, 0, 1), (0, 0, 3))) == (0, 0, 1)
    # Two rows behind one that came too early.
    assert counts(stored((0, 0, 3), (0, 0, 1), (0, 0, 2), (1, 0, 0))) == (0, 0, 2)
    # A second copy is behind later rows without being out of order.
    assert counts(stored((0, 0, 0), (0, 0, 1), (0, 0, 0), (0, 0, 2), (0, 0, 3))) == (0, 1, 0)


def test_the_order_of_a_key_spans_partitions() -> None:
    later = paced_rows.KEYS
    found = stored((0, 0, later), (1, 0, 0), (1, 0, 1))
    assert found.reordered() == 0
    assert found.reordered_in_key() == 1


def test_rows_keep_their_pace_and_tell_who_they_are() -> None:
    source = paced_rows.paced(2_000, 0.2, True)
    import pyarrow as pa

    batches = list(source(iter([pa.record_batch({"id": pa.array([3], pa.int64())})])))
    values = [value for batch in batches for value in batch.column(1).to_pylist()]
    assert len(values) == 400
    assert all(len(value) == paced_rows.ROW_BYTES for value in values)
    layout = paced_rows.STAMP
    stamps = np.frombuffer(b"".join(v[: layout.itemsize] for v in values), layout)
    assert list(stamps["number"]) == list(range(400))
    assert set(stamps["task"]) == {3}
    assert 190 <= int(stamps["offered"][-1] - stamps["offered"][0]) <= 210
    assert len({key for batch in batches for key in batch.column(0).to_pylist()}) == 400


def test_rate_is_even_again_when_the_thawed_broker_takes_its_share_of_new_rows() -> None:
    run = SimpleNamespace(thawed=100.0, partitions=(0, 1, 2, 3))
    offered = np.arange(90.0, 120.0, 0.01)
    thirds = np.arange(len(offered)) % 3 == 0
    sick = thirds & (offered >= 103.0)
    # What waited arrives at once, and is no sign of an even share.
    late = offered < 100.0
    appended = np.where(late, 100.1, offered)
    again = frozen_broker.even_again_s(offered, appended, sick | late, run)  # type: ignore[arg-type]
    assert again is not None
    assert 2.0 < again < 3.0
    assert frozen_broker.even_again_s(offered, appended, late, run) is None  # type: ignore[arg-type]
