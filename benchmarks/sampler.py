"""A thread that looks at something while a block runs."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from typing import Any


class Sampler(threading.Thread, ABC):
    """Calls ``sample`` every ``every_s`` seconds from the block's begin to its end."""

    def __init__(self, name: str, every_s: float) -> None:
        super().__init__(name=name, daemon=True)
        self._every_s = every_s
        self._ended = threading.Event()

    def __enter__(self) -> Any:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join()

    def run(self) -> None:
        """The thread's body."""
        while not self._ended.wait(self._every_s):
            self.sample()

    @abstractmethod
    def sample(self) -> None:
        """Take one sample."""
