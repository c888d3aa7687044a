"""Objects that live as long as their process, and that a forked child must not share with its parent."""

from __future__ import annotations

import os
import threading
from collections.abc import MutableMapping
from typing import Any, Generic, TypeVar

_Entries = TypeVar("_Entries", bound=MutableMapping[Any, Any])


class ProcessEntries(Generic[_Entries]):
    """The entries of this process, and the lock that guards them.

    A forked child begins without entries, because their threads, sockets and memory are its parent's. It has
    a new lock, because another thread of the parent may have held the lock during the fork.
    """

    def __init__(self, entries: _Entries) -> None:
        self.entries = entries
        self.lock = threading.Lock()
        # The handler can never be unregistered, so this object must live as long as the process anyway.
        os.register_at_fork(after_in_child=self._after_fork)

    def _after_fork(self) -> None:
        self.lock = threading.Lock()
        self.entries.clear()
