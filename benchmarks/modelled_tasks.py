"""Modelled tasks of a coordinator: connections, messages and times of real ones, all on one thread.

Tasks of an executor share a connection and the real code of a relay that adds up what they report
(``modelled_relay``); with ``per_host=0`` each has its own. They report as often and as much as real tasks do
(``BreakerChannel``, ``MetadataChannel``), of the worst kind: all partitions are written in each interval, and
each task holds batches for all that is muted.
"""

from __future__ import annotations

import heapq
import math
import random
import re
import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from benchmarks.modelled_relay import ModelledRelay
from kafka_sink.breaker.states import Target
from kafka_sink.coordinator.breaker.messages import (
    MAX_MUTES,
    BreakerReport,
    BreakerUpdate,
    MuteReport,
    OutcomeCounts,
    UnmuteReport,
    decode_update,
    encode_report,
)
from kafka_sink.coordinator.figures.channel import FiguresChannel
from kafka_sink.coordinator.figures.messages import (
    TaskFigures,
    TaskIdentity,
)
from kafka_sink.coordinator.metadata.messages import in_parts
from kafka_sink.coordinator.transport.message_format import split_lines, unpacked
from kafka_sink.coordinator.transport.session import MAX_FRAME_BYTES, FrameReader, Session, parse
from kafka_sink.counts import GAUGES, NAMES, BrokerFigures, TopicFigures
from kafka_sink.model import TopicPartition
from kafka_sink.timing_bounds import COORDINATOR_SILENCE_MS, HEALTHY_REPORT_MS, next_beat_ms

SECRET = bytes(range(32))
# Sets of options for one Kafka.
SETS = 70
NODES = 3
SICK = 1
INTERVAL_MS, HEARTBEAT_MS, GATHER_MS = 500.0, 6000.0, 5.0
LARGE_BYTES = 2048
METADATA_HEAD = re.compile(rb'\{"kind":"metadata"(?:,"id":(\d+),"last":(true|false))?,"body"')
# So many connect at a time.
TOGETHER, CONNECT_S = 32, 120.0


@dataclass(frozen=True)
class Case:
    """``muted``: how many partitions are muted; 0: a broker. ``per_host``: tasks that share a connection.

    ``relays``: how many hosts have the real code of a relay and a model of each of its tasks. For the others
    one report stands for all: so many tasks are more than a model in Python can be.
    """

    tasks: int
    partitions: int
    muted: int = 0
    topics: int = 1
    per_host: int = 8
    relays: int = 1_000_000


@dataclass
class Task:
    """One modelled task."""

    number: int
    host: Host
    # Its number there.
    place: int = 0
    asked: dict[int, float] = field(default_factory=dict)
    count: int = 0
    muted: set[Target] = field(default_factory=set)
    leased: list[Target] = field(default_factory=list)
    questions: list[Target] = field(default_factory=list)
    holds: bool = False


@dataclass(eq=False)
class Host:
    """A connection. ``phase_ms``: when its clock was started, so that hosts do not report together."""

    sock: socket.socket
    phase_ms: float
    session: Session = field(default_factory=lambda: Session(SECRET, "client"))
    frames: FrameReader = field(default_factory=lambda: FrameReader(MAX_FRAME_BYTES))
    unsent: bytearray = field(default_factory=bytearray)
    tasks: dict[int, Task] = field(default_factory=dict)
    relay: ModelledRelay | None = None
    # When the relay is looked at next.
    wakes_at: float = math.inf
    # How many tasks its only one stands for.
    stands_for: int | None = None
    stage: int = 0
    is_lost: bool = False
    cluster: str = ""
    source: str = "127.0.0.1"
    # Of the last task.
    number: int = 0

    def add(self, task: Task) -> None:
        """A task enters, with the next number."""
        self.number += 1
        self.tasks[self.number] = task
        task.host, task.place = self, self.number


def key_of(number: int) -> str:
    """The key of a set of options."""
    return f"modelled-{number}"


