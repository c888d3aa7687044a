"""A small process that owns the broker JVMs, so that they never outlive the process that started them.

It is started as a script and imports the standard library only. Commands come as JSON lines on stdin, replies
go to stdout. When stdin ends, or its parent is gone (a forked sibling may hold the pipe open), it kills every
JVM, deletes the folder named on its command line and ends. It lives in a session of its own: a Ctrl-C or a
hang-up in the terminal reaches the parent, which then closes the pipe, and never a broker first.

Commands: ``{"do": "start", "name", "argv", "log", "cwd"}`` -> ``{"pid"}``;
``{"do": "signal", "name", "signal"}`` -> ``{}``; ``{"do": "poll", "name"}`` -> ``{"code"}`` (null while it
runs). The reply to a command that failed is ``{"error"}``.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
from typing import Any

_PARENT_CHECK_SECONDS = 0.5


class BrokerSupervisor:
    """The processes by name, and the commands on them."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def handle(self, command: dict[str, Any]) -> dict[str, Any]:
        """Carry out one command and return the reply."""
        action, name = command["do"], command["name"]
        try:
            if action == "start":
                return {"pid": self._start(name, command)}
            process = self._processes[name]
            if action == "signal":
                process.send_signal(command["signal"])
                return {}
            if action == "poll":
                return {"code": process.poll()}
        except (OSError, KeyError, ValueError) as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"error": f"unknown command {action}"}

    def _start(self, name: str, command: dict[str, Any]) -> int:
        known = self._processes.get(name)
        if known is not None and known.poll() is None:
            raise ValueError(f"{name} is already running as {known.pid}")
        with open(command["log"], "ab") as log:
            process = subprocess.Popen(
                command["argv"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=command["cwd"]
            )
        self._processes[name] = process
        return process.pid

    def end(self) -> None:
        """Kill everything (SIGKILL also ends a process that SIGSTOP has stopped) and delete the folder."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
        for process in self._processes.values():
            process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _commands(parent: int) -> Any:
    """Yield commands until stdin ends or the parent is gone."""
    waiting = b""
    while True:
        ready, _, _ = select.select([0], [], [], _PARENT_CHECK_SECONDS)
        if ready:
            read = os.read(0, 65536)
            if not read:
                return
            *lines, waiting = (waiting + read).split(b"\n")
            yield from (json.loads(line) for line in lines)
        elif os.getppid() != parent:
            return


def main(folder: str, parent: int) -> None:
    """Serve until the parent closes the pipe or ends."""
    supervisor = BrokerSupervisor(folder)
    # Raises SystemExit wherever the loop is, so that ``finally`` runs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for command in _commands(parent):
            os.write(1, json.dumps(supervisor.handle(command)).encode() + b"\n")
    except BrokenPipeError:
        pass  # the parent ended before the reply was written
    finally:
        supervisor.end()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
