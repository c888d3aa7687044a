"""`make audit` without a network: which versions an advisory is about."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import audit

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


def run(folder: Path, version: str, more: str = "", oldest: str = "1.4") -> int:
    entries = folder / "vulns" / "the-package"
    entries.mkdir(parents=True, exist_ok=True)
    (entries / "PYSEC-2026-1.yaml").write_text(ADVISORY.format(more=more))
    (folder / "pins.txt").write_text(f"# comment\nthe-package=={version} ; python_version < '4'\nother==1\n")
    (folder / "oldest.txt").write_text(f'dependencies = [\n    "the-package>={oldest}",\n]\n')
    return int(audit.main([str(folder), str(folder / "pins.txt"), str(folder / "oldest.txt")]))


def test_audit_reports_versions_that_an_advisory_lists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for version in ("0.9", "1.0", "1.2", "1.3.9", "1.4", "2.0", "2.1", "2.1.1"):
        has_hole = version in ("0.9", "1.2", "1.3.9", "2.0", "2.1")
        assert run(tmp_path, version) == has_hole, version
        out = capsys.readouterr().out
        assert "2 pinned versions and 1 oldest ones; the newest advisory" in out
        assert "is of 2026-03-04" in out
        assert (f"the-package {version}: PYSEC-2026-1, CVE-2026-1" in out) is has_hole
    assert run(tmp_path, "1.3", "withdrawn: 2026-04-01T00:00:00Z") == 0
    assert run(tmp_path, "1.4", oldest="1.2") == 1, "what users may have counts"
    # Another folder is an error, and not an empty database.
    assert audit.main([str(tmp_path / "vulns")]) == 2


def test_audit_reads_every_pin() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    assert len(audit.pins(ROOT / "constraints.txt")) == len([one for one in lines if not one.startswith("#")])
    oldest = dict(audit.oldest(ROOT / "pyproject.toml"))
    assert oldest.keys() >= {"pyarrow", "cryptography", "pyspark", "botocore", "gssapi"}
    assert "selenium" not in oldest, "for development"