class Model:
    """All tasks of a case."""

    def __init__(self, case: Case, port: int) -> None:
        self.case = case
        self.port = port
        self.selector = selectors.DefaultSelector()
        self.hosts: list[Host] = []
        self.tasks: list[Task] = []
        self.due: list[tuple[float, int, Callable[[], None]]] = []
        self.latencies: list[float] = []
        # Messages of tasks, and those that reach the coordinator.
        self.bytes_in = self.bytes_out = self.messages = self.relayed = self.frames = 0
        self.failing: set[int] = set()
        self.is_muted = False
        self.sick_responds = True
        self.heard_at: dict[int, float] = {}
        per_topic = case.partitions // case.topics or 1
        self.topics = [f"orders-{number}" for number in range(case.topics)]
        self.partitions = [
            TopicPartition(topic, index) for topic in self.topics for index in range(per_topic)
        ][: case.partitions]
        if case.muted:
            self.sick: list[Target] = list(self.partitions[: case.muted])
        else:
            self.sick = [SICK]
        self.expected = set(self.sick)
        self.all_held = encode_report(BreakerReport(holds=tuple(self.sick)))["holds"]

    # -- connections --------------------------------------------------------------------------------

    @property
    def lost(self) -> int:
        """How many connections the server has closed."""
        return sum(host.is_lost for host in self.hosts)

    def connect(self) -> float:
        """Connects all, and returns the seconds that it took."""
        started = time.monotonic()
        per_host = self.case.per_host or 1
        wanted = -(-self.case.tasks // per_host)
        while len(self.hosts) < wanted and time.monotonic() < started + CONNECT_S:
            proving = sum(host.stage < 2 and not host.is_lost for host in self.hosts)
            for _ in range(min(TOGETHER - proving, wanted - len(self.hosts))):
                # Executors have addresses of their own, with up to eight tasks each.
                number = len(self.hosts)
                executor = number * per_host // 8
                source = f"127.1.{executor // 250}.{executor % 250 + 1}"
                self.add_host(min(per_host, self.case.tasks - number * per_host), source)
            self.run(0.002)
        while any(host.stage < 2 and not host.is_lost for host in self.hosts) and (
            time.monotonic() < started + CONNECT_S
        ):
            self.run(0.05)
        return time.monotonic() - started

    def add_host(self, tasks: int, source: str = "127.0.0.1") -> Host:
        """Begins a connection with so many tasks."""
        sock = socket.create_connection(("127.0.0.1", self.port), timeout=10, source_address=(source, 0))
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # The golden ratio spreads them evenly, however many there are.
        host = Host(
            sock, (len(self.hosts) * 0.618034 % 1) * HEALTHY_REPORT_MS, cluster=key_of(0), source=source
        )
        if self.case.per_host and len(self.hosts) >= self.case.relays:
            host.stands_for, tasks = tasks, min(1, tasks)
        for _ in range(tasks):
            self.tasks.append(Task(len(self.tasks), host))
            host.add(self.tasks[-1])
        self.hosts.append(host)
        self.selector.register(sock, selectors.EVENT_READ, host)
        return host

    def _lose(self, host: Host) -> None:
        if not host.is_lost:
            host.is_lost = True
            self.selector.unregister(host.sock)
            host.sock.close()

    def _write(self, host: Host, data: bytes) -> None:
        if host.is_lost:
            return
        self.bytes_in += len(data)
        self.frames += 1
        host.unsent += data
        self._flush(host)

    def _flush(self, host: Host) -> None:
        try:
            while host.unsent:
                del host.unsent[: host.sock.send(host.unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._lose(host)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if host.unsent else 0)
        if self.selector.get_key(host.sock).events != events:
            self.selector.modify(host.sock, events, host)

    def tell(self, task: Task, kind: str, body: Mapping[str, Any]) -> None:
        """Sends a message, by way of its host's relay."""
        host = task.host
        if host.is_lost:
            return
        task.count += 1
        task.asked[task.count] = time.monotonic()
        self.messages += 1
        if host.relay is None:
            self._write(host, host.session.encode({"id": task.count, "kind": kind, "body": body}))
            self.relayed += 1
            return
        host.relay.say(task.place, task.count, kind, body, time.monotonic() * 1000)
        self._wake(host)

    def _wake(self, host: Host) -> None:
        """Look at its relay when that has something to send, or a moment later."""
        if host.relay is None or host.is_lost:
            return
        now_ms = time.monotonic() * 1000
        wakes_at = max(now_ms + GATHER_MS, host.relay.due_ms(now_ms)) / 1000
        if wakes_at < host.wakes_at:
            host.wakes_at = wakes_at
            self.at(wakes_at, lambda: self._send(host))

    def _send(self, host: Host) -> None:
        host.wakes_at = math.inf
        if host.relay is None or host.is_lost:
            return
        payload = host.relay.payload(time.monotonic() * 1000)
        if payload:
            self.relayed += payload.count(b"\n") + 1
            self._write(host, host.session.encode_payload(payload))
        self._wake(host)

    def _on_readable(self, host: Host) -> None:
        try:
            data = host.sock.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose(host)
            return
        self.bytes_out += len(data)
        host.frames.feed(data)
        while (frame := host.frames.next_frame()) is not None:
            self._on_frame(host, frame)

    def _on_frame(self, host: Host, frame: bytes) -> None:
        if host.stage == 0:
            self._write(host, host.session.reply_to_greeting(frame))
            host.stage = 1
        elif host.stage == 1:
            host.session.verify_proof(frame)
            host.stage = 2
            self._write(
                host, host.session.encode({"cluster": host.cluster, "relay": bool(self.case.per_host)})
            )
            if self.case.per_host and host.stands_for is None:
                hear = partial(self._on_relayed, host)
                host.relay = ModelledRelay(host.phase_ms, time.monotonic() * 1000, hear)
            for task in host.tasks.values():
                self._begin(task)
        else:
            self._on_lines(host, host.session.payload(frame))

    def _on_lines(self, host: Host, payload: bytes) -> None:
        if host.relay is not None:
            host.relay.hear(time.monotonic() * 1000)
        for line in split_lines(payload):
            if host.relay is not None and not line.tasks:
                host.relay.receive(line.message, time.monotonic() * 1000)
                self.latencies += host.relay.latencies
                host.relay.latencies.clear()
                continue
            message = _head(line.message) or parse(line.message)
            message["body"] = unpacked(message["body"])
            update = None
            if message["kind"] == "breaker" and message["body"]:
                update = decode_update(message["body"], MAX_MUTES)
            for number in line.tasks or (1,):
                if number in host.tasks:
                    self._on_message(host.tasks[number], message, update)
        self._wake(host)

    def _on_relayed(
        self, host: Host, place: int, kind: str, request: int | None, body: Mapping[str, Any]
    ) -> None:
        """What the relay has for a task. Its reply says nothing of the coordinator."""
        task = host.tasks.get(place)
        if task is None:
            return
        update = decode_update(body, MAX_MUTES) if kind == "breaker" and body else None
        if request is not None:
            task.asked.pop(request, None)
        self._on_message(task, {"kind": kind, "body": body}, update)

    def _on_message(self, task: Task, message: Mapping[str, Any], update: BreakerUpdate | None) -> None:
        now = time.monotonic()
        request = message.get("id")
        if request is not None and message.get("last"):
            self.latencies.append(1000 * (now - task.asked.pop(request)))
        if update is not None:
            self._on_update(task, update, now)

    def _on_update(self, task: Task, update: BreakerUpdate, now: float) -> None:
        task.muted.update(update.added)
        task.muted.difference_update(update.removed)
        task.leased += update.leases
        asked = [one for one in update.asks if isinstance(one, TopicPartition)]
        task.questions += asked
        if self.is_muted and task.number not in self.heard_at and self.expected <= task.muted:
            self.heard_at[task.number] = now
        if asked or bool(task.muted) != task.holds:
            self.tell(task, "breaker", self._body(task, [0]))

    # -- what a task does ---------------------------------------------------------------------------

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self.due, (when, id(act), act))

    def _begin(self, task: Task) -> None:
        for names in in_parts(self.topics):
            self.tell(task, "metadata", {"ask": names})
        self._at_beat(task, HEALTHY_REPORT_MS, lambda: self._report(task))
        self._at_beat(task, HEARTBEAT_MS, lambda: self._beat(task))

    def _at_beat(self, task: Task, interval_ms: float, act: Callable[[], None]) -> None:
        phase_ms = task.host.phase_ms
        next_ms = next_beat_ms(time.monotonic() * 1000 - phase_ms, interval_ms) + phase_ms
        self.at(next_ms / 1000, act)

    def _beat(self, task: Task) -> None:
        if task.host.stands_for is not None:
            return  # its relay hears from the coordinator all the time
        self.tell(task, "metadata", {"use": [], "stale": []})
        self._at_beat(task, HEARTBEAT_MS, lambda: self._beat(task))

    def _report(self, task: Task) -> None:
        nodes = [node for node in range(NODES) if node != SICK or self.sick_responds]
        self.tell(task, "breaker", self._body(task, nodes))
        is_failing = task.number in self.failing and not task.muted
        interval_ms = INTERVAL_MS if is_failing else HEALTHY_REPORT_MS
        self._at_beat(task, interval_ms, lambda: self._report(task))

    def _body(self, task: Task, nodes: list[int]) -> dict[str, Any]:
        failing: Sequence[Target] = ()
        if task.number in self.failing and not task.muted:
            failing = self.sick
        elif task.questions:
            failing = task.questions[:700]
        task.questions = task.questions[700:]
        report = BreakerReport(
            dict.fromkeys(nodes, 5.0),
            400 * len(self.partitions),
            tuple(
                OutcomeCounts(one, 0, 5, True, "NOT_ENOUGH_REPLICAS")
                for one in failing
                if isinstance(one, TopicPartition)
            ),
            failed=() if self.sick_responds else tuple((target, "no response") for target in task.leased),
            unmuted=tuple(UnmuteReport(target, "it responds") for target in task.leased)
            if self.sick_responds
            else (),
            tasks=task.host.stands_for,
        )
        task.leased = []
        if bool(task.muted) == task.holds:
            return encode_report(report)
        task.holds = bool(task.muted)
        return {**encode_report(report), "holds": self.all_held if task.holds else []}

    def mute(self) -> float:
        """Causes the mute; returns when it was reported."""
        self.is_muted = True
        self.sick_responds = False
        if self.case.muted:
            self.failing = set(range(min(10, self.case.tasks)))
            self.run(0.0)
            started = time.monotonic()
            for number in self.failing:
                self.tell(self.tasks[number], "breaker", self._body(self.tasks[number], [0]))
            return started
        self.run(2.5)  # for so long nobody has had a response from it
        started = time.monotonic()
        report = BreakerReport(muted=(MuteReport(SICK, "silent", 2000.0),))
        self.tell(self.tasks[0], "breaker", encode_report(report))
        return started

    def run(self, seconds: float) -> None:
        """Lets the tasks work for so long."""
        until = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            while self.due and self.due[0][0] <= now:
                heapq.heappop(self.due)[2]()
            next_s = min(until, self.due[0][0] if self.due else until) - time.monotonic()
            # Even where all time is used up: tasks that do not read are dropped by the server.
            for key, events in self.selector.select(max(0.0, next_s)):
                if events & selectors.EVENT_WRITE:
                    self._flush(key.data)
                if events & selectors.EVENT_READ and not key.data.is_lost:
                    self._on_readable(key.data)
            if now >= until:
                return

    def close(self) -> None:
        """Ends all connections."""
        for host in self.hosts:
            if not host.is_lost:
                host.sock.close()
        self.selector.close()


def _head(message: bytes) -> dict[str, Any] | None:
    """Of a large message of metadata: a model that reads it all would be slower than the server."""
    found = METADATA_HEAD.match(message) if len(message) > LARGE_BYTES else None
    if found is None:
        return None
    number, last = found.groups()
    return {"kind": "metadata", "id": number and int(number), "last": last == b"true", "body": {}}


# -- storms -----------------------------------------------------------------------------------------

# A task that has waited for a reply for so long leaves, and comes back within so much; after a failure later.
_GIVE_UP_S, BACK_S, _LOOK_S = COORDINATOR_SILENCE_MS / 1000, 0.1, 0.25
SILENCE_S, OWN_EVIDENCE_S = 2.5, 2.0
_WRITTEN_TOPICS, _BROKERS = 20, 10


def written_figures(identity: TaskIdentity, count: int) -> TaskFigures:
    """Of a task that writes to all topics and brokers. With a higher ``count`` it has written more."""
    return TaskFigures(
        identity,
        counters=dict.fromkeys(NAMES[:25], count),
        gauges=dict.fromkeys(GAUGES, 1000),
        topics={f"topic-{one}": TopicFigures(count, count, count, 1) for one in range(_WRITTEN_TOPICS)},
        brokers={
            one: BrokerFigures(f"b{one}:9092", count, 0, 2, 5.0, 9.0, (count,) * 12, 0.0, 3.0)
            for one in range(_BROKERS)
        },
    )


class StormModel(Model):
    """Tasks that also leave and come back, mute by themselves, and report figures to the live view.

    Their hosts report at random moments, and belong to ``SETS`` sets of options of one Kafka.
    """

    def __init__(self, case: Case, port: int, chance: random.Random, *, has_view: bool = True) -> None:
        super().__init__(case, port)
        self.has_view = has_view
        self.chance = chance
        self.gave_up = self.lost_hosts = self.runs = 0
        self.told_from = math.inf
        self.free_at: dict[int, float] = {}
        self.answered_at: dict[int, float] = {}
        self.entering: set[int] = set()
        self.failures: dict[int, int] = {}
        self.by_source: dict[str, Host] = {}
        self.live: dict[int, FiguresChannel] = {}
        self.pumping: set[int] = set()
        self.at(time.monotonic() + _LOOK_S, self._look)

    @property
    def lost(self) -> int:
        """How many connections the server has closed."""
        return self.lost_hosts

    def add_host(self, tasks: int, source: str = "127.0.0.1") -> Host:
        host = super().add_host(tasks, source)
        host.phase_ms = self.chance.random() * HEALTHY_REPORT_MS
        host.cluster = key_of(len(self.hosts) % SETS)
        self.by_source[source] = host
        return host

    def tell(self, task: Task, kind: str, body: Mapping[str, Any]) -> None:
        if task.number not in self.entering and task.host.stage == 2:
            super().tell(task, kind, body)

    # -- leaving and entering -----------------------------------------------------------------------

    def _lose(self, host: Host) -> None:
        if not host.is_lost:
            self.lost_hosts += 1
            self._end(host)

    def _end(self, host: Host) -> None:
        super()._lose(host)
        self.at(time.monotonic() + self.chance.random() * BACK_S, lambda: self._connect_again(host))

    def _connect_again(self, lost: Host) -> None:
        """One of its tasks becomes the relay."""
        try:
            host = self.add_host(0, lost.source)
        except OSError:
            self.at(time.monotonic() + 1.0, lambda: self._connect_again(lost))
            return
        host.cluster = lost.cluster
        self.hosts.remove(lost)
        for task in lost.tasks.values():
            self._forget(task)
            host.add(task)

    def _forget(self, task: Task) -> None:
        task.asked.clear()
        task.muted, task.leased, task.questions, task.holds = set(), [], [], False
        self.answered_at.pop(task.number, None)

    def _enter(self, task: Task, delay_s: float) -> None:
        """A task leaves its relay, and it or the next one in its place enters a moment later."""
        host = task.host
        if host.is_lost or host.stage < 2 or task.number in self.entering:
            return
        del host.tasks[task.place]
        if host.relay is not None:
            host.relay.leave(task.place, time.monotonic() * 1000)
            self._wake(host)
        self._forget(task)
        self.entering.add(task.number)

        def enter() -> None:
            self.entering.discard(task.number)
            # Its relay may have been replaced meanwhile.
            now_with = self.by_source[host.source]
            now_with.add(task)
            if now_with.stage == 2:
                self._begin(task)

        self.at(time.monotonic() + delay_s, enter)

    def _look(self) -> None:
        """Tasks that have waited for too long give up, and come back to their relay, which responds."""
        now = time.monotonic()
        self.at(now + _LOOK_S, self._look)
        for host in self.hosts:
            relay = host.relay
            if relay is None or host.is_lost or relay.is_silent:
                continue
            if relay.silent_ms(now * 1000) >= COORDINATOR_SILENCE_MS:
                relay.is_silent = True
                # It lets its tasks go. They come back, and wait.
                for task in list(host.tasks.values()):
                    self._enter(task, self.chance.random() * BACK_S)
        for task in self.tasks:
            asked = task.asked
            if asked and not task.host.is_lost and (first := min(asked.values())) < now - _GIVE_UP_S:
                self.gave_up += 1
                self.latencies.append(1000 * (now - first))
                failures = self.failures[task.number] = self.failures.get(task.number, -1) + 1
                self._enter(task, 2.0 ** min(failures - 1, 4) if failures else self.chance.random() * BACK_S)

    def _on_message(self, task: Task, message: Mapping[str, Any], update: BreakerUpdate | None) -> None:
        if message.get("last") and message["id"] not in task.asked:
            return  # to a task that had this place before
        super()._on_message(task, message, update)
        if message.get("last") or "id" not in message:
            self.answered_at[task.number] = time.monotonic()
            self.failures.pop(task.number, None)
        if message.get("last") and message["kind"] == "figures":
            self.live[task.number].on_reply(message["body"], True, 0.0)
        if self.sick_responds and not task.muted:
            self.free_at.setdefault(task.number, time.monotonic())

    def run_until_answered(self, since: float, seconds: float) -> float | None:
        """When the last task was answered for the first time after ``since``. None: not within so long."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            answered = (
                self.answered_at.get(one.number, 0.0) >= since
                and (one.host.relay is None or one.host.relay.heard_ms >= 1000 * since)
                for one in self.tasks
            )
            if all(answered):
                return time.monotonic()
            self.run(0.05)
        return None

    # -- what a task does ---------------------------------------------------------------------------

    def _begin(self, task: Task) -> None:
        if task.number not in self.live:
            super()._begin(task)
            self.live[task.number] = FiguresChannel(self._figures, lambda: time.monotonic() * 1000)
            self._run_next(task)
        else:
            for names in in_parts(self.topics):
                self.tell(task, "metadata", {"ask": names})
        self.tell(task, "breaker", encode_report(BreakerReport(rows=1, cluster_id="modelled-kafka")))

    def _figures(self, identity: TaskIdentity) -> TaskFigures:
        return written_figures(identity, int(time.monotonic() * 10))

    def _run_next(self, task: Task) -> None:
        """The task in this place ends, if there is one, and the next one begins."""
        if not self.has_view:
            return
        channel = self.live[task.number]
        if channel.identity is not None:
            channel.end(replace(self._figures(channel.identity), done=True))
        self.runs += 1
        channel.begin(TaskIdentity("storm", self.runs, host=task.host.source))
        self._pump(task)

    def _pump(self, task: Task) -> None:
        now_ms = time.monotonic() * 1000
        channel = self.live[task.number]
        if task.number not in self.entering and task.host.stage == 2 and not task.host.is_lost:
            while (body := channel.next_message(now_ms)) is not None:
                self.tell(task, "figures", body)
        if task.number not in self.pumping:
            self.pumping.add(task.number)
            delay_s = max(0.1, channel.next_message_delay_ms(now_ms) / 1000)
            self.at(now_ms / 1000 + delay_s, lambda: self._pump_later(task))

    def _pump_later(self, task: Task) -> None:
        self.pumping.discard(task.number)
        self._pump(task)

    # -- causes of storms ---------------------------------------------------------------------------

    def freeze(self, share: float) -> None:
        """A broker freezes. So many of the tasks mute it by themselves, when it has been silent."""
        self.is_muted, self.sick_responds = True, False
        self.heard_at.clear()
        begin = time.monotonic() + SILENCE_S
        self.told_from = begin
        report = encode_report(BreakerReport(muted=(MuteReport(SICK, "silent", 2000.0),)))
        for task in self.tasks:
            if self.chance.random() < share:
                at = begin + self.chance.random() * OWN_EVIDENCE_S
                self.at(at, lambda task=task: self.tell(task, "breaker", report))

    def thaw(self) -> None:
        """The broker responds again: the next probe is a success."""
        self.sick_responds, self.is_muted = True, False
        self.free_at.clear()

    def told_s(self) -> float | None:
        """From the first to know of a mute, or of its end, to the last; None where somebody does not."""
        found = self.free_at if self.sick_responds else self.heard_at
        if len(found) < len(self.tasks):
            return None
        first = min(found.values())
        return round(max(found.values()) - (first if self.sick_responds else self.told_from), 2)

    def cut(self, share: float) -> None:
        """Relays are killed: their connections end."""
        for host in list(self.hosts):
            if not host.is_lost and self.chance.random() < share:
                self._end(host)

    def churn(self, per_s: int, seconds: float) -> None:
        """Tasks end and others begin in their places, in workers of their own."""
        begin = time.monotonic()
        for number in range(int(per_s * seconds)):
            task = self.chance.choice(self.tasks)
            self.at(begin + number / per_s, lambda task=task: self._replace(task))

    def _replace(self, task: Task) -> None:
        self._run_next(task)
        self._enter(task, 0.01)
