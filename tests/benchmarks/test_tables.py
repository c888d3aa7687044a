"""The page has the figures of the results, which the plots also show."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.tables import TABLES

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "benchmarks.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", TABLES)
def test_the_page_has_every_row_of_the_results(name: str) -> None:
    """Catches: a table without the row in which the sink is slower, and figures of an earlier run."""
    assert "\n".join(TABLES[name]()) in PAGE
