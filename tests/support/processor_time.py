"""Processor time per test: the cost of a test, even on a machine that is busy with other work.

It counts this process, the children that it has waited for, and on Linux all descendants that still run, such
as brokers and Spark's workers. Once its parent has ended, a process is no longer counted: the coordinator is
one, and the JVM of a driver that a test runs as a process of its own.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator

import pytest

from tests.support.processes import below

# Listing all processes costs about 2 ms. What they did in quicker tests counts for the next slow one.
_LIST_PROCESSES_FROM_S = 0.1
_ATTRIBUTE = "processor_s"


def of_running_descendants(root: int) -> float:
    """User and system seconds of the processes below ``root``, and of children that they have waited for."""
    return sum(one.own_s + one.waited_s for one in below(root).values())


class Meter:
    """Notes in each report how much processor time its test took since the report before."""

    def __init__(self) -> None:
        self._own = self._of_this_process()
        self._running = of_running_descendants(os.getpid())

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        own, running = self._of_this_process(), self._running
        if report.duration >= _LIST_PROCESSES_FROM_S:
            running = of_running_descendants(os.getpid())
        # A process that has ended moved from the running processes to the children waited for.
        used = own - self._own + running - self._running
        if used >= 0:
            self._own, self._running = own, running
            setattr(report, _ATTRIBUTE, used)
        return report

    @staticmethod
    def _of_this_process() -> float:
        times = os.times()
        return times.user + times.system + times.children_user + times.children_system


class Summary:
    """Prints the sum by folder and the slowest tests, in the process that sees all reports."""

    def __init__(self, slowest: int) -> None:
        self._slowest = slowest
        self._of_test: defaultdict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._of_test[report.nodeid] += getattr(report, _ATTRIBUTE, 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        of_folder: defaultdict[str, float] = defaultdict(float)
        for test, used in self._of_test.items():
            of_folder["/".join(test.partition("::")[0].split("/")[:2])] += used
        terminalreporter.section(f"{sum(of_folder.values()):.0f} s of processor time")
        for table in (of_folder, self._of_test):
            for name, used in sorted(table.items(), key=lambda item: -item[1])[: self._slowest or None]:
                if used >= 1:
                    terminalreporter.write_line(f"{used:8.1f} s {name}")
            terminalreporter.write_line("")
