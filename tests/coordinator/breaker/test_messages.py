"""The breaker's messages: what goes in comes out."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from kafka_sink.breaker.states import ProbeLease
from kafka_sink.coordinator.breaker.messages import (
    BreakerReport,
    BreakerUpdate,
    MuteReport,
    OutcomeCounts,
    TaskVotes,
    Terms,
    UnmuteReport,
    decode_report,
    decode_update,
    encode_report,
    encode_update,
)
from kafka_sink.model import TopicPartition

INTERVAL = 2_000.0


TARGETS = st.one_of(st.integers(0, 99), st.builds(TopicPartition, st.text(max_size=20), st.integers(0, 99)))
TEXT = st.text(max_size=20)
MS = st.floats(0, 1e9)
TASKS = st.integers(1, 500)
VOTES = st.builds(lambda tasks, failing: TaskVotes(tasks + failing, failing, 2 * failing), TASKS, TASKS)
REPORTS = st.builds(
    BreakerReport,
    st.dictionaries(st.integers(0, 99), MS),
    st.integers(0, 1 << 40),
    st.lists(
        st.builds(
            OutcomeCounts,
            st.builds(TopicPartition, TEXT, st.integers(0, 99)),
            st.integers(0, 1 << 40),
            st.integers(0, 1 << 40),
            st.booleans(),
            TEXT,
            st.none() | VOTES,
        )
    ).map(tuple),
    st.lists(
        st.builds(MuteReport, TARGETS, TEXT, MS)
        | st.builds(MuteReport, TARGETS, TEXT, MS, TASKS, st.booleans())
    ).map(tuple),
    st.lists(st.builds(UnmuteReport, TARGETS, TEXT, st.integers(0, 500))).map(tuple),
    st.lists(st.tuples(TARGETS, TEXT)).map(tuple),
    st.lists(TARGETS).map(tuple),
    st.lists(TARGETS).map(tuple),
    st.booleans(),
    st.none() | st.text(min_size=1, max_size=20),
    st.just({}),
    st.none() | TASKS,
)


@given(REPORTS, st.integers(1, 500))
def test_reports_survive_encoding(report: BreakerReport, task: int) -> None:
    half = dict.fromkeys(list(report.responses)[::2], task)
    for one in (report, replace(report, responders=half)):
        assert decode_report(json.loads(json.dumps(encode_report(one)))) == one


@given(
    st.builds(
        BreakerUpdate,
        st.booleans(),
        st.dictionaries(TARGETS, TEXT),
        st.lists(TARGETS).map(tuple),
        MS,
        st.dictionaries(TARGETS, st.builds(ProbeLease, MS, st.booleans())),
        st.lists(TARGETS).map(tuple),
        st.none() | st.builds(Terms, st.integers(0, 100), MS),
        st.just(math.inf) | MS.filter(bool),
    )
)
def test_updates_survive_encoding(update: BreakerUpdate) -> None:
    assert decode_update(json.loads(json.dumps(encode_update(update))), 100) == update


def test_long_errors_are_cut() -> None:
    report = decode_report(encode_report(BreakerReport(muted=(MuteReport(1, "x" * 1_000),))))
    assert len(report.muted[0].reason) == 300
