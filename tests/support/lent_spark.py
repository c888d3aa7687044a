"""Scripts that start a Spark session of their own, run in this process on the session of the test run.

A driver's JVM costs seconds of processor time. What is not tried so is the script's own start: for each kind
of script, a test runs one from the command line.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextlib.contextmanager
def lent(spark: SparkSession, *, with_packages: bool = True) -> Iterator[None]:
    """Sessions built meanwhile have settings and packages of their own on the same context.

    Without ``with_packages`` no packages are fetched. ``stop`` does nothing. Settings that hold for a whole
    application, such as the master, stay as they are.
    """
    from pyspark.sql import SparkSession as Session

    def get_or_create(builder: Session.Builder) -> SparkSession:
        session = spark.newSession()
        packages = builder._options.get("spark.jars.packages", "") if with_packages else ""
        for package in filter(None, packages.split(",")):
            session.sql(f"ADD JAR 'ivy://{package}'")
        for name, value in builder._options.items():
            if session.conf.isModifiable(name):
                session.conf.set(name, value)
        _activate(session)
        return session

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Session.Builder, "getOrCreate", get_or_create)
        patch.setattr(Session, "stop", lambda session: None)
        try:
            yield
        finally:
            _activate(spark)


def _activate(session: SparkSession) -> None:
    """Spark finds a script's own data sources in the active session only; ``newSession`` does not set it."""
    session.createDataFrame([], "value string")
