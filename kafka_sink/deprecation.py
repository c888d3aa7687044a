"""Marks functions that a later version removes."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_Given = ParamSpec("_Given")
_Returned = TypeVar("_Returned")


def deprecated(
    since: str, removed_in: str, instead: str
) -> Callable[[Callable[_Given, _Returned]], Callable[_Given, _Returned]]:
    """A decorator: each call of the function warns its caller with a DeprecationWarning.

    Args:
        since: The version that deprecated the function.
        removed_in: The version that removes it. From this version on, a test fails until it is removed.
        instead: What to use, as the end of the sentence "Use ...".
    """

    def decorate(function: Callable[_Given, _Returned]) -> Callable[_Given, _Returned]:
        name = f"{function.__module__}.{function.__qualname__}"
        text = f"{name} is deprecated since {since}, and {removed_in} removes it. Use {instead}"

        @functools.wraps(function)
        def warn_and_call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Returned:
            warnings.warn(text, DeprecationWarning, stacklevel=2)
            return function(*args, **kwargs)

        return warn_and_call

    return decorate
