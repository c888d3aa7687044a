"""A task's side of one kind of message, which the coordinator's client serves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any


class Channel:
    """Base of channels; a channel overrides what it needs. Methods must not block.

    The client calls them on its own thread, except for ``attach``. Times are monotonic milliseconds.
    """

    kind: str

    def __init__(self) -> None:
        self._wake: Callable[[], None] = lambda: None

    def attach(self, wake: Callable[[], None]) -> None:
        """Called once, before the thread starts. ``wake``, from any thread, triggers ``next_message``."""
        self._wake = wake

    def next_message(self, now_ms: float) -> Mapping[str, Any] | None:
        """The next message to send, or None. Called again until it returns None."""
        return None

    def hurry(self) -> None:
        """The task ends: ``next_message`` must return messages at once that it would have delayed."""

    def next_message_delay_ms(self, now_ms: float) -> float:
        """Milliseconds until ``next_message`` may have a message; infinite if only ``wake`` can bring one."""
        return math.inf

    def left_delay_ms(self, now_ms: float) -> float:
        """The same between tasks, for what a task has left to be sent."""
        return math.inf

    def close(self) -> None:
        """The process ends: ``next_message`` must return what is left."""

    def on_reply(self, body: Mapping[str, Any], last: bool, now_ms: float) -> None:
        """Handle a reply. Raises ProtocolError for an invalid one, which closes the connection."""

    def on_push(self, body: Mapping[str, Any], now_ms: float) -> None:
        """Handle a push, which may come once a message of this kind was sent. Raises as ``on_reply``."""

    def on_connected(self, now_ms: float) -> None:
        """Connected to a coordinator that knows nothing of this client."""

    def on_lost(self, now_ms: float) -> None:
        """The connection is lost. Pending messages get no reply; work alone until ``on_connected``."""
