"""The layers of pyproject.toml also hold for imports that only type checkers see."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXCLUSION = "exclude_type_checking_imports = true"


def test_no_package_needs_a_type_of_a_higher_layer(tmp_path: Path) -> None:
    """Catches: a circle of packages that hides below TYPE_CHECKING.

    The other contracts are about modules that a process loads, for which types do not count.
    """
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert EXCLUSION in text
    config = tmp_path / "pyproject.toml"
    config.write_text(text.replace(EXCLUSION, EXCLUSION.replace("true", "false")), encoding="utf-8")
    # In this process it would disable all loggers, which other tests read.
    linter = Path(sys.executable).with_name("lint-imports")
    contracts = "--contract", "bands", "--contract", "no-circles"
    command = linter, "--config", config, *contracts, "--cache-dir", tmp_path / "cache"
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
