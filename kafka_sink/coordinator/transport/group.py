"""What a relay says to the coordinator for all tasks of its host, of one kind of message. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple


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
