"""A token from a function of the user's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from kafka_sink.errors import AuthenticationError
from kafka_sink.security.token import Token, TokenUnavailableError, from_text

_OPTION = "Option 'sasl.oauthbearer.token.provider'"


def load(path: str) -> Callable[[], Token]:
    """The function behind a dotted path, its result made a Token. Raises AuthenticationError where there is
    none; what the function raises becomes TokenUnavailableError, by its class alone: texts may be secret."""
    module_name, _, name = path.rpartition(".")
    if not module_name or not name:
        raise AuthenticationError(f"{_OPTION} = {path!r} is not module.function")
    try:
        found: Any = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise AuthenticationError(f"{_OPTION} = {path!r} cannot be imported here: {error}") from None
    if not callable(found):
        raise AuthenticationError(f"{_OPTION} = {path!r} is not a function")

    def fetch() -> Token:
        try:
            result = found()
        except Exception as error:  # noqa: BLE001 - whatever a user's function raises
            problem = type(error).__name__
        else:
            return _token(path, result)
        raise TokenUnavailableError(f"{_OPTION} = {path!r} raised {problem}")

    return fetch


def _token(path: str, result: Any) -> Token:
    if isinstance(result, str):
        return from_text(result)
    is_pair = isinstance(result, tuple) and len(result) == 2
    if is_pair and isinstance(result[0], str) and isinstance(result[1], int | float):
        return from_text(result[0], float(result[1]))
    raise AuthenticationError(
        f"{_OPTION} = {path!r} returned neither a text nor a pair of a text and the time it expires"
    )
