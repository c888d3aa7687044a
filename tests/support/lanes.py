"""How the suite is distributed to the workers of pytest-xdist, and its progress.

A worker is a process with session fixtures of its own. Tests that share something slow to start form a group.
A group runs in one worker, so Spark, three brokers and each module's own broker start once. All other tests
go one by one to the worker that is free. Groups start in the order of ``FIRST``. Tests without a group come
last: they fill the remaining time.
"""

from __future__ import annotations

import time
from collections import defaultdict

import pytest

# The session fixtures that form a group. The first one that a test has names its group.
SHARED = ("cluster3", "spark", "broker", "security_broker", "old_broker", "chromium")
FIRST = (
    "spark",
    "broker",
    "cluster3",
    "security_broker",
    "tests/exactly_once/test_rounds.py",
    "tests/standalone/test_standalone.py",
    "tests/project/test_packaging.py",
    "tests/coordinator/test_launcher.py",
    "tests/local_kafka/test_local_broker.py",
    "old_broker",
    "chromium",
)
# Modules whose tests each start JVMs or other processes. Two tests of one such module never run side by side,
# except that tests which need only a shared fixture run in the worker of that fixture.
ALONE = frozenset(name for name in FIRST if name.endswith(".py"))
# The whole suite on two cores.
BOUND_S = 600.0
_REPORT_EVERY_S = 20.0


def group_of(item: pytest.Item) -> str | None:
    """The group whose tests run in one worker; None for a test that may run in any."""
    module = item.nodeid.partition("::")[0]
    definitions = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    # A module may have a fixture of its own with the name of a shared one.
    shared = {name for name, found in definitions.items() if found[-1].scope == "session"}
    if "registry" in shared:
        # One worker starts it, and most of its tests also need Spark.
        return "spark"
    for name in SHARED:
        if name in shared:
            return name
    if module in ALONE:
        return module
    shares = any(found[-1].scope == "module" for found in definitions.values())
    return module if shares else None


def share_out(items: list[pytest.Item], *, in_worker: bool) -> None:
    """Put groups in the order in which they start; a worker also names each item's group in its id."""
    order = {name: place for place, name in enumerate(FIRST)}
    places: dict[int, int] = {}
    for item in items:
        group = group_of(item)
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))
            # pytest-xdist 3.8 appends the group to an attribute that pytest 9.2 no longer reads.
            if in_worker and hasattr(item, "_id"):
                item._id = type(item._id).parse(f"{item.nodeid}@{group}")
        places[id(item)] = order.get(group or "", len(order))
    items.sort(key=lambda item: places[id(item)])


def end_shared(item: pytest.Item, following: pytest.Item | None) -> None:
    """After the last test of a group: tear down the session fixtures that only its tests have."""
    group = group_of(item)
    if group not in SHARED or following is None or group_of(following) == group:
        return
    assert isinstance(item, pytest.Function)
    for name in ("registry", *SHARED):
        for fixture in item.session._fixturemanager.getfixturedefs(name, item) or ():
            fixture.finish(item._request)  # type: ignore[arg-type]  # only handed to hooks


class Progress:
    """Prints how many tests are done, and at the end how long each worker had work."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._started = time.monotonic()
        self._reported = self._started
        self._total = 0
        self._done: set[str] = set()
        self._busy: defaultdict[str, float] = defaultdict(float)
        self._last: dict[str, float] = {}

    def pytest_xdist_node_collection_finished(self, node: object, ids: list[str]) -> None:
        self._total = len(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        now = time.monotonic()
        worker = str(getattr(report, "worker_id", ""))
        self._busy[worker] += report.duration
        self._last[worker] = now
        if report.when != "teardown":
            return
        self._done.add(report.nodeid)
        if now - self._reported >= _REPORT_EVERY_S:
            self._reported = now
            self._write(f"{len(self._done)} of {self._total} tests in {now - self._started:.0f} s")

    def pytest_terminal_summary(self) -> None:
        took = time.monotonic() - self._started
        workers = ", ".join(
            f"{worker} {self._last[worker] - self._started:.0f} s ({busy:.0f} s in tests)"
            for worker, busy in sorted(self._busy.items())
        )
        self._write(f"{len(self._done)} tests in {took:.0f} s of {BOUND_S:.0f}; workers until: {workers}")

    def _write(self, line: str) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.ensure_newline()
            reporter.write_line(line)
