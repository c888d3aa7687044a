"""``python -m tests.exactly_once --rounds 100 --seed 1``: rounds of kills, a line for each, and what they
came to."""

from __future__ import annotations

import argparse
import sys
import time

from local_kafka import LocalBroker
from tests.exactly_once.rounds import Report, Round
from tests.matrix.released_kafka import LAST_OF_3, jars_of
from tests.support.broker_settings import SHORT_SESSIONS


def main() -> int:
    """0 where no row was lost or doubled."""
    parser = argparse.ArgumentParser(prog="python -m tests.exactly_once", description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1, help="of the first round; the next ones follow")
    parser.add_argument("--minutes", type=float, default=0, help="start no further round after that long")
    parser.add_argument("--kafka", choices=[LAST_OF_3.version])
    arguments = parser.parse_args()
    home = None
    if arguments.kafka:
        home = jars_of(LAST_OF_3)
    reports: list[Report] = []
    began = time.monotonic()
    with LocalBroker(brokers=3, properties=SHORT_SESSIONS, kafka_home=home) as cluster:
        for seed in range(arguments.seed, arguments.seed + arguments.rounds):
            if arguments.minutes and time.monotonic() - began > arguments.minutes * 60:
                break
            reports.append(Round(cluster, seed).run())
            print(reports[-1], flush=True)
    total = Report(f"{len(reports)} rounds", seconds=time.monotonic() - began)
    for report in reports:
        total.faults += report.faults
        total.counts += report.counts
    print(f"{total}, {sum(report.is_broken for report in reports)} rounds BROKEN; 3 brokers, replication 3")
    return 1 if total.is_broken else 0


if __name__ == "__main__":
    sys.exit(main())
