"""How slow the machine is just now: what to allow for where a test must measure time."""

from __future__ import annotations

import threading
import time

_STEP_S = 0.01


class Stalls:
    """Measures, while its block runs, how much later than asked a thread wakes up.

    ``longest_s`` is the longest such delay: next to nothing on an idle machine.
    """

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._measure, name="stalls", daemon=True)

    def __enter__(self) -> Stalls:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _measure(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            time.sleep(_STEP_S)
            self.longest_s = max(self.longest_s, time.monotonic() - began - _STEP_S)
