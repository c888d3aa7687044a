"""``python -m tests.chaos --rounds 100 --seed 1``: many rounds, a line for each, and what they came to."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable

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
    print(summary(reports, time.monotonic() - began))
    return 1 if any(report.violations for report in reports) else 0


def summary(reports: list[RoundReport], wall_s: float) -> str:
    """The results of all rounds, with the conditions."""

    def total(count: Callable[[RoundReport], int]) -> int:
        return sum(map(count, reports))

    faults: Counter[Fault] = sum((one.faults for one in reports), Counter())
    rows, seconds = total(lambda one: one.rows), sum(one.seconds for one in reports)
    failed = total(lambda one: one.failures.total())
    at_ease = sum(one.failures.total() for one in reports if not one.schedule.strict)
    by_kind = ", ".join(f"{faults[fault]} x {fault.value}" for fault in Fault if faults[fault])
    return (
        f"{len(reports)} rounds, {total(lambda one: bool(one.violations))} with a broken invariant; "
        f"{rows:,} rows acknowledged in {seconds:.0f} s under faults "
        f"({rows / max(seconds, 1e-9):,.0f} a second), {total(lambda one: one.requests):,} Produce requests, "
        f"{total(lambda one: one.retries):,} batches sent again, "
        f"{total(lambda one: one.attempts):,} task attempts, {failed} failed ({at_ease} of them "
        f"with a delivery.timeout.ms longer than the faults).\n"
        f"{faults.total()} faults: {by_kind}.\n"
        f"3 brokers, replication 3, min.insync.replicas 2, acks=all, 3 producers, {os.cpu_count()} cores, "
        f"{wall_s:.0f} s in all."
    )


if __name__ == "__main__":
    sys.exit(main())
