"""Every library that the package declares is one that the errors and the doctor know."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kafka_sink import libraries

ROOT = Path(__file__).resolve().parents[1]


def test_they_are_those_of_pyproject() -> None:
    declared = re.search(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    assert declared is not None
    names = set(re.findall(r'"([a-z0-9-]+)>=', declared[1]))
    assert names == {*libraries.OF_TASKS.values(), *libraries.OF_DRIVER.values()}


def test_the_documented_line_for_executors_has_what_tasks_need() -> None:
    line = re.search(r"^pip install (pyarrow .*)$", (ROOT / "docs/install.md").read_text(), re.M)
    assert line is not None
    assert set(line[1].split()) == set(libraries.OF_TASKS.values())


@pytest.fixture
def miss(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let these modules, and no others, be missing."""

    def missing(*modules: str) -> None:
        monkeypatch.setattr(libraries, "_is_there", lambda module: module not in modules)

    return missing


def test_a_missing_library_has_an_explanation_with_all_that_are_missing(
    miss: Callable[..., None],
) -> None:
    miss("cryptography", "zlib_ng")
    error = ModuleNotFoundError("No module named 'cryptography.x509'", name="cryptography.x509")
    text = libraries.explanation(error)
    assert text is not None
    assert text.startswith("No module named 'cryptography.x509': ")
    assert text.endswith(f"{sys.executable} -m pip install zlib-ng cryptography")
    miss("pyspark")
    text = libraries.explanation(ModuleNotFoundError("No module named 'pyspark'", name="pyspark"))
    assert text is not None
    assert text.endswith("pip install pyspark")


def test_a_library_that_is_there_and_too_old_is_to_be_upgraded(miss: Callable[..., None]) -> None:
    """Catches: "pip install cryptography" beside an old one, which pip takes for done."""
    miss()
    text = libraries.explanation(
        ModuleNotFoundError("No module named 'cryptography.new'", name="cryptography.new")
    )
    assert text is not None
    assert "has a version of cryptography that is too old" in text
    assert text.endswith("pip install --upgrade cryptography")
    miss("lz4")
    other = libraries.explanation(
        ModuleNotFoundError("No module named 'cryptography.new'", name="cryptography.new")
    )
    assert other is not None
    assert other.endswith("pip install lz4"), "what is missing comes first"


def test_other_errors_have_none() -> None:
    assert libraries.explanation(ModuleNotFoundError("No module named 'mine'", name="mine")) is None
    assert libraries.explanation(ImportError("lz4")) is None
