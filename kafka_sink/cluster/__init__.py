"""What a producer keeps about its cluster: metadata, and an object for each broker, partition and batch."""
