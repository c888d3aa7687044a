"""What the side of Spark's driver needs: requests of planning, checks, warnings, its process and settings."""
