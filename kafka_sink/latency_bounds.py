"""The buckets of request latencies, which tasks count and the live view shows."""

# Upper bounds in milliseconds. One more bucket has no bound.
LATENCY_BOUNDS_MS = (
    *(5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0),
    *(1_000.0, 2_500.0, 5_000.0, 10_000.0, 30_000.0),
)
