"""What is muted for one producer: by its own breaker class, and by the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kafka_sink.breaker.states import NO_EVIDENCE, Evidence, MuteChange, MuteTable, Target, ongoing_mute


class LocalMutes:
    """Mutes with their origin, and the changes that have not been taken yet.

    The sender's thread calls it and sets ``now_ms`` (monotonic) first. Any thread may read ``table.mutes``.
    """

    def __init__(self, retry_interval_ms: float) -> None:
        self.now_ms = 0.0
        self.table = MuteTable(retry_interval_ms)
        # Mutes that this producer's breaker class decided, over its life.
        self.own_trips = 0
        # Called with each target that is unmuted.
        self.on_unmuted: Callable[[Target], None] = lambda _: None
        self._coordinated = False
        # The coordinator's mutes, as of its last message, and the mutes of this task's breaker class.
        self._shared: frozenset[Target] = frozenset()
        self._own: dict[Target, MuteChange] = {}
        self._changes: list[MuteChange] = []
        self._closed = False

    def mute(self, target: Target, reason: str, evidence: Evidence = NO_EVIDENCE, *, own: bool) -> None:
        """Mute a target, unless it is muted. ``own``: the breaker class here decided it."""
        if not self._closed and self.table.trip(target, reason, self.now_ms):
            change = MuteChange(target, True, reason, own, evidence)
            self._changes.append(change)
            if own:
                self.own_trips += 1
                self._own[target] = change

    def unmute(self, target: Target, reason: str, *, own: bool) -> None:
        """Unmute a target, if it is muted."""
        if self.table.reset(target):
            self._note_unmute(target, reason, own=own)

    def unmute_all(self, reason: str) -> None:
        """Unmute everything. The coordinator is not to hear of it."""
        for target in list(self.table.mutes):
            self.unmute(target, reason, own=False)

    def succeed(self, target: Target, reason: str) -> None:
        """A probe of a target succeeded: unmutes it."""
        if self.table.succeed(target):
            self._note_unmute(target, reason, own=True)

    def _note_unmute(self, target: Target, reason: str, *, own: bool) -> None:
        self._own.pop(target, None)
        # Until the coordinator hears of this, its messages still mean the mute that has just ended.
        self._shared -= {target}
        self.on_unmuted(target)
        self._changes.append(MuteChange(target, False, reason, own))

    def apply_shared(self, muted: Mapping[Target, str]) -> None:
        """Take all of the coordinator's mutes, with their reasons.

        A mute of this task that the coordinator does not know, or does not share, goes on.
        """
        self._coordinated = True
        for target in self._shared - muted.keys():
            self.unmute(target, "another task's batch got through", own=False)
        for target, reason in muted.items():
            self.mute(target, reason, own=False)
        self._shared = frozenset(muted)

    def on_coordinator_lost(self) -> None:
        """The coordinator's mutes go on as this task's own."""
        self._coordinated = False
        self._shared = frozenset()

    def is_shared(self, target: Target) -> bool:
        """Whether the coordinator has muted a target, so that a probe of it needs a lease."""
        return self._coordinated and target in self._shared

    def mutes_to_report(self) -> list[MuteChange]:
        """Every mute, for a coordinator that may be new."""
        return [
            ongoing_mute(self._own.get(mute.target), mute, self.now_ms) for mute in self.table.mutes.values()
        ]

    def take_changes(self) -> list[MuteChange]:
        """The mutes and unmutes since the last call."""
        changes, self._changes = self._changes, []
        return changes

    def close(self) -> None:
        """Unmute everything; later mutes have no effect."""
        self._closed = True
        self.table.mutes.clear()
