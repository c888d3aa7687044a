"""The layers of pyproject.toml also hold for imports that only type checkers see."""

from __future__ import annotations

from pathlib import Path

from importlinter.cli import lint_imports

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
EXCLUSION = "exclude_type_checking_imports = true"


def test_no_package_needs_a_type_of_a_higher_layer(tmp_path: Path) -> None:
    """Catches: a circle of packages that hides below TYPE_CHECKING.

    The other contracts are about modules that a process loads, for which types do not count.
    """
    text = PYPROJECT.read_text(encoding="utf-8")
    assert EXCLUSION in text
    config = tmp_path / "pyproject.toml"
    config.write_text(text.replace(EXCLUSION, EXCLUSION.replace("true", "false")), encoding="utf-8")
    assert lint_imports(str(config), ("bands", "no-circles"), cache_dir=str(tmp_path), no_logo=True) == 0
