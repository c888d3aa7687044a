"""Thousands of executors' connections to a coordinator, in a process of their own, that cost little.

Each stands for the relay of an executor with its tasks. It sends what such a relay sends, byte for byte but
for the messages' numbers: ``recorded`` has the real code of a relay say it once for each occasion. What it
receives it reads only as far as it must know: whom the broker is muted for, which reply has come, who probes.

Not modelled: figures for the live view, votes on partitions, and that tasks give up while the coordinator is
silent; a reply that takes longer than that is counted.
"""

from __future__ import annotations

import errno
import heapq
import json
import math
import multiprocessing
import random
import re
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.coordinator_scale import IP_BIND_ADDRESS_NO_PORT, allow_files
from benchmarks.modelled_relay import ModelledRelay
from benchmarks.modelled_tasks import (
    BACK_S,
    OWN_EVIDENCE_S,
    SECRET,
    SETS,
    SICK,
    SILENCE_S,
    key_of,
)
from kafka_sink.breaker.states import ProbeLease
from kafka_sink.coordinator.breaker.messages import (
    BreakerReport,
    BreakerUpdate,
    MuteReport,
    Terms,
    UnmuteReport,
    encode_report,
    encode_update,
)
from kafka_sink.coordinator.metadata.messages import use_interval_ms
from kafka_sink.coordinator.transport.message_format import unpacked
from kafka_sink.coordinator.transport.session import MAX_FRAME_BYTES, FrameReader, Session, dump
from kafka_sink.timing_bounds import COORDINATOR_SILENCE_MS, HEALTHY_REPORT_MS

NUMBER = re.compile(rb'"id":\d+')
CLUSTER_ID = "modelled-kafka"
# So many connect in a second at first: their tasks ask for metadata, too.
CONNECTS_PER_S = 400
USE_MS = use_interval_ms(300_000)


def recorded(tasks: int, topics: list[str]) -> dict[str, bytes]:
    """What the relay of so many tasks sends on each occasion; ``%d`` is the number of its own message."""
    all_nodes, others = dict.fromkeys((0, 1, 2), 5.0), dict.fromkeys((0, 2), 5.0)
    own = BreakerReport(muted=(MuteReport(SICK, "silent", 2000.0),))
    update = BreakerUpdate(whole=True, terms=Terms(50, 500.0))

    def said(reports: list[tuple[int, BreakerReport]], told: BreakerUpdate | None = None) -> bytes:
        relay, now_ms = ModelledRelay(0.0, 0.0), 1.0
        for task in range(1, tasks + 1):
            relay.say(task, 1, "metadata", {"ask": topics}, now_ms)
            relay.say(task, 2, "breaker", encode_report(BreakerReport(rows=1, cluster_id=CLUSTER_ID)), now_ms)
        first = relay.payload(now_ms)
        if not reports:
            return first
        relay.receive(dump({"id": 1, "last": True, "kind": "breaker", "body": encode_update(update)}), now_ms)
        if told is not None:
            relay.receive(dump({"kind": "breaker", "body": encode_update(told)}), now_ms)
        now_ms += HEALTHY_REPORT_MS
        for task, report in reports:
            relay.say(task, 3, "breaker", encode_report(report), now_ms)
        return relay.payload(now_ms)

    def all_say(report: BreakerReport) -> list[tuple[int, BreakerReport]]:
        return [(task, report) for task in range(1, tasks + 1)]

    muted = BreakerUpdate(added={SICK: "silent"})
    leased = replace(muted, leases={SICK: ProbeLease(2000.0, False)})
    failed = BreakerReport(others, 480, failed=((SICK, "no response"),))
    unmuted = BreakerReport(all_nodes, 480, unmuted=(UnmuteReport(SICK, "it responds"),))
    found = {
        "first": said([]),
        "healthy": said(all_say(BreakerReport(all_nodes, 4800))),
        "frozen": said(all_say(BreakerReport(others, 4800)), muted),
        "own": said([(1, own)]),
        "holds": said(all_say(BreakerReport(others, 480, holds=(SICK,))), muted),
        "failed": said([(1, failed)], leased),
        "unmuted": said([(1, unmuted)], leased),
        "use": b'1{"id":%d,"kind":"metadata","body":' + dump({"use": topics, "stale": []}) + b"}",
    }
    lines = {name: one.replace(b"%", b"%%").split(b"\n") for name, one in found.items() if name != "use"}
    return {name: b"\n".join([*one[:-1], NUMBER.sub(b'"id":%d', one[-1])]) for name, one in lines.items()} | {
        "use": found["use"]
    }


