"""What a write reports when it ends: summary line, final numbers in the live view, delivery report."""
