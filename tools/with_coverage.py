"""Combines the coverage data of a run's processes, and prints the modules that they cover least.

    python tools/least_covered.py [COUNT]

Lines and branches count, as in coverage.py's own report. The exit code does not depend on them. Each module
below 85 % is worth a look, because it is either not tested or not needed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

COVERAGE = str(Path(sys.executable).with_name("coverage"))


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    subprocess.run([COVERAGE, "combine", "--quiet", "--append"], check=False)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "coverage.json"
        subprocess.run([COVERAGE, "json", "--quiet", "-o", str(path)], check=True)
        report = json.loads(path.read_text(encoding="utf-8"))
    shares = sorted(
        (module["summary"]["percent_covered"], module["summary"]["missing_lines"], name)
        for name, module in report["files"].items()
    )
    total = report["totals"]["percent_covered"]
    print(f"\n{total:.1f} % of the lines and branches are covered. The {count} least covered modules:")
    for share, missing, name in shares[:count]:
        print(f"  {share:5.1f} %  {missing:4} lines missing  {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
