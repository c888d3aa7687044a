"""What other libraries read of this process: its environment, and which packages it has."""

from __future__ import annotations

import sys

import pytest

from tests.support.surroundings import Environ, Modules


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Environ:
    """Sets variables for one test, and removes those that are None."""

    def give(**variables: str | None) -> None:
        for name, value in variables.items():
            monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)

    return give


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Modules:
    """Puts others in the place of packages for one test; None: it is not installed."""

    def give(**packages: object) -> None:
        for name, package in packages.items():
            monkeypatch.setitem(sys.modules, name, package)

    return give
