"""The one backoff: its bounds, and that it grows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kafka_sink.clock import ExponentialBackoff

_MS = st.integers(0, 3_600_000)


@given(_MS, _MS, st.integers(0, 10_000), st.floats(0, 1, exclude_max=True))
def test_delays_double_up_to_the_maximum_with_a_fifth_of_jitter(
    base_ms: int, max_ms: int, attempts: int, drawn: float
) -> None:
    delay_ms = ExponentialBackoff(base_ms, max_ms, lambda: drawn).delay_ms(attempts)
    # The formula as broker connections had it, in floats and counting failures before this one.
    grown = min(base_ms * 2.0 ** min(max(attempts - 1, 0), 30), max(max_ms, base_ms))
    assert delay_ms == grown * (1 - 0.2 + 2 * 0.2 * drawn)


@given(_MS, _MS, st.integers(0, 50))
def test_without_luck_a_later_delay_is_never_shorter(base_ms: int, max_ms: int, attempts: int) -> None:
    backoff = ExponentialBackoff(base_ms, max_ms, lambda: 0.5)
    assert backoff.delay_ms(attempts) <= backoff.delay_ms(attempts + 1)
