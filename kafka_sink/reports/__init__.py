"""What a write reports when it ends: its summary line, the live view's last report, the delivery report."""
