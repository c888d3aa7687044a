"""What happened to an application, in the order in which it happened: for whoever looks later.

The events follow from what the live view shows anyway, once a second, so nobody has to report them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kafka_sink.printable import printable

MAX_EVENTS = 50
_MAX_TEXT = 400
# Dead letters that go on are one event, until none has come for this long.
_QUIET_S = 60.0


@dataclass(frozen=True, slots=True)
class Event:
    """``time_s``: seconds since the epoch. ``level``: good, info, warn or bad."""

    time_s: float
    level: str
    text: str


class EventLog:
    """The last events. Belongs to the coordinator's loop."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._mutes: dict[str, float] = {}
        self._jobs: dict[str, str] = {}
        self._count = 0
        self._letters = 0
        self._letters_s = -_QUIET_S

    def observe(
        self,
        now_s: float,
        mutes: Iterable[Mapping[str, Any]],
        jobs: Mapping[str, tuple[str, str, str]],
        letters: int,
    ) -> None:
        """``mutes`` as the snapshot lists them. ``jobs``: each one's name, state and cause of an abort, by
        its key. ``letters``: dead letters so far."""
        self._observe_mutes(now_s, mutes)
        self._observe_jobs(now_s, jobs)
        if letters > self._letters:
            if now_s - self._letters_s >= _QUIET_S:
                self.note(now_s, "warn", f"dead letters: {letters - self._letters:,} (in all {letters:,})")
            self._letters, self._letters_s = letters, now_s

    def _observe_mutes(self, now_s: float, mutes: Iterable[Mapping[str, Any]]) -> None:
        present = {f"{mute['kind']} {mute['target']}": mute for mute in mutes}
        for name, mute in present.items():
            if name not in self._mutes:
                self._mutes[name] = now_s - mute["seconds"]
                self.note(self._mutes[name], "bad", f"{name} muted: {mute['reason']}")
        for name in self._mutes.keys() - present.keys():
            self.note(now_s, "good", f"{name} unmuted after {now_s - self._mutes.pop(name):.0f} s")

    def _observe_jobs(self, now_s: float, jobs: Mapping[str, tuple[str, str, str]]) -> None:
        levels = {"committed": "good", "aborted": "bad", "lost": "warn"}
        for key, (name, state, cause) in jobs.items():
            if self._jobs.get(key) != state:
                why = f": {cause}" if cause and state in ("aborted", "lost") else ""
                self.note(now_s, levels.get(state, "info"), f"{name} {state}{why}")
        self._jobs = {key: state for key, (_, state, _) in jobs.items()}

    def note(self, time_s: float, level: str, text: str) -> None:
        """Something else has happened."""
        self._count += 1
        self._events.append(Event(time_s, level, printable(text, _MAX_TEXT)))

    def since(self, seen: int) -> list[dict[str, Any]]:
        """Events but the first ``seen`` of all, as far as they are kept, the oldest first."""
        return self.shown()[: max(0, self._count - seen)][::-1]

    def shown(self) -> list[dict[str, Any]]:
        return [{"time": one.time_s, "level": one.level, "text": one.text} for one in reversed(self._events)]