@dataclass(slots=True, eq=False)
class Member:
    """One executor. ``sent_at``: when the message was sent that its relay awaits a reply to; 0: none.
    ``next``: what it says then. ``asked``: a task of it probes."""

    number: int
    source: str
    key: str
    sock: socket.socket | None = None
    session: Session = field(default_factory=lambda: Session(SECRET, "client"))
    frames: FrameReader = field(default_factory=lambda: FrameReader(MAX_FRAME_BYTES))
    stage: int = 0
    count: int = 0
    sent_at: float = 0.0
    next: str | None = None
    knows: bool = False
    asked: bool = False


class Crowd:
    """``hosts`` of them, with so many ``tasks`` each."""

    def __init__(self, port: int, hosts: int, tasks: int, topics: list[str]) -> None:
        self.port, self.tasks = port, tasks
        self.chance = random.Random(11)
        self.said = recorded(tasks, topics)
        self.selector = selectors.DefaultSelector()
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self.order = 0
        self.members = [
            Member(number, f"127.2.{number // 250}.{number % 250 + 1}", key_of(number % SETS))
            for number in range(hosts)
        ]
        self.responds = True
        self.latencies: list[float] = []
        self.lost = self.late = 0
        self.told_from = 0.0
        # By member: when it learned of the mute, or of its end, and when it was answered.
        self.told_at: dict[int, float] = {}
        self.answered_at: dict[int, float] = {}
        begun = time.monotonic()
        for number, member in enumerate(self.members):
            self.at(begun + number / CONNECTS_PER_S, partial(self._connect, member))
            self.at(begun + hosts / CONNECTS_PER_S + self.chance.random() * 2, partial(self._beat, member))
            self.at(begun + (1 + self.chance.random()) * USE_MS / 1000, partial(self._use, member))

    def at(self, when: float, act: Callable[[], None]) -> None:
        self.order += 1
        heapq.heappush(self.due, (when, self.order, act))

    # -- connections --------------------------------------------------------------------------------

    def _connect(self, member: Member) -> None:
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.bind((member.source, 0))
        if sock.connect_ex(("127.0.0.1", self.port)) not in (0, errno.EINPROGRESS):
            sock.close()
            self.at(time.monotonic() + 1.0, partial(self._connect, member))
            return
        member.sock, member.stage, member.count = sock, 0, 0
        member.knows, member.asked, member.next, member.sent_at = False, False, None, 0.0
        member.session, member.frames = Session(SECRET, "client"), FrameReader(MAX_FRAME_BYTES)
        self.selector.register(sock, selectors.EVENT_READ, member)

    def _end(self, member: Member) -> None:
        assert member.sock is not None
        self.selector.unregister(member.sock)
        member.sock.close()
        member.sock = None
        self.answered_at.pop(member.number, None)
        self.at(time.monotonic() + self.chance.random() * BACK_S, partial(self._connect, member))

    def _write(self, member: Member, data: bytes) -> None:
        try:
            assert member.sock is not None
            if member.sock.send(data) == len(data):
                return
        except OSError:
            pass
        # The coordinator has not read for so long that the system's buffers are full.
        self.lost += 1
        self._end(member)

    def _on_readable(self, member: Member) -> None:
        assert member.sock is not None
        try:
            data = member.sock.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.lost += 1
            self._end(member)
            return
        member.frames.feed(data)
        while member.sock is not None and (frame := member.frames.next_frame()) is not None:
            if member.stage == 2:
                for line in member.session.payload(frame).split(b"\n"):
                    self._on_line(member, line)
            elif member.stage == 0:
                member.stage = 1
                self._write(member, member.session.reply_to_greeting(frame))
            else:
                member.session.verify_proof(frame)
                member.stage = 2
                self._write(member, member.session.encode({"cluster": member.key, "relay": True}))
                self._say(member, "first")

    # -- messages -----------------------------------------------------------------------------------

    def _say(self, member: Member, name: str) -> None:
        """Now, or when the reply that its relay awaits has come."""
        if member.sock is None or member.stage < 2:
            return
        if member.sent_at:
            member.next = name if name not in ("healthy", "frozen") else member.next or name
            return
        member.count += 1
        member.sent_at = time.monotonic()
        self._write(member, member.session.encode_payload(self.said[name] % member.count))

    def _on_line(self, member: Member, line: bytes) -> None:
        if line[:1] != b"{":
            # Metadata of a task, or news of it. Only how long it took matters.
            if b'"last":true' in line[:80] and member.count == 1 and member.sent_at:
                self.latencies.append(time.monotonic() - member.sent_at)
            return
        if b'"last":true' in line[:80]:
            now = time.monotonic()
            took_s, member.sent_at = now - member.sent_at, 0.0
            self.latencies.append(took_s)
            self.late += took_s > COORDINATOR_SILENCE_MS / 1000
            self.answered_at.setdefault(member.number, now)
            if member.next is not None:
                name, member.next = member.next, None
                self._say(member, name)
        if not line.endswith(b'"body":{}}'):
            self._on_update(member, unpacked(json.loads(line)["body"]))

    def _on_update(self, member: Member, body: dict[str, Any]) -> None:
        now = time.monotonic()
        if any(target == SICK for target, _ in body.get("added", ())):
            member.knows = True
            self.told_at.setdefault(member.number, now)
            self.at(now + self.chance.random() * 0.1, partial(self._say, member, "holds"))
        elif SICK in body.get("removed", ()):
            member.knows = False
            self.told_at.setdefault(member.number, now)
        if body.get("leases") or SICK in body.get("asks", ()):
            # Its task probes, and knows the result with its next report.
            member.asked = bool(body.get("leases"))

    def _beat(self, member: Member) -> None:
        self.at(time.monotonic() + HEALTHY_REPORT_MS / 1000, partial(self._beat, member))
        if member.asked:
            member.asked = False
            self._say(member, "unmuted" if self.responds else "failed")
        else:
            self._say(member, "healthy" if self.responds else "frozen")

    def _use(self, member: Member) -> None:
        """One of its tasks says that it still uses its topics. The relay passes that on when half of the time
        is over after which each task says so."""
        self.at(time.monotonic() + USE_MS / 2000, partial(self._use, member))
        if member.sock is not None and member.stage == 2:
            self._write(member, member.session.encode_payload(self.said["use"] % (1_000_000 + member.count)))

    def run(self, until: float) -> None:
        while (now := time.monotonic()) < until:
            while self.due and self.due[0][0] <= now:
                heapq.heappop(self.due)[2]()
            next_s = min(until, self.due[0][0] if self.due else until) - time.monotonic()
            for key, _ in self.selector.select(max(0.0, next_s)):
                if key.data.sock is not None:
                    self._on_readable(key.data)

    # -- what the benchmark asks for ------------------------------------------------------------------

    def freeze(self, share: float) -> None:
        """A broker freezes. Of each host the first of its tasks with evidence of its own mutes it."""
        self.responds = False
        self.told_at.clear()
        begin = self.told_from = time.monotonic() + SILENCE_S
        for member in self.members:
            own = [self.chance.random() for _ in range(self.tasks) if self.chance.random() < share]
            if own:
                self.at(begin + min(own) * OWN_EVIDENCE_S, partial(self._own_evidence, member))

    def _own_evidence(self, member: Member) -> None:
        if not member.knows:
            self._say(member, "own")

    def thaw(self) -> None:
        self.responds = True
        self.told_at.clear()

    def cut(self, _share: float) -> None:
        """All connections end."""
        for member in self.members:
            if member.sock is not None:
                self._end(member)

    def told_s(self) -> float | None:
        """From the first to know, or where it freezes from the first evidence, to the last."""
        if len(self.told_at) < len(self.members):
            return None
        begin = min(self.told_at.values()) if self.responds else self.told_from
        return max(self.told_at.values()) - begin

    def mark(self) -> None:
        """From now on, until all are answered."""
        self.answered_at.clear()

    def figures(self) -> dict[str, Any]:
        """Since the last time. ``answered_at``: when the last was answered after the mark."""
        latencies, self.latencies = self.latencies, []
        lost, late, self.lost, self.late = self.lost, self.late, 0, 0
        answered = self.answered_at.values() if len(self.answered_at) == len(self.members) else (math.inf,)
        return {
            "connected": sum(one.sock is not None and one.stage == 2 for one in self.members),
            "answered_at": max(answered),
            "latencies_ms": [1000 * one for one in latencies],
            "lost": lost,
            "late": late,
            "cpu_s": time.process_time(),
        }


def _serve(pipe: Connection, arguments: tuple[Any, ...]) -> None:
    allow_files()
    crowd = Crowd(*arguments)
    while True:
        crowd.run(time.monotonic() + 0.05)
        while pipe.poll():
            name, *given = pipe.recv()
            if name == "end":
                return
            pipe.send(getattr(crowd, name)(*given))


Ask = Callable[..., Any]


@contextmanager
def crowd(port: int, hosts: int, tasks: int, topics: list[str]) -> Iterator[Ask]:
    """A process with so many hosts. The function has it do what a method of ``Crowd`` does."""
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=_serve, args=(theirs, (port, hosts, tasks, topics)), daemon=True
    )
    process.start()

    def ask(*message: Any) -> Any:
        ours.send(message)
        return ours.recv()

    try:
        yield ask
    finally:
        ours.send(("end",))
        process.join(10)
        process.kill()
