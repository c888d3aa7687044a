"""One process on the driver's host that knows for all tasks what each of them would have to find out."""
