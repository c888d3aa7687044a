"""The client of the supervisor: starts, signals and polls processes that end with this one."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from local_kafka import supervisor as supervisor_script
from local_kafka.errors import LocalBrokerError

_CLOSE_SECONDS = 20.0


class SupervisedProcesses:
    """Named processes that never outlive this one; ``folder`` is deleted with them.

    Raises LocalBrokerError if the supervisor is gone or a command fails.
    """

    def __init__(self, folder: Path) -> None:
        self._lock = threading.Lock()  # guards the pipes: one command and its reply at a time
        script = os.path.abspath(supervisor_script.__file__)
        self._supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", script, str(folder), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    @property
    def supervisor_pid(self) -> int:
        """The supervisor's pid, which is also the process group id of everything started here."""
        return self._supervisor.pid

    def start(self, name: str, argv: Sequence[str], *, log: Path, cwd: Path) -> int:
        """Start a process under a name and return its pid; its output is appended to ``log``."""
        reply = self._ask(do="start", name=name, argv=list(argv), log=str(log), cwd=str(cwd))
        return int(reply["pid"])

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal. Does nothing if the process has ended."""
        self._ask(do="signal", name=name, signal=int(number))

    def is_running(self, name: str) -> bool:
        """Whether the process exists. One that SIGSTOP has stopped does."""
        return self._ask(do="poll", name=name)["code"] is None

    def close(self) -> None:
        """Kill everything, delete the folder, wait until that is done."""
        supervisor = self._supervisor
        for pipe in (supervisor.stdin, supervisor.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            supervisor.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            supervisor.kill()
            supervisor.wait()
        if supervisor.returncode == 0:
            return
        # If the supervisor was killed itself, its processes are left. They share its process group.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(supervisor.pid, signal.SIGKILL)

    def _ask(self, **command: Any) -> dict[str, Any]:
        stdin, stdout = self._supervisor.stdin, self._supervisor.stdout
        if stdin is None or stdout is None:
            raise LocalBrokerError("the supervisor has no pipes")
        with self._lock:
            try:
                stdin.write(json.dumps(command).encode() + b"\n")
                stdin.flush()
                line = stdout.readline()
            except (OSError, ValueError) as error:
                raise LocalBrokerError(f"the brokers' supervisor is gone: {error}") from error
        if not line:
            raise LocalBrokerError("the brokers' supervisor is gone: another process ended it")
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise LocalBrokerError(f"{command['name']}: {command['do']} failed: {reply['error']}")
        return reply


def run_until_stopped(command: Callable[[], None]) -> int:
    """Carry out a command that Ctrl-C and SIGTERM may end; its exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        command()
    except LocalBrokerError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
    return 0


def announce(address: str, said: str) -> None:
    """Print the address on stdout, and progress on stderr; then wait for Ctrl-C or SIGTERM."""
    print(address, flush=True)
    print(said, file=sys.stderr, flush=True)
    threading.Event().wait()
