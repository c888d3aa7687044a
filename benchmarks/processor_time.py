"""Processor time of processes, read from the outside (Linux)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from tests.support.processes import below, command_of, processes

_COORDINATOR = "kafka_sink.coordinator."


@dataclass(frozen=True)
class ProcessorTime:
    """Seconds in user and system mode by process: the driver's JVM, the Python processes below it, the
    coordinator."""

    jvm: Mapping[int, float]
    python: Mapping[int, float]
    coordinator: Mapping[int, float]

    def since(self, earlier: ProcessorTime) -> dict[str, float]:
        """Seconds from then to now. What processes used that have ended meanwhile is missing."""
        return {
            "jvm": grown(self.jvm, earlier.jvm),
            "python": grown(self.python, earlier.python),
            "coordinator": grown(self.coordinator, earlier.coordinator),
        }


def grown(now: Mapping[int, float], then: Mapping[int, float]) -> float:
    """The processor time that the processes have used since then."""
    return sum(seconds - then.get(process, 0.0) for process, seconds in now.items())


def of_spark(jvm: int) -> ProcessorTime:
    """The processor time of a Spark in local mode so far. ``jvm`` is the process id of its driver.

    Workers that have ended are missing: their daemon ignores SIGCHLD, so no process gets their time.
    """
    known = processes()
    coordinator = {
        pid: one.own_s
        for pid, one in known.items()
        if any(word.startswith(_COORDINATOR) for word in command_of(pid))
    }
    python = {pid: one.own_s for pid, one in below(jvm).items() if pid not in coordinator}
    return ProcessorTime({jvm: known[jvm].own_s}, python, coordinator)


def of_process(process: int) -> float:
    """The processor time of one process so far, without its children."""
    return processes()[process].own_s


class Meter:
    """Processor time since its creation: of Spark with its Python processes, and apart of the brokers."""

    def __init__(self, jvm: int, brokers: Collection[int]) -> None:
        self._jvm, self._brokers = jvm, brokers
        self._spark, self._servers = of_spark(jvm), self._of_brokers()

    def _of_brokers(self) -> float:
        return sum(map(of_process, self._brokers))

    def read(self) -> tuple[float, float]:
        """Seconds of Spark, and of the brokers."""
        return sum(of_spark(self._jvm).since(self._spark).values()), self._of_brokers() - self._servers
