"""Types of fixtures that change the environment which other libraries read: see conftest.py."""

from __future__ import annotations

from collections.abc import Callable

# Sets variables, by name, and removes those that are None.
Environ = Callable[..., None]
# Puts substitutes in the place of packages, by name; None: the package is not installed.
Modules = Callable[..., None]
