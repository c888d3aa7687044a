"""Reads the report of `pyright --verifytypes`, and fails if a type of the public API is not known.

    python tools/api_types.py REPORT.json

pyright counts every module whose name has no underscore. Users are told to import only the modules and
classes in PUBLIC. The names in these, and their methods and attributes, are the public API.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

PUBLIC = (
    r"kafka_sink\.\w+",
    r"kafka_sink\.errors\.\w+(\.\w+)?",
    r"kafka_sink\.breaker\.\w+",
    r"kafka_sink\.breaker\.interface\.(PartitionCircuitBreaker|ProducerStatusContext|Evidence)\.\w+",
    r"kafka_sink\.breaker\.failure_rate\.FailureRateCircuitBreaker\.\w+",
    r"kafka_sink\.breaker\.manager\.CircuitBreakManager\.\w+",
    r"kafka_sink\.arrow\.producer\.ArrowProducer\.\w+",
    r"kafka_sink\.reports\.delivery_report\.WriteResult\.\w+",
)
# pyright calls a class partly unknown if a parameter of one of its methods is. The producer makes a
# CircuitBreakManager of engine objects, whose attributes have no annotation if their values show the type.
PARTLY_KNOWN = (
    "kafka_sink.breaker.CircuitBreakManager",
    "kafka_sink.breaker.FailureRateCircuitBreaker",
    "kafka_sink.breaker.PartitionCircuitBreaker",
    "kafka_sink.breaker.manager.CircuitBreakManager.__init__",
    "kafka_sink.breaker.manager.CircuitBreakManager.task_mutes",
    "kafka_sink.breaker.failure_rate.FailureRateCircuitBreaker.limits",
    "kafka_sink.breaker.failure_rate.FailureRateCircuitBreaker.set_circuit_break_manager",
    "kafka_sink.breaker.interface.PartitionCircuitBreaker.set_circuit_break_manager",
)


def main() -> int:
    symbols = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["typeCompleteness"]["symbols"]
    public = [symbol for symbol in symbols if re.fullmatch("|".join(PUBLIC), symbol["name"])]
    names = {symbol["name"] for symbol in public if not symbol["isTypeKnown"]}
    unknown = [symbol for symbol in public if symbol["name"] in names - set(PARTLY_KNOWN)]
    for symbol in unknown:
        reasons = "; ".join(diagnostic["message"].replace("\n", " ") for diagnostic in symbol["diagnostics"])
        print(f"{symbol['name']}: {reasons}")
    known = len(public) - len(names)
    print(f"pyright knows the types of {known} of {len(public)} public names. It knows only partly:")
    print(*sorted(names), sep="\n")
    return 1 if unknown or not public else 0


if __name__ == "__main__":
    sys.exit(main())
