"""Scenarios of several tasks hold by themselves and behind relays."""

from __future__ import annotations

import pytest

from tests.support.job_of_tasks import Job


@pytest.fixture(params=[0, 2, 100], ids=["by themselves", "two of a host", "one host"])
def _behind_relays(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Job, "per_host", request.param)
