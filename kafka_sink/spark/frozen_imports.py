"""Keeps what a worker has imported out of garbage collections.

PySpark's daemon runs a full collection after everything that a reused worker does: planning, a task or a
commit. It looks at each object of each imported module. With pandas, Arrow and this package that takes 40 ms
of processor time after a task and 12 ms after planning or a commit (Python 3.11): together 100 ms for a
micro-batch of two tasks, more than everything else that its Python processes do.
"""

from __future__ import annotations

import gc

_is_frozen = False


def freeze_imports() -> None:
    """Exempt all present objects from garbage collections, at the first call in a process.

    Objects are still freed when nothing refers to them; only reference cycles among the present objects stay.
    Call it once everything is imported and nothing else was created.
    """
    global _is_frozen
    if not _is_frozen:
        gc.freeze()
        _is_frozen = True
