"""Scripts that start a Spark session of their own, run in this process on the session of the test run.

A driver's JVM costs seconds of processor time. What is not tried so is the script's own start: for each kind
of script, a test runs one from the command line.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def lend(spark: SparkSession, patch: pytest.MonkeyPatch) -> None:
    """What is built until ``patch`` is undone is a session with settings of its own on the same context.

    ``stop`` does nothing. Settings that hold for a whole application, such as the master, stay as they are.
    """
    from pyspark.sql import SparkSession as Session

    def get_or_create(builder: Session.Builder) -> SparkSession:
        lent = spark.newSession()
        for name, value in builder._options.items():
            if lent.conf.isModifiable(name):
                lent.conf.set(name, value)
        return lent

    patch.setattr(Session.Builder, "getOrCreate", get_or_create)
    patch.setattr(Session, "stop", lambda session: None)
