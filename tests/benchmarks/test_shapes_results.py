"""What the shapes' benchmark keeps of earlier runs."""

from __future__ import annotations

import json
from dataclasses import asdict

from benchmarks.throughput import Job
from benchmarks.throughput_shapes import CASES, OURS, Found, with_earlier


def found(index: int, rate: float) -> Found:
    return Found(CASES[index], {OURS: [Job(rate, 1.0, 1.0)]})


def test_a_run_of_single_cases_keeps_the_results_of_the_others() -> None:
    """Catches: results of a run in parts that hold its last part only."""
    assert with_earlier([found(2, 1.0)], []) == [asdict(found(2, 1.0))]
    earlier = json.loads(json.dumps([asdict(found(0, 1.0)), asdict(found(2, 1.0))]))
    shown = with_earlier([found(2, 3.0), found(1, 2.0)], earlier)
    assert [one["case"]["name"] for one in shown] == [case.name for case in CASES[:3]]
    assert [one["jobs"][OURS][0]["rows_per_s"] for one in shown] == [1.0, 2.0, 3.0]
