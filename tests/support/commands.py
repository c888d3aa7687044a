"""Commands that tests run as processes of their own, with all that they print."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Less than pytest gives to a test, so that the output is shown.
_TIMEOUT_S = 280


def run(
    command: Sequence[object],
    environ: Mapping[str, str] | None = None,
    *,
    folder: Path | None = None,
    given: str = "",
    code: int | None = 0,
    timeout_s: float = _TIMEOUT_S,
) -> subprocess.CompletedProcess[str]:
    """Run it to its end, with ``given`` as its input. Fails the test, and shows its output, if it ends with
    another code; None stands for any."""
    __tracebackhide__ = True
    done = subprocess.run(
        [str(word) for word in command],
        env=environ,
        cwd=folder,
        input=given,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert code in (None, done.returncode), f"{done.returncode}\n{done.stdout}\n{done.stderr[-5000:]}"
    return done


def printed_by(code: str, environ: Mapping[str, str] | None = None, folder: Path | None = None) -> str:
    """Run this code in a new Python, without the indentation that its lines share; return its output."""
    return run([sys.executable, "-c", textwrap.dedent(code)], environ, folder=folder).stdout.strip()


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt here, and in Python processes that start here.

    A shell's background jobs ignore SIGINT, and so does all that they start. The tests may be such a job.
    Only for the main thread.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def start(command: Sequence[object], environ: Mapping[str, str], **more: Any) -> subprocess.Popen[str]:
    """Start it, with pipes for its output. SIGINT interrupts it, wherever the tests run."""
    with interruptible():
        return subprocess.Popen(
            [str(word) for word in command],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **more,
        )


def alive(pid: int) -> bool:
    """Whether a process runs. A zombie does not."""
    shown = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return shown.stdout.strip() != "" and not shown.stdout.strip().startswith("Z")
