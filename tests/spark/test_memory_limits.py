"""A Python worker whose address space Spark limits too tightly says which setting does that."""

from __future__ import annotations

import sys
import textwrap

import pytest

from kafka_sink.errors import KafkaSinkError
from kafka_sink.spark.worker import explained
from tests.support.commands import run

_TASK = """
    import resource
    from kafka_sink.options import parse
    from kafka_sink.rows.column_plan import ColumnPlan
    from kafka_sink.spark.write import PlannedWrite
    options = parse({"kafka.bootstrap.servers": "127.0.0.1:1", "topic": "t"}).options
    planned = PlannedWrite(options, ColumnPlan.of([("value", "string")], "t"))
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (20 << 20),) * 2)
    planned.write(iter([]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space, as Spark sets them")
def test_a_task_that_may_not_load_arrow_names_the_setting(project_environment: dict[str, str]) -> None:
    """Catches: "libarrow.so.2300: failed to map segment from shared object", and nothing else."""
    done = run([sys.executable, "-c", textwrap.dedent(_TASK)], project_environment, code=1)
    assert "spark.executor.pyspark.memory" in done.stderr.splitlines()[-1], done.stderr
    assert "failed to map segment" in done.stderr.splitlines()[-1]
    assert done.stderr.count("Traceback (most recent call last)") == 1


def test_other_errors_of_imports_stay_as_they_are() -> None:
    with pytest.raises(ImportError, match="no such module"), explained():
        raise ImportError("no such module")
    with pytest.raises(KafkaSinkError, match=r"MemoryError.*pythonExecution"), explained():
        raise MemoryError
