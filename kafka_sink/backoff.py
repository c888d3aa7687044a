"""Growing waits between attempts."""

from __future__ import annotations

from collections.abc import Callable

_JITTER = 0.2


class ExponentialBackoff:
    """``base_ms`` doubled at each attempt up to ``max_ms``, +-20 % (KIP-580)."""

    def __init__(self, base_ms: float, max_ms: float, random: Callable[[], float]) -> None:
        self._base_ms = base_ms
        self._max_ms = max(max_ms, base_ms)
        self._random = random

    def delay_ms(self, attempts: int) -> float:
        """The wait after ``attempts`` attempts."""
        grown = min(self._base_ms * (1 << min(max(attempts - 1, 0), 30)), self._max_ms)
        return grown * (1 - _JITTER + 2 * _JITTER * self._random())
