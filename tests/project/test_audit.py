"""`make audit` without a network: which versions an advisory is about."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
ADVISORY = """\
id: PYSEC-2026-1
modified: 2026-03-04T00:00:00Z
aliases: [CVE-2026-1]
{more}
affected:
- package: {{ecosystem: PyPI, name: The.Package}}
  ranges:
  - type: GIT
    events: [{{introduced: "0"}}]
  - type: ECOSYSTEM
    events: [{{introduced: "1.2"}}, {{fixed: "1.4"}}, {{introduced: "2.0"}}, {{last_affected: "2.1"}}]
  versions: ["0.9"]
"""


@pytest.fixture(name="audit")
def _audit() -> ModuleType:
    spec = importlib.util.spec_from_file_location("audit", ROOT / "tools" / "audit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(audit: ModuleType, folder: Path, version: str, more: str = "") -> int:
    entries = folder / "vulns" / "the-package"
    entries.mkdir(parents=True, exist_ok=True)
    (entries / "PYSEC-2026-1.yaml").write_text(ADVISORY.format(more=more))
    (folder / "pins.txt").write_text(f"# comment\nthe-package=={version} ; python_version < '4'\nother==1\n")
    return int(audit.main([str(folder), str(folder / "pins.txt")]))


@pytest.mark.parametrize(
    ("version", "status"),
    [("0.9", 1), ("1.0", 0), ("1.2", 1), ("1.3.9", 1), ("1.4", 0), ("2.0", 1), ("2.1", 1), ("2.1.1", 0)],
)
def test_a_version_that_an_advisory_names_is_found(
    audit: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], version: str, status: int
) -> None:
    assert run(audit, tmp_path, version) == status
    out = capsys.readouterr().out
    assert "2 pinned versions; the newest advisory about one of these packages is of 2026-03-04" in out
    assert (f"the-package {version}: PYSEC-2026-1, CVE-2026-1" in out) is bool(status)


def test_one_that_was_withdrawn_is_none(audit: ModuleType, tmp_path: Path) -> None:
    assert run(audit, tmp_path, "1.3", "withdrawn: 2026-04-01T00:00:00Z") == 0


def test_another_folder_is_an_error_and_not_an_empty_database(audit: ModuleType, tmp_path: Path) -> None:
    assert audit.main([str(tmp_path)]) == 2


def test_all_that_is_pinned_is_read(audit: ModuleType) -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    assert len(audit.pins(ROOT / "constraints.txt")) == len([one for one in lines if not one.startswith("#")])
