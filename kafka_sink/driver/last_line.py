"""The line about a failure, written once more when the driver has ended: as the last line of its log.

Spark follows the sink's own line with a hundred lines of Java frames, the driver's Python with a traceback.
So a process of a few MB waits for the driver's JVM to end, writes the line to the JVM's stderr, and ends. A
write that is committed later takes the line back. This needs Linux, and a stderr that is a file, a pipe or a
terminal; elsewhere the line in the log has to do.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

from kafka_sink import libraries, spark_application
from kafka_sink.driver import driver_process
from kafka_sink.driver.driver_process import DriverProcess

# The marker that says which process waits.
NOTE = "last line of the driver's log"
# Kept, so that Popen does not complain about children that outlive it.
STARTED: list[subprocess.Popen[bytes]] = []
# Where the kernel has no pidfd_open (before Linux 5.3).
_POLL_S = 0.2
# After how long a reader that takes nothing gets no line.
_WRITE_MS = 10_000
_MODULE = "kafka_sink.driver.last_line"
# Only what Python and the dynamic loader need: Spark's variables hold secrets.
_INHERITED = ("PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "HOME", "TMPDIR")


def leave(subject: str, line: str, environ: Mapping[str, str] = os.environ) -> None:
    """Have ``line`` written when the driver ends, in place of the one of an earlier failure.

    ``subject``: the checkpoint of a stream, "" for batch writes. Raises nothing.
    """
    if not spark_application.folder():
        return
    _end(_waiting())
    driver = driver_process.find_driver_process()
    if driver is None:
        return
    inherited = {name: environ[name] for name in _INHERITED if name in environ}
    inherited["PYTHONPATH"] = libraries.path_for_child(sys.path)
    with suppress(OSError):
        process = subprocess.Popen(
            [*libraries.module_command(_MODULE), str(driver.pid), driver.started],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env=inherited,
            start_new_session=True,
        )
        STARTED.append(process)
        driver_process.leave_running(process)
        waiting = driver_process.process(process.pid)
        if waiting is not None:
            spark_application.note(NOTE, json.dumps([waiting.pid, waiting.started, subject]))
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(line.encode())


def take_back(subject: str) -> None:
    """The subject was written since: a line about it would mislead. Costs a look for a file."""
    noted = _waiting()
    if noted is not None and noted[2] == subject:
        _end(noted)


def _waiting() -> tuple[int, str, str] | None:
    """Pid and start of the process that waits, and its subject."""
    noted = spark_application.noted_within(NOTE, math.inf)
    with suppress(ValueError):
        return None if noted is None else tuple(json.loads(noted))
    return None


def _end(noted: tuple[int, str, str] | None) -> None:
    if noted is None:
        return
    spark_application.forget(NOTE)
    pid, started, _ = noted
    # Pids are reused.
    if DriverProcess(pid, started).is_alive():
        with suppress(OSError):
            os.kill(pid, signal.SIGTERM)


def main(pid: int, started: str) -> None:
    """Read the line from stdin, wait for this process to end, write the line to its stderr."""
    line = sys.stdin.buffer.read()
    driver = DriverProcess(pid, started)
    try:
        # A pipe whose reader has gone would make the open wait.
        flags = os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC
        stderr = os.open(f"/proc/{pid}/fd/2", flags)
    except OSError:
        return
    _wait(driver)
    writable = select.poll()
    writable.register(stderr, select.POLLOUT)
    if writable.poll(_WRITE_MS):
        with suppress(OSError):
            os.write(stderr, line + b"\n")


def _wait(driver: DriverProcess) -> None:
    try:
        handle = os.pidfd_open(driver.pid)
    except (AttributeError, OSError):
        while driver.is_alive():
            time.sleep(_POLL_S)
        return
    if driver.is_alive():
        waiting = select.poll()
        waiting.register(handle, select.POLLIN)
        waiting.poll()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
