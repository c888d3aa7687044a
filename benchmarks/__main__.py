"""``python -m benchmarks``: every benchmark in turn, each a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = ("encoder", "allocation", "throughput")


def main() -> int:
    folder = Path(__file__).resolve().parent
    for name in BENCHMARKS:
        print(f"== {name} ==", flush=True)
        done = subprocess.run([sys.executable, str(folder / f"{name}.py"), *sys.argv[1:]], check=False)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
