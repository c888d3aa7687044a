"""What a process loads. Which module may import which is checked by the contracts in pyproject.toml."""

from __future__ import annotations

import subprocess
import sys


def test_coordinators_process_loads_nothing_that_talks_to_brokers() -> None:
    """Catches: a package whose __init__ imports a client of brokers, which contracts do not see.

    The process starts beside each driver, and NumPy and PyArrow alone take 0.3 s of processor time.
    """
    code = (
        "import sys, kafka_sink.coordinator.server_process\n"
        "packages = 'breaker', 'engine', 'memory', 'network', 'records', 'rows', 'security', 'task'\n"
        "names = {f'kafka_sink.{name}' for name in packages} | {'numpy', 'pyarrow', 'pyspark'}\n"
        "print(*sorted(names & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
