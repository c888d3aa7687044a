"""The classes that Spark calls. No other package imports pyspark."""
