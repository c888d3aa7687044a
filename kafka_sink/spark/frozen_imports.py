"""Keeps what a worker has imported out of garbage collections.

PySpark's daemon runs a full collection after everything that a reused worker does: planning, a task or a
commit. It looks at each object of each imported module. With pandas, Arrow and this package that takes 40 ms
of processor time after a task and 12 ms after planning or a commit (Python 3.11): together 100 ms for a
micro-batch of two tasks, more than everything else that its Python processes do.
"""

from __future__ import annotations

import gc
import sys

_DAEMON = "pyspark.daemon"
_calls = 0


def freeze_when_reused() -> None:
    """Called at the start of planning, a task or a commit. The second call in a process exempts all present
    objects from garbage collections.

    Everything is imported by then (PySpark imports pandas at the end of the first task), and the daemon has
    just collected the garbage. The objects are still freed when nothing refers to them any more. Only
    reference cycles among them stay. Elsewhere than in a worker of the daemon, nothing happens.
    """
    global _calls
    _calls += 1
    if _calls == 2 and _is_forked_by_daemon():
        gc.freeze()


def _is_forked_by_daemon() -> bool:
    main = getattr(sys.modules["__main__"], "__spec__", None)
    return _DAEMON in sys.modules or (main is not None and main.name == _DAEMON)
