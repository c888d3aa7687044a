"""The reports of a write that has ended: summary line, final numbers in the live view, delivery report."""
