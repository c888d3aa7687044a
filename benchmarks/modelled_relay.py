"""A relay without sockets: the real code that adds up what tasks report, for models of the coordinator's
load."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kafka_sink.coordinator.process.relay_groups import RELAY_GROUPS
from kafka_sink.coordinator.transport.group import Groups
from kafka_sink.coordinator.transport.message_format import prefixed
from kafka_sink.coordinator.transport.session import dump, parse

# By task: kind, number of the message that it replies to, body.
Hear = Callable[[int, str, int | None, Mapping[str, Any]], None]


class ModelledRelay:
    """Of one executor. ``phase_ms``: its clock is so far behind, so that hosts do not report together.

    ``hear`` is called with what tasks receive.
    """

    def __init__(self, phase_ms: float, now_ms: float, hear: Hear = lambda *_: None) -> None:
        self._phase_ms = phase_ms
        self._hear = hear
        self._groups = Groups([make() for make in RELAY_GROUPS], now_ms - phase_ms)
        self._lines: list[bytes] = []
        # How long the coordinator took to reply.
        self.latencies: list[float] = []
        # Tasks whose messages are held, because the coordinator is silent.
        self.is_silent = False
        self._held: list[tuple[int, int, str, Mapping[str, Any]]] = []

    def say(self, task: int, number: int, kind: str, body: Mapping[str, Any], now_ms: float) -> None:
        """A task's message."""
        if self.is_silent:
            self._held.append((task, number, kind, body))
            return
        message = {"id": number, "kind": kind, "body": body}
        if not self._groups.on_task(task, message, now_ms - self._phase_ms):
            self._lines.append(prefixed((task,), dump(message)))
        self._deliver()

    def leave(self, task: int, now_ms: float) -> None:
        """A task has gone."""
        self._groups.on_task_left(task, now_ms - self._phase_ms)
        self._held = [one for one in self._held if one[0] != task]
        self._lines.append(prefixed((task,), b""))

    def due_ms(self, now_ms: float) -> float:
        """When it has something to send."""
        return now_ms if self._lines else self._groups.due_ms(now_ms - self._phase_ms) + self._phase_ms

    def payload(self, now_ms: float) -> bytes:
        """Of the next frame; empty if it has nothing to send."""
        lines, self._lines = self._lines, []
        return b"\n".join([*lines, *self._groups.messages(now_ms - self._phase_ms)])

    def receive(self, message: bytes, now_ms: float) -> None:
        """The coordinator's message to the relay itself."""
        found = parse(message)
        if "id" in found:
            self.latencies.append(now_ms - self._phase_ms - self._groups._awaited[found["id"]][1])
        self.hear(now_ms)
        self._groups.on_coordinator(found, now_ms - self._phase_ms)
        self._deliver()
        self.is_silent, held, self._held = False, self._held, []
        for one in held:
            self.say(*one, now_ms)

    def hear(self, now_ms: float) -> None:
        """The coordinator has said something, perhaps to its tasks."""
        self._groups.hear(now_ms - self._phase_ms)

    @property
    def heard_ms(self) -> float:
        """When the coordinator has said something last."""
        return self._groups._heard_ms + self._phase_ms

    def silent_ms(self, now_ms: float) -> float:
        """For how long the coordinator has not responded."""
        return now_ms - self._phase_ms - self._groups.unheard_since_ms()

    def _deliver(self) -> None:
        for task, message in self._groups.for_tasks():
            found = parse(message)
            self._hear(task, found["kind"], found.get("id"), found["body"])


def in_steps(until_ms: float, now_ms: float, step_ms: float) -> Iterator[float]:
    """Moments from now on."""
    while now_ms < until_ms:
        now_ms = min(until_ms, now_ms + step_ms)
        yield now_ms
