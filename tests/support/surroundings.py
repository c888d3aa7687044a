"""What tests change in their own process: see the fixtures in conftest.py."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

# Sets variables, by name, and removes those that are None.
Environ = Callable[..., None]
# Puts substitutes in the place of packages, by name; None: the package is not installed.
Modules = Callable[..., None]

_MODULES: dict[str, ModuleType] = {}


def replaced_modules() -> list[str]:
    """The package's modules that a test imported a second time; its successors get the first again.

    After such a test, the entry in ``sys.modules`` and the attribute of the parent package can be two
    modules. A test that patches one of them by its name would not patch the one that is in use.
    """
    imported = {name: module for name, module in sys.modules.copy().items() if name.startswith("kafka_sink.")}
    replaced = []
    for name, module in imported.items():
        parent, _, child = name.rpartition(".")
        first = _MODULES.setdefault(name, module)
        # A function of the package can have the name of one of its modules.
        attribute = getattr(sys.modules[parent], child, None)
        if first is not module or (isinstance(attribute, ModuleType) and attribute is not first):
            replaced.append(name)
            sys.modules[name] = first
            setattr(sys.modules[parent], child, first)
    return replaced
