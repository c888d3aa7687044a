"""The sink's lines in Spark's logs."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Iterator

import pyarrow as pa
import pytest

from kafka_sink.driver import driver_log
from tests.support.planned_writes import planned

pytestmark = pytest.mark.usefixtures("bare_logging")


def test_warnings_of_a_task_have_time_level_and_host(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches: bare texts of many tasks in the stderr of an executor."""
    planned().write(warned_of())
    line = capsys.readouterr().err
    assert re.fullmatch(
        rf"\d\d/\d\d/\d\d [\d:]+ WARNING kafka-chunked on {socket.gethostname()}: a broker is slow\n", line
    )


def warned_of() -> Iterator[pa.RecordBatch]:
    """A task's rows, of which there are none."""
    driver_log.LOGGER.warning("a broker is slow")
    yield from ()


@pytest.mark.parametrize(("level", "expected"), [(logging.NOTSET, ["line"]), (logging.ERROR, [])])
def test_a_users_own_logging_is_left_alone(
    level: int, expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    driver_log.LOGGER.addHandler(Keep())
    driver_log.LOGGER.setLevel(level)
    driver_log.report("line")
    assert lines == expected
    assert driver_log.LOGGER.level == level
    assert capsys.readouterr().err == ""
