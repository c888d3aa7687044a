"""The live view and /metrics: what tasks and the driver report, its sums, and the pages."""
