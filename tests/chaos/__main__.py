"""``python -m tests.chaos --rounds 100 --seed 1``: many rounds, a line for each, and what they came to."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from local_kafka import LocalBroker
from tests.chaos.rounds import RoundReport, run_round
from tests.chaos.schedule import Fault, described, draw, fault_of_round
from tests.support.broker_settings import SHORT_SESSIONS


def main() -> int:
    """0 where no invariant broke."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1, help="of the first round; the next ones follow")
    parser.add_argument("--minutes", type=float, default=0, help="start no further round after that long")
    parser.add_argument("--json", type=Path, help="add a line for every round to this file")
    arguments = parser.parse_args()
    reports: list[RoundReport] = []
    began = time.monotonic()
    with LocalBroker(brokers=3, properties=SHORT_SESSIONS) as cluster:
        for seed in range(arguments.seed, arguments.seed + arguments.rounds):
            if arguments.minutes and time.monotonic() - began > arguments.minutes * 60:
                break
            schedule = draw(seed, fault_of_round(seed))
            report = run_round(cluster, schedule, f"chaos-{seed}")
            reports.append(report)
            events = described(schedule.brokers + schedule.wire)
            print(f"seed {seed} [{events}] {report}", flush=True)
            for cause, count in report.failures.items():
                print(f"    {count} attempts failed{' (strict)' * schedule.strict}: {cause}", flush=True)
            if arguments.json:
                with arguments.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(facts(report)) + "\n")
    print(summary([facts(report) for report in reports], time.monotonic() - began))
    return 1 if any(report.violations for report in reports) else 0


def facts(report: RoundReport) -> dict[str, Any]:
    """A round as plain values."""
    return {
        "seed": report.schedule.seed,
        "rows": report.rows,
        "attempts": report.attempts,
        "failed": sum(report.failures.values()),
        "strict": report.schedule.strict,
        "requests": report.requests,
        "retries": report.retries,
        "faults": {fault.name: count for fault, count in report.faults.items()},
        "seconds": round(report.seconds, 2),
        "violations": {kind.name: count for kind, count in report.violations.counts.items()},
    }


def summary(rounds: list[dict[str, Any]], wall_s: float) -> str:
    """What all rounds came to, with the conditions."""
    totals: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for one in rounds:
        totals.update({name: one[name] for name in ("rows", "attempts", "failed", "requests", "retries")})
        totals["broken"] += bool(one["violations"])
        totals["failed_at_ease"] += 0 if one["strict"] else one["failed"]
        faults.update(one["faults"])
    seconds = sum(one["seconds"] for one in rounds)
    by_kind = ", ".join(f"{faults[fault.name]} x {fault.value}" for fault in Fault if faults[fault.name])
    return (
        f"{len(rounds)} rounds, {totals['broken']} with a broken invariant; "
        f"{totals['rows']:,} rows acknowledged in {seconds:.0f} s under faults "
        f"({totals['rows'] / max(seconds, 1e-9):,.0f} a second), "
        f"{totals['requests']:,} Produce requests, {totals['retries']:,} batches sent again, "
        f"{totals['attempts']:,} task attempts, {totals['failed']} failed "
        f"({totals['failed_at_ease']} of them with a delivery.timeout.ms longer than the faults).\n"
        f"{sum(faults.values())} faults: {by_kind}.\n"
        f"3 brokers, replication 3, min.insync.replicas 2, acks=all, 3 producers, {os.cpu_count()} cores, "
        f"{wall_s:.0f} s in all."
    )


if __name__ == "__main__":
    sys.exit(main())
