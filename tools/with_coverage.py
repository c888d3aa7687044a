"""Runs a Python module under coverage.py, and prints which modules of the sink it covers least.

    python tools/with_coverage.py pytest tests/memory

Lines and branches count, as in coverage.py's own report, and so do the programs that the module starts. The
exit code is the module's own, even if there is no report. Each module below 85 % is worth a look, because it
is either not tested or not needed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

SETTINGS = Path(__file__).parents[1] / "pyproject.toml"
COUNT = 10


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="coverage-", ignore_cleanup_errors=True) as folder:
        # Processes in all working directories write their data into this folder.
        environ = {**os.environ, "COVERAGE_FILE": str(Path(folder, "data"))}
        # `coverage run` would end with another exit code than the module if it could not write its data.
        measured = {**environ, "COVERAGE_PROCESS_START": str(SETTINGS)}
        with subprocess.Popen([sys.executable, "-m", *sys.argv[1:]], env=measured) as running:
            # Ctrl-C also reaches the module, which ends what it has started.
            signal.signal(signal.SIGINT, lambda *_: None)
            code = running.wait()
        try:
            print_least(Path(folder), environ)
        except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
            print(f"There is no report about coverage: {error}", file=sys.stderr)
    return code


def print_least(folder: Path, environ: dict[str, str]) -> None:
    path = folder / "report.json"
    # A process that was killed may leave half a file, which coverage.py skips. Its warnings are left out.
    for arguments in (["combine", "--quiet"], ["json", "--quiet", "-o", str(path)]):
        command = [sys.executable, "-W", "ignore", "-m", "coverage", *arguments]
        subprocess.run(command, env=environ, check=True)
    report = json.loads(path.read_text(encoding="utf-8"))
    shares = sorted(
        (module["summary"]["percent_covered"], module["summary"]["missing_lines"], name)
        for name, module in report["files"].items()
    )
    total = report["totals"]["percent_covered"]
    print(f"\n{total:.1f} % of the lines and branches are covered. The {COUNT} least covered modules:")
    for share, missing, name in shares[:COUNT]:
        print(f"  {share:5.1f} %  {missing:4} lines missing  {name}")


if __name__ == "__main__":
    sys.exit(main())
