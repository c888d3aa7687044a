"""What a write reports when it ends: its summary line, its final numbers in the live view, the delivery
report."""
