"""The Spark edge: what Spark calls, and the only modules that import pyspark."""
