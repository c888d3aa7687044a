"""Explains imports that fail because Spark limits the address space of its Python workers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kafka_sink.errors import KafkaSinkError

# What the dynamic loader and the kernel say: dlopen, mmap, malloc.
_SIGNS = (
    "failed to map segment",
    "cannot allocate memory",
    "unable to allocate",
    "cannot map zero-fill pages",
)


def explanation(error: BaseException) -> str | None:
    """What to do about this error; None if it is not about memory."""
    text = str(error)
    if not isinstance(error, MemoryError) and not any(sign in text.lower() for sign in _SIGNS):
        return None
    return (
        f"this Python process may not use the memory its libraries need ({text or type(error).__name__}). "
        "Spark limits its address space: raise spark.executor.pyspark.memory (tasks) or "
        "spark.sql.planner.pythonExecution.memory (planning and commit), or leave them unset"
    )


@contextmanager
def explained() -> Iterator[None]:
    """For imports. Raises KafkaSinkError in place of an error about memory."""
    try:
        yield
    except (ImportError, MemoryError, OSError) as error:
        text = explanation(error)
        if text is None:
            raise
        raise KafkaSinkError(text) from None
