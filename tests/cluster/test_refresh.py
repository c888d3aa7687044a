"""The heap of deadlines against sorting."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from kafka_sink.cluster.refresh import DeadlineHeap
from tests.support.footprint import held_bytes

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from("abcdef"), st.integers(0, 9)),
        st.tuples(st.just("drop"), st.sampled_from("abcdef"), st.just(0)),
        st.tuples(st.just("until"), st.just(""), st.integers(0, 9)),
        st.tuples(st.just("take"), st.just(""), st.integers(0, 3)),
    ),
    max_size=200,
)


@settings(deadline=None)
@given(STEPS)
def test_deadline_heap_returns_names_in_sorted_order(steps: list[tuple[str, str, int]]) -> None:
    table, model = DeadlineHeap(), dict[str, float]()
    for kind, name, number in steps:
        if kind == "put":
            table.put(name, number)
            model[name] = number
        elif kind == "drop":
            table.drop(name)
            model.pop(name, None)
        else:
            ordered = sorted((at, one) for one, at in model.items())
            if kind == "until":
                ordered = [entry for entry in ordered if entry[0] <= number]
                taken = table.pop(number)
            else:
                ordered = ordered[:number]
                taken = table.pop(limit=number)
            assert taken == [(one, at) for at, one in ordered]
            for _, one in ordered:
                del model[one]
        assert table.earliest_ms() == min(model.values(), default=math.inf)
        assert len(table) == len(model)


def test_deadline_heap_does_not_grow_when_a_name_is_moved_often() -> None:
    table = DeadlineHeap()
    for at in range(100_000):
        table.put("a", float(at))
    assert held_bytes(table) < 100 * 200
    assert table.pop(limit=5) == [("a", 99_999.0)]
