"""Progress in the driver's terminal: below Spark's bar, gone at the end, and only in a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from kafka_sink.coordinator.process.terminal_progress import TerminalProgress, driver_terminal
from tests.support.coordinator_harness import eventually

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")


class Screen:
    """What a terminal shows of the bytes that it gets: as much of its commands as is used here."""

    def __init__(self, height: int = 4) -> None:
        self.lines = [""] * height
        self.row = self.column = 0

    def feed(self, text: str) -> None:
        for command in re.findall(r"\x1b\[\d*[A-Z]|.|\n", text, re.DOTALL):
            if command == "\r":
                self.column = 0
            elif command == "\n":
                self.row += 1
                if self.row == len(self.lines):
                    self.row -= 1
                    self.lines = [*self.lines[1:], ""]
            elif command == "\x1b[2K":
                self.lines[self.row] = ""
            elif command == "\x1b[1A":
                self.row = max(0, self.row - 1)
            else:
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + command + line[self.column + 1 :]
                self.column += 1


class Driver:
    """A process in the foreground of a terminal, as the driver's JVM is."""

    def __init__(self, *, new_session: bool = False) -> None:
        pid, self.master = pty.fork()
        if pid == 0:
            if new_session:
                # As a notebook's kernel: the terminal is its stderr, and not its own.
                os.execvp("setsid", ["setsid", "-w", "sleep", "60"])
            os.execvp("sleep", ["sleep", "60"])
        self.pid = pid

    def written(self) -> str:
        found = b""
        while select.select([self.master], [], [], 0.2)[0]:
            found += os.read(self.master, 65_536)
        return found.decode()

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.master)


@pytest.fixture
def driver() -> Iterator[Driver]:
    made = Driver()
    try:
        until = time.monotonic() + 60
        while driver_terminal(made.pid) is None and time.monotonic() < until:
            time.sleep(0.01)
        yield made
    finally:
        made.close()


def test_the_line_stands_below_sparks_bar_and_both_are_gone_at_the_end(driver: Driver) -> None:
    rows: list[int] = []
    progress = TerminalProgress(driver.pid, lambda: (rows[-1], 1_000.0) if rows else None, lambda: True)
    screen = Screen(height=3)
    screen.feed("> df.write.save()\n\r")
    for count in (10, 2_000_000):
        screen.feed(f"\r[Stage 0:====>   ({count % 7} + 2) / 8]\r")
        rows.append(count)
        progress.update()
        screen.feed(driver.written())
    assert screen.lines[1].startswith("[Stage 0:====>")
    assert screen.lines[2] == "[Kafka: 2,000,000 rows, 1,000 rows/s]"
    screen.feed("\r" + " " * 40 + "\r")
    rows.clear()
    progress.update()
    screen.feed(driver.written() + "> ")
    assert [line.rstrip() for line in screen.lines] == ["> df.write.save()", ">", ""]


def test_at_the_bottom_of_the_screen_the_bar_scrolls_up_and_stays_whole(driver: Driver) -> None:
    progress = TerminalProgress(driver.pid, lambda: (5, 1.0), lambda: True)
    screen = Screen(height=2)
    screen.feed("a\n\rb\n\r[Stage 0:>  ]\r")
    progress.update()
    screen.feed(driver.written())
    assert screen.lines == ["[Stage 0:>  ]", "[Kafka: 5 rows, 1 rows/s]"]


def test_a_job_that_commits_does_not_seem_to_stand_still(driver: Driver) -> None:
    """Catches: "0 rows/s" while a job ends."""
    TerminalProgress(driver.pid, lambda: (5_000, 0.4), lambda: True).update()
    assert "[Kafka: 5,000 rows]" in driver.written()


def test_nothing_is_drawn_where_nobody_wants_it_or_no_job_runs(driver: Driver) -> None:
    TerminalProgress(driver.pid, lambda: (5, 1.0), lambda: False).update()
    TerminalProgress(driver.pid, lambda: None, lambda: True).update()
    assert driver.written() == ""


def test_a_driver_in_a_session_of_its_own_has_no_terminal() -> None:
    """Catches: progress in the terminal of a notebook's server."""
    notebook = Driver(new_session=True)
    try:

        def children() -> list[str]:
            command = ["ps", "-o", "pid=", "--ppid", str(notebook.pid)]
            return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()

        # The child exists before it has its own session.
        eventually(lambda: (found := children()) and all(driver_terminal(int(one)) is None for one in found))
    finally:
        notebook.close()


def test_a_driver_whose_stderr_is_a_file_or_a_pipe_has_no_terminal() -> None:
    with subprocess.Popen(["sleep", "60"], stderr=subprocess.PIPE) as process:
        try:
            assert driver_terminal(process.pid) is None
        finally:
            process.kill()
    assert driver_terminal(999_999_999) is None
