"""The live view and /metrics: the reports of tasks and of the driver, their sums, and the pages."""
