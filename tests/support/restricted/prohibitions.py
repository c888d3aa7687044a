"""Makes Python processes behave as in a place that forbids what this package uses where it is allowed.

KAFKA_CHUNKED_TEST_FORBIDDEN lists what is forbidden, and KAFKA_CHUNKED_TEST_BROKERS the ports to which tasks
may connect. Spark's workers inherit both variables, and find ``sitecustomize`` next to this file on their
PYTHONPATH. Spark itself may do everything: a call is forbidden unless PySpark or Py4J is the nearest caller
outside the standard library. What C code does, such as OpenSSL and Arrow, is not seen.
"""

from __future__ import annotations

import errno
import inspect
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any

FORBIDDEN, BROKERS = "KAFKA_CHUNKED_TEST_FORBIDDEN", "KAFKA_CHUNKED_TEST_BROKERS"
# A line of this and the rule's name goes to the log for each call that was refused.
REFUSED = "refused by the test:"
_TASKS = "pyspark.worker"
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_FOLDER = os.path.dirname(os.path.abspath(__file__))
_SPARKS = ("/pyspark/", "/py4j", "/grpc")
_PROCESSES = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "os.exec")
_ONE_PATH = ("os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.truncate")
_TWO_PATHS = ("os.rename", "os.link", "os.symlink")
_Rule = Callable[[str, tuple[Any, ...]], None]


def obey(environ: MutableMapping[str, str]) -> None:
    """From now on this process, and each that it forks, obeys the rules that the variable lists."""
    names = [name for name in environ.get(FORBIDDEN, "").split(",") if name]
    if "local-dirs" in names:
        environ.pop("SPARK_LOCAL_DIRS", None)
    brokers = {int(port) for port in environ.get(BROKERS, "").split(",") if port}
    rules: dict[str, _Rule] = {
        "processes": _no_process,
        "ports": _no_port,
        "folders": _no_folder,
        "proc": _no_proc,
        "coordinator": lambda event, arguments: _no_connection(event, arguments, brokers),
    }
    obeyed = [rules[name] for name in names if name in rules]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        for rule in obeyed:
            rule(event, arguments)

    if obeyed:
        sys.addaudithook(hook)


def _no_process(event: str, _: tuple[Any, ...]) -> None:
    """A filter of system calls forbids new processes."""
    if event in _PROCESSES:
        _refuse("processes", errno.EPERM)


def _no_port(event: str, _: tuple[Any, ...]) -> None:
    """Python reports no ``listen``, but each listening socket has been bound before."""
    if event == "socket.bind":
        _refuse("ports", errno.EACCES)


def _no_folder(event: str, arguments: tuple[Any, ...]) -> None:
    """Only the working directory can be written to."""
    if event in _TWO_PATHS:
        changed = arguments[:2]
    elif event in _ONE_PATH or (event == "open" and (arguments[2] or 0) & _WRITING):
        changed = arguments[:1]
    else:
        return
    here = os.getcwd() + os.sep
    for path in _paths(changed):
        if path != os.devnull and not path.startswith(here):
            _refuse("folders", errno.EROFS, path)


def _no_proc(event: str, arguments: tuple[Any, ...]) -> None:
    if event in ("open", "os.listdir", "os.scandir"):
        for path in _paths(arguments[:1]):
            if path.startswith(("/proc/", "/dev/fd/")):
                _refuse("proc", errno.EACCES, path)


def _no_connection(event: str, arguments: tuple[Any, ...], brokers: set[int]) -> None:
    """A firewall drops what tasks send to any address but the brokers'."""
    if event == "socket.connect" and sys.orig_argv[-1] == _TASKS:
        connecting, address = arguments
        if isinstance(address, tuple) and address[1] not in brokers and not _is_spark():
            print(REFUSED, "coordinator", file=sys.stderr, flush=True)
            time.sleep(connecting.gettimeout() or 0)
            raise TimeoutError("timed out")


def _paths(arguments: Iterable[Any]) -> Iterator[str]:
    """The paths among the arguments. A descriptor is also allowed there."""
    for argument in arguments:
        if isinstance(argument, (str, bytes, os.PathLike)):
            yield os.path.abspath(os.fsdecode(argument))


def _refuse(rule: str, number: int, path: str | None = None) -> None:
    if not _is_spark():
        print(REFUSED, rule, file=sys.stderr, flush=True)
        raise OSError(number, os.strerror(number), path)


def _is_spark() -> bool:
    """Whether the nearest caller outside the standard library and this file is Spark's, or Python itself."""
    frame = inspect.currentframe()
    while frame is not None:
        file = frame.f_code.co_filename
        is_standard = file.startswith(("<", _STANDARD)) and "-packages" not in file
        if not is_standard and os.path.dirname(file) != _FOLDER:
            return any(name in file for name in _SPARKS)
        frame = frame.f_back
    return True
