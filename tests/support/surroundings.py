"""Types of fixtures that change what other libraries read of this process: see conftest.py."""

from __future__ import annotations

from collections.abc import Callable

# Sets variables, by name, and removes those that are None.
Environ = Callable[..., None]
# Puts others in the place of packages, by name; None: it is not installed.
Modules = Callable[..., None]
