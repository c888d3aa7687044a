"""The server's connections: which are taken, which have proved themselves, which must go. No messages.

Bounds: connections, of which those without proof are the first to go; new ones of one address in a second;
bytes of unfinished frames and of what peers have not read; times for the challenge, for the rest of a frame,
and for a peer to read.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kafka_sink.clock import RANDOM
from kafka_sink.coordinator.transport.peer_connection import PeerConnection
from kafka_sink.coordinator.transport.session import MAX_REQUEST_BYTES
from kafka_sink.errors import ProtocolError

_INTERVAL_MS = 60_000.0
_MAX_SOURCES = 3


class Dropped(Enum):
    """The reason. Its text completes a line that begins with a number of connections."""

    WRONG_PROOF = "did not prove that they know the secret"
    NO_PROOF = "did not prove in time that they know the secret"
    MADE_ROOM = "had not proved that they know the secret, and made room for others"
    FULL = "were dropped, because all connections are in use by tasks"
    NONSENSE = "sent an invalid message, or named an unknown cluster"
    TOO_MANY = "exceeded the connections that one address may open in a second"
    HELD_BACK = "sent more messages than allowed, and were slowed down"
    STALLED = "did not complete a frame in time"
    UNREAD = "did not read the data sent to them"


class ConnectionLog:
    """Log lines for connections that were dropped: one a minute at most. Times: monotonic ms."""

    def __init__(self) -> None:
        self._counts: Counter[Dropped] = Counter()
        self._sources: Counter[str] = Counter()
        self._logged_ms: float | None = None

    def note(self, why: Dropped, source: str) -> None:
        """A connection from ``source``, an address without port, ended."""
        self._counts[why] += 1
        # Only the first addresses of a flood are counted, so that memory is bounded.
        if source in self._sources or len(self._sources) < 1000:
            self._sources[source] += 1

    def line(self, now_ms: float) -> str | None:
        """The line to log now, if any. The first drop is logged at once, later ones together."""
        if not self._counts or (self._logged_ms is not None and now_ms - self._logged_ms < _INTERVAL_MS):
            return None
        self._logged_ms = now_ms
        reasons = "; ".join(f"{count} {why.value}" for why, count in self._counts.most_common())
        sources = ", ".join(source for source, _ in self._sources.most_common(_MAX_SOURCES))
        self._counts.clear()
        self._sources.clear()
        return f"connections dropped in the last minute: {reasons} (most from {sources})"


_SWEEP_MS = 1000.0
# asyncio's transports refer to themselves, so each that ends takes 3 KiB until garbage is collected.
_COLLECT_AFTER = 2_000
# Shared by an executor's tasks, of one task, without a task that has said something, without proof.
KINDS = ("executor", "task", "idle", "unproved")


@dataclass(frozen=True, slots=True)
class ServerBounds:
    """Counts, bytes and milliseconds.

    ``tasks``: of all connections together, which relays share; ``tasks_of_one``: of one connection.
    ``messages_per_s``: of each task. ``silence_ms``: a connection without any frame for so long is closed.
    ``frame_ms``: the time for the rest of a frame, and for a peer to read some of what waits for it.
    ``cluster_idle_ms``: a cluster without connections for so long gives its threads and memory back.
    ``new_of_one_address``: connections in a second. ``unread_bytes_of_all`` leaves out bodies that many peers
    get, because there is one copy of each.
    """

    connections: int = 20_000
    unproved: int = 4_096
    tasks: int = 200_000
    tasks_of_one: int = 1_024
    new_of_one_address: int = 2_000
    messages_per_s: float = 500.0
    request_bytes: int = MAX_REQUEST_BYTES
    unfinished_bytes: int = 32 * 1024 * 1024
    unread_bytes: int = 16 * 1024 * 1024
    unread_bytes_of_all: int = 32 * 1024 * 1024
    clusters: int = 500
    cluster_idle_ms: float = 600_000.0
    challenge_ms: float = 5000.0
    frame_ms: float = 5000.0
    silence_ms: float = 120_000.0

    @property
    def sweep_ms(self) -> float:
        """How often times are checked."""
        return min(_SWEEP_MS, self.challenge_ms / 4, self.frame_ms / 4, self.silence_ms / 4)


class Connections:
    """Belongs to the server's loop. ``on_removed`` is called once with each connection that goes.

    Times are monotonic milliseconds.
    """

    def __init__(self, bounds: ServerBounds, on_removed: Callable[[PeerConnection], None]) -> None:
        self.log = ConnectionLog()
        self._bounds = bounds
        self._on_removed = on_removed
        self._peers: dict[int, PeerConnection] = {}
        # Those without proof, and those of each address.
        self._unproved: dict[int, PeerConnection] = {}
        self._unproved_of: dict[str, list[PeerConnection]] = {}
        self._new_of: Counter[str] = Counter()
        self._unfinished = 0
        # Since garbage was collected last.
        self._ended = 0
        # As of the last sweep.
        self.of_kind = Counter(dict.fromkeys(KINDS, 0))
        self._stood_ms = 0.0
        # Those that have not read all they were sent.
        self._behind: set[PeerConnection] = set()

    def __len__(self) -> int:
        return len(self._peers)

    # -- coming and going ---------------------------------------------------------------------------

    def drop_reason(self, source: str) -> Dropped | None:
        """Why a new connection of this address is dropped; None where it is taken.

        Cheap, because a flood comes through here. To make room it drops a connection without proof: any one
        of the address that has most of them. The oldest may be an executor's, in the middle of its challenge.
        """
        self._new_of[source] += 1
        if self._new_of[source] > self._bounds.new_of_one_address:
            return Dropped.TOO_MANY
        full = len(self._peers) >= self._bounds.connections
        if full and not self._unproved:
            return Dropped.FULL
        if full or len(self._unproved) >= self._bounds.unproved:
            self.drop(RANDOM.choice(max(self._unproved_of.values(), key=len)), Dropped.MADE_ROOM)
        return None

    def add(self, peer: PeerConnection) -> None:
        """A new connection, without proof so far."""
        self._peers[peer.number] = self._unproved[peer.number] = peer
        of_source = self._unproved_of.setdefault(peer.source, [])
        peer.place = len(of_source)
        of_source.append(peer)

    def proved(self, peer: PeerConnection) -> None:
        """The peer has shown that it knows the secret."""
        if self._unproved.pop(peer.number, None) is not None:
            of_source = self._unproved_of[peer.source]
            last = of_source.pop()
            if last is not peer:
                of_source[peer.place], last.place = last, peer.place
            if not of_source:
                del self._unproved_of[peer.source]

    def drop(self, peer: PeerConnection, why: Dropped) -> None:
        """End a connection, and log the reason."""
        self.log.note(why, peer.source)
        self.remove(peer)

    def remove(self, peer: PeerConnection) -> None:
        """End a connection. One that is gone already stays gone."""
        peer.abort()
        self._behind.discard(peer)
        if self._peers.pop(peer.number, None) is None:
            return
        self.proved(peer)
        self._ended += 1
        self._unfinished -= peer.unfinished
        self._on_removed(peer)

    def close(self) -> None:
        for peer in list(self._peers.values()):
            self.remove(peer)

    def _kind(self, peer: PeerConnection) -> str:
        if peer.number in self._unproved:
            return "unproved"
        if not peer.tasks:
            return "idle"
        return "executor" if peer.is_relay else "task"

    def described(self) -> str:
        """How many there are of each kind, as of the last sweep."""
        return ", ".join(f"{count} {kind}" for kind, count in self.of_kind.items())

    # -- bytes that wait ----------------------------------------------------------------------------

    def note_unfinished(self, peer: PeerConnection, now_ms: float) -> None:
        """Count the bytes of a frame that is not complete. Raises ProtocolError beyond the bound of all."""
        held = 0 if peer.is_gone else peer.frames.held
        self._unfinished += held - peer.unfinished
        peer.unfinished = held
        if not held or peer.is_paused:
            peer.begun_ms = math.inf
        elif peer.begun_ms == math.inf:
            peer.begun_ms = now_ms
        if self._unfinished > self._bounds.unfinished_bytes:
            raise ProtocolError("too many unfinished frames")

    def note_unread(self, peer: PeerConnection) -> None:
        """This peer has not read all it was sent."""
        self._behind.add(peer)

    def bound_unread(self) -> None:
        """Drop the peers with most unread bytes until all are within the bound; their tasks ask brokers."""
        self._behind = {peer for peer in self._behind if peer.unread}
        while sum(peer.held for peer in self._behind) > self._bounds.unread_bytes_of_all:
            self.drop(max(self._behind, key=lambda peer: peer.held), Dropped.UNREAD)

    def sweep(self, now_ms: float, stood_ms: float = 0.0) -> None:
        """Drop the connections whose time is over. ``stood_ms``: for how long the server has stood still in
        all; what peers send meanwhile waits for it."""
        bounds = self._bounds
        if stood_ms > self._stood_ms:
            for peer in self._peers.values():
                peer.forgive(stood_ms - self._stood_ms)
            self._stood_ms = stood_ms
        if self._ended >= _COLLECT_AFTER:
            self._ended = 0
            gc.collect()
        self._new_of.clear()
        self.of_kind = Counter(dict.fromkeys(KINDS, 0))
        for peer in [one for one in self._unproved.values() if now_ms - one.opened_ms > bounds.challenge_ms]:
            self.drop(peer, Dropped.NO_PROOF)
        for peer in list(self._peers.values()):
            self.of_kind[self._kind(peer)] += 1
            if now_ms - peer.begun_ms > bounds.frame_ms:
                self.drop(peer, Dropped.STALLED)
            elif now_ms - peer.heard_ms > bounds.silence_ms:
                self.remove(peer)  # its application is idle, and connects again when it has something to say
            elif self._leaves_unread(peer, now_ms):
                self.drop(peer, Dropped.UNREAD)

    def _leaves_unread(self, peer: PeerConnection, now_ms: float) -> bool:
        """Whether a peer has for too long read nothing of what waits for it."""
        if not peer.unread or peer.is_behind:
            # It has read all, or waits for its turn.
            peer.unread_since_ms = math.inf
        elif peer.unread_since_ms == math.inf or peer.taken > peer.taken_before:
            peer.unread_since_ms, peer.taken_before = now_ms, peer.taken
        return now_ms - peer.unread_since_ms > self._bounds.frame_ms
