"""Imports modules of kafka-python without what its package imports.

``import kafka.protocol.metadata`` first runs ``kafka/__init__.py``, which imports kafka-python's consumer,
producer and admin client: 0.1 s of processor time in each Python worker (kafka-python 3.0). None of it is
used here. ``install`` puts a package ``kafka`` in place that runs this file when somebody asks for one of its
names.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NAME = "kafka"
# The thread that runs the package's code may wait for a module that another thread imports, which asks here.
_MAX_WAIT_S = 10.0


def install() -> None:
    """Postpone the package's own code, unless the package was already imported."""
    if _NAME in sys.modules:
        return
    spec = importlib.util.find_spec(_NAME)
    # A namespace package or none: the import reports what is wrong.
    if spec is not None and spec.loader is not None and spec.submodule_search_locations is not None:
        sys.modules[_NAME] = _LazyPackage(spec)


class _LazyPackage(ModuleType):
    """A package whose ``__init__.py`` runs when an attribute is missing. Modules below it import as ever."""

    def __init__(self, spec: ModuleSpec) -> None:
        super().__init__(spec.name)
        self.__spec__ = spec
        self.__loader__ = spec.loader
        self.__package__ = spec.name
        self.__path__ = list(spec.submodule_search_locations or ())
        self.__file__ = spec.origin
        self._has_run = False
        # Reentrant: modules that the code imports ask for names of the package, as in any circular import.
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        # Without the lock: as in a circular import, what is there so far.
        if self._lock.acquire(timeout=_MAX_WAIT_S):
            try:
                if not self._has_run:
                    self._has_run = True
                    self._run()
            except ImportError as error:
                # For hasattr and getattr with a default.
                raise AttributeError(
                    f"module {self.__name__!r} has no attribute {name!r}: it cannot be imported: {error}"
                ) from error
            finally:
                self._lock.release()
        try:
            return self.__dict__[name]
        except KeyError:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}") from None

    def _run(self) -> None:
        assert self.__spec__ is not None
        assert self.__spec__.loader is not None
        try:
            self.__spec__.loader.exec_module(self)
        except BaseException:
            self._has_run = False
            raise
