"""What a relay says to the coordinator for all tasks of its host, of one kind of message. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from kafka_sink.coordinator.transport.connection import MAX_ANEW
from kafka_sink.coordinator.transport.message_format import packed, unpacked
from kafka_sink.coordinator.transport.session import Message, dump
from kafka_sink.errors import ProtocolError


class ToTask(NamedTuple):
    """A message for a task: the reply to its message number ``request``, or a push where that is None."""

    task: int
    request: int | None
    body: Mapping[str, Any]


class Group:
    """Base of groups, each for one kind of message. A group overrides what it needs.

    Its tasks see a Handler in it, the coordinator a Channel. It has one message on its way at a time: the
    relay takes the next one when the last has been answered. So a coordinator that is slow gets fewer
    messages, which say the same. What is for tasks is put into ``outgoing``.

    The relay calls it on its thread. Times are monotonic milliseconds. An invalid message of a task raises
    ProtocolError, which ends the task and leaves the group's state unchanged.
    """

    kind: str

    def __init__(self) -> None:
        self.outgoing: deque[ToTask] = deque()
        # When the coordinator spoke last, of whatever.
        self.heard_ms = -math.inf

    def on_task(self, task: int, request: int, body: Mapping[str, Any], now_ms: float) -> bool:
        """Take a task's message. False: the relay must pass it on as it is, under the task's number."""
        raise NotImplementedError

    def on_task_left(self, task: int, now_ms: float) -> None:
        """The task has left, or passes its messages on from now on."""

    def due_ms(self, now_ms: float) -> float:
        """When ``next_message`` may have a message; infinite if only a task can bring one."""
        return math.inf

    def next_message(self, now_ms: float) -> Mapping[str, Any] | None:
        """The next message to the coordinator, if it is time for one."""
        return None

    def on_reply(self, body: Mapping[str, Any], took_ms: float, now_ms: float) -> None:
        """The coordinator has answered the last message after ``took_ms``."""

    def on_push(self, body: Mapping[str, Any], now_ms: float) -> None:
        """The coordinator has sent a message for all tasks."""


GroupFactory = Callable[[], Group]


class Groups:
    """All groups of one relay, and what they await of the coordinator. Messages of other kinds are not
    theirs."""

    def __init__(self, groups: Iterable[Group], now_ms: float) -> None:
        self._groups = {one.kind: one for one in groups}
        # Those whose last message has not been answered, by its number, and when it was sent.
        self._awaited: dict[int, tuple[Group, float]] = {}
        self._sent = 0
        self.hear(now_ms)

    def on_task(self, task: int, message: Message, now_ms: float) -> bool:
        """Take a task's message. False: the relay must pass it on. Raises ProtocolError."""
        kind, number, body = message.get("kind"), message.get("id"), message.get("body")
        group = self._groups.get(kind) if isinstance(kind, str) else None
        if group is None or not isinstance(number, int) or not isinstance(body, dict):
            return False
        return group.on_task(task, number, body, now_ms)

    def on_task_left(self, task: int, now_ms: float) -> None:
        """The task is gone."""
        for group in self._groups.values():
            group.on_task_left(task, now_ms)

    def for_tasks(self) -> Iterator[tuple[int, bytes]]:
        """Tasks and the messages for them."""
        for group in self._groups.values():
            # Hundreds of tasks get the same in turn.
            body, encoded = None, b""
            while group.outgoing:
                one = group.outgoing.popleft()
                if one.body is not body:
                    body, encoded = one.body, packed(dump(one.body))
                reply = {} if one.request is None else {"id": one.request, "last": True}
                yield one.task, dump({"kind": group.kind, **reply})[:-1] + b',"body":' + encoded + b"}"

    def due_ms(self, now_ms: float) -> float:
        """When ``messages`` has something to send; infinite if only a task or the coordinator can bring
        it."""
        awaited = [group for group, _ in self._awaited.values()]
        due = (group.due_ms(now_ms) for group in self._groups.values() if group not in awaited)
        return max(now_ms, min(due, default=math.inf))

    def messages(self, now_ms: float) -> Iterator[bytes]:
        """What to send to the coordinator now."""
        awaited = [group for group, _ in self._awaited.values()]
        for group in self._groups.values():
            body = None if group in awaited else group.next_message(now_ms)
            if body is not None:
                self._sent += 1
                self._awaited[self._sent] = group, now_ms
                yield dump({"id": self._sent, "kind": group.kind, "body": body})

    def on_coordinator(self, message: Message, now_ms: float) -> None:
        """Take the coordinator's message to the relay itself. Raises ProtocolError."""
        number, body = message.get("id"), message.get("body")
        if not isinstance(body, dict):
            raise ProtocolError("a message without body")
        if number is None:
            group = self._groups.get(message.get("kind", ""))
            if group is not None:
                group.on_push(unpacked(body), now_ms)
            return
        if number not in self._awaited:
            raise ProtocolError("a reply to no message")
        group, sent_ms = self._awaited.pop(number)
        group.on_reply(unpacked(body), now_ms - sent_ms, now_ms)

    def hear(self, now_ms: float) -> None:
        """The coordinator has said something, perhaps to tasks."""
        self._heard_ms, self._anew_left = now_ms, MAX_ANEW
        for group in self._groups.values():
            group.heard_ms = now_ms

    def unheard_since_ms(self) -> float:
        """Since when the coordinator has been silent although it should respond; infinite if it should
        not."""
        oldest_ms = min((sent_ms for _, sent_ms in self._awaited.values()), default=math.inf)
        return max(oldest_ms, self._heard_ms)

    def wait_anew(self, now_ms: float) -> None:
        """The relay stood still: the coordinator has all its time again."""
        if self._anew_left:
            self._anew_left -= 1
            self._heard_ms = now_ms
