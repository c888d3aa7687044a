"""Errors as Spark's users see them: the cause and what to do, in few lines.

Spark prints the traceback of an error in Python once for the driver and three times for each failed task, and
PySpark prints it twice more as the driver's exception. Where the message says what to change, frames of this
package only hide it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from kafka_sink import libraries
from kafka_sink.errors import BufferOwnershipError, KafkaSinkError, ProducerClosedError, ProtocolError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_log = logging.getLogger(__name__)
# Bugs, here or in a broker: their frames say where.
_WITH_FRAMES = (BufferOwnershipError, ProducerClosedError, ProtocolError)


def short_tracebacks(call: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """For methods that Spark calls. Errors of this package leave them with one frame.

    The whole traceback is logged at DEBUG. A library that is missing becomes a KafkaSinkError that names the
    line for pip.
    """

    @functools.wraps(call)
    def called_by_spark(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return call(*args, **kwargs)
        except _WITH_FRAMES:
            raise
        except KafkaSinkError as error:
            _log.debug("the whole traceback of the error that follows", exc_info=error)
            raise error.with_traceback(None) from _cause_to_show(error)
        except ModuleNotFoundError as error:
            text = libraries.explanation(error)
            if text is None:
                raise
            raise KafkaSinkError(text) from None

    return called_by_spark


def _cause_to_show(error: KafkaSinkError) -> BaseException | None:
    """None for a cause of this package, because the message quotes it.

    A cause in the user's own code, such as a circuit breaker class, stays. So does a bug.
    """
    cause = error.__cause__
    if isinstance(cause, KafkaSinkError) and not isinstance(cause, _WITH_FRAMES) and cause.__cause__ is None:
        return None
    return cause
