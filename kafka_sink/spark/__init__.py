"""The classes that Spark calls. Only these modules import pyspark."""
