"""Shortens errors for Spark's users to the cause and what to do.

Spark prints the traceback of a Python error once for the driver and three times for each failed task, and
PySpark prints it twice more as the driver's exception. If the message already has what to change, the frames
only hide it. On the driver, the message is also logged, as one line.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from kafka_sink import libraries
from kafka_sink.driver import driver_log
from kafka_sink.errors import BufferOwnershipError, KafkaSinkError, ProducerClosedError, ProtocolError
from kafka_sink.printable import one_line

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)
# These errors are bugs, in this package or in a broker, and frames help to find them.
_WITH_FRAMES = (BufferOwnershipError, ProducerClosedError, ProtocolError)
# If this variable is set, PySpark's worker formats its last exception without frames. The worker then ends.
_WITHOUT_FRAMES = "SPARK_HIDE_TRACEBACK"
# The maximum number of characters in a log line.
_MAX_LINE = 4000


def logged_on_driver(
    call: Callable[Concatenate[Any, _Arguments], _Result],
) -> Callable[Concatenate[Any, _Arguments], _Result]:
    """For methods that Spark calls on the driver. Like ``short_tracebacks``, but also logs the error.

    The method's object has a ``subject``: the checkpoint of a stream, or "" for batch writes.
    """
    shortened = short_tracebacks(call)

    @functools.wraps(call)
    def called_on_driver(self: Any, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return shortened(self, *args, **kwargs)
        except Exception as error:
            stream = f", stream with checkpointLocation={self.subject}" if self.subject else ""
            log_failure(f"kafka-chunked{stream}: {message_of(error)}")
            raise

    return called_on_driver


def log_failure(line: str) -> None:
    driver_log.error(one_line(line, _MAX_LINE))


def message_of(error: Exception) -> str:
    """The error's message on one line, with the type in front unless it is an error of this package."""
    text = str(error) if isinstance(error, KafkaSinkError) else f"{type(error).__name__}: {error}"
    return one_line(text, _MAX_LINE)


def short_tracebacks(call: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """For methods that Spark calls. PySpark shows errors of this package without frames.

    The whole traceback is logged at DEBUG. The error for a missing library becomes a KafkaSinkError with the
    pip command to install it.
    """

    @functools.wraps(call)
    def called_by_spark(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return call(*args, **kwargs)
        except _WITH_FRAMES:
            raise
        except KafkaSinkError as error:
            _log.debug("the whole traceback of the error that follows", exc_info=error)
            cause = error.__cause__
            # The message already quotes a cause of this package. A cause in the user's code, such as a
            # circuit breaker class, is kept, and so is a bug.
            if isinstance(cause, KafkaSinkError) and not (isinstance(cause, _WITH_FRAMES) or cause.__cause__):
                cause = None
            if cause is None:
                os.environ[_WITHOUT_FRAMES] = "1"
            raise error.with_traceback(None) from cause
        except ModuleNotFoundError as error:
            text = libraries.explanation(error)
            if text is None:
                raise
            os.environ[_WITHOUT_FRAMES] = "1"
            raise KafkaSinkError(text) from None

    return called_by_spark
