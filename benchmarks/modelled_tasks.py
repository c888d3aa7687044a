"""Thousands of tasks' connections to a coordinator, on one thread, that cost little.

Each connects by TLS, proves the token and sends what a task's channels send (``BreakerChannel``,
``MetadataChannel``, ``ReportChannel``, ``WriteChannel``), as often, as ``CoordinatorClient`` does. Messages
are real ones, made once for all tasks where they are alike, and decoded once for all. All tasks write to all
partitions and hold batches for all that is muted, which is the worst case.

Not modelled: rows, rates, and metadata that change.
"""

from __future__ import annotations

import errno
import heapq
import random
import selectors
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from kafka_sink.clock import COORDINATOR_SILENCE_MS, REPORT_OUTCOMES_MS, ExponentialBackoff
from kafka_sink.cluster.topic_state import MetadataSnapshot, TopicSnapshot
from kafka_sink.coordinator.breaker_messages import (
    MAX_TARGETS,
    MAX_WAITING,
    Answer,
    MuteChanges,
    Mutes,
    Outcomes,
    OwnMute,
    PartitionOutcome,
    Probe,
    Question,
    Waiting,
    Watch,
)
from kafka_sink.coordinator.live.messages import BrokerReport, ReportEvery, TaskIdentity, TaskReport
from kafka_sink.coordinator.metadata import Fetch, TopicsFetched, TopicsWanted, parts_of
from kafka_sink.coordinator.rendezvous import RunningCoordinator
from kafka_sink.coordinator.schema import MAX_MESSAGE_BYTES, Alive, Hello, Message, decode
from kafka_sink.coordinator.transport import VERSION, FrameReader, framed, framed_bytes
from kafka_sink.coordinator.writes import Writing
from kafka_sink.counts import TopicMetrics
from kafka_sink.model import Node, Partitions, TopicMetadata, TopicPartition
from kafka_sink.options import parse

TOPIC, CLUSTER_ID, SICK, BROKERS = "orders", "modelled", 1, 3
OPTIONS = parse({"kafka.bootstrap.servers": "127.0.0.1:9092", "topic": TOPIC}).options
# The values of CoordinatorClient: a task sends a sign of life after this long without a message, and while
# any broker is muted; pauses, bounds.
ALIVE_S, ALIVE_MUTED_S = 60.0, 10.0
BACKOFF_MS, BACKOFF_MAX_MS, AT_ONCE_S = 1000.0, 30_000.0, 0.1
CONNECT_S, GIVE_UP_S = 10.0, COORDINATOR_SILENCE_MS / 1000
# How soon tasks with requests at a frozen broker notice it, how long such a probe takes, and one that
# succeeds.
SILENCE_S, NOTICE_S, PROBE_S, BACK_S = 0.5, 2.0, 1.0, 0.01
OUTCOMES_S = WAITING_S = REPORT_OUTCOMES_MS / 1000
SPREAD_S, STALLED_S = 0.0003, 0.5
FIRST_REPORT_S, USE_S, NAME_AGAIN_S = 0.3, 60.0, 10.0
CONNECTS_PER_S = 500
# Linux: choose the port when connecting, so that each address has its own.
IP_BIND_ADDRESS_NO_PORT = 24
_READ_BYTES = 1 << 18


def report_of(number: int) -> TaskReport:
    """The report of a task with one topic on all brokers."""
    counts = tuple(range(len(TopicMetrics._fields)))
    brokers = {node: BrokerReport(f"kafka-{node}:9092", 9, latency_ms=99.0) for node in range(BROKERS)}
    identity = TaskIdentity("write", number, number, host=f"host-{number // 8}")
    return TaskReport("kafka:9092", identity, 1e4, topics={TOPIC: counts}, brokers=brokers)


@dataclass(eq=False, slots=True)
class Task:
    """``stage``: 0 not connected, 1 in TLS's handshake, 2 with proof. Times are seconds, 0 if there is none;
    ``alive_at``, ``said_at`` and ``since``, when it began to connect, are those of ``Crowd.clock``. The mutes
    that it has been informed of: the broker, and how many partitions."""

    number: int
    source: str
    sock: Any = None
    stage: int = 0
    failures: int = 0
    attempt: int = 0
    frames: FrameReader = field(default_factory=lambda: FrameReader(MAX_MESSAGE_BYTES))
    since: float = 0.0
    alive_at: float = 0.0
    said_at: float = 0.0
    beat_at: float = 0.0
    report_s: float = 1.0
    report_at: float = 0.0
    has_muted_broker: bool = False
    muted_partitions: int = 0
    says_waiting: bool = False
    named: frozenset[TopicPartition] = frozenset()

    @property
    def is_waiting(self) -> bool:
        return self.has_muted_broker or self.muted_partitions > 0


class Crowd:
    """``find``: returns the address at which planning has found the coordinator."""

    def __init__(self, find: Callable[[], RunningCoordinator], tasks: int, partitions: int) -> None:
        self.find = find
        self.tasks = [Task(number, f"127.1.{number // 1000}.{1 + number % 8}") for number in range(tasks)]
        self.partitions = [TopicPartition(TOPIC, number) for number in range(partitions)]
        self.chance = random.Random(7)
        self.responds, self.fails = True, False
        # Since the last mark.
        self.latencies: list[float] = []
        self.informed: dict[int, float] = {}
        self.informed_from = 0.0
        self.lost = self.gave_up = self.unconnected = self.reports = 0
        # The mutes according to the last message; by message, its changes, and the responses of watchers.
        self._muted: set[TopicPartition] = set()
        self._changes: dict[int, tuple[bool | None, int]] = {}
        self._watched: dict[int, bytes] = {}
        self._failing: list[bytes] = []
        self._selector = selectors.DefaultSelector()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._stalled_s = 0.0
        self._backoff = ExponentialBackoff(BACKOFF_MS, BACKOFF_MAX_MS, self.chance.random)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._context.minimum_version = ssl.TLSVersion.TLSv1_3
        self._context.check_hostname = False
        self._context.verify_mode = ssl.CERT_NONE
        self._decoded: dict[bytes, Message] = {}
        self._alive = framed(Alive())
        # Planning has given it the metadata of its topic.
        self._uses = framed(TopicsWanted({TOPIC: None}))
        self._writing = framed(Writing("write"))
        silent = OwnMute(SICK, f"broker {SICK} has not responded for 500 ms", 1000 * SILENCE_S)
        self._wanted = framed(MuteChanges((silent,)))
        self._on: dict[type, Callable[[Task, Any], None]] = {
            Alive: self._on_alive,
            Mutes: self._on_mutes,
            Question: self._on_question,
            Watch: self._on_watch,
            Probe: self._on_probe,
            Fetch: self._on_fetch,
            ReportEvery: self._on_report_every,
        }

    def clock(self) -> float:
        """Seconds in which the tasks could have read: as in the real client, the time that the model itself
        takes is not counted as a peer's silence."""
        return time.monotonic() - self._stalled_s

    # -- time ----------------------------------------------------------------------------------------

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        self._order += 1
        heapq.heappush(self._due, (time.monotonic() + seconds, self._order, act))

    def run_until(self, condition: Callable[[], bool], seconds: float) -> float | None:
        """Like ``run``, until this condition is true. Returns the seconds that it took."""
        started = time.monotonic()
        while not condition():
            if time.monotonic() > started + seconds:
                return None
            self.run(0.02)
        return time.monotonic() - started

    def run(self, seconds: float) -> None:
        """Let the tasks do the work that is due for this long."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            for _ in range(1000):
                if not self._due or self._due[0][0] > now:
                    break
                heapq.heappop(self._due)[2]()
            next_s = min(end, self._due[0][0] if self._due else end) - time.monotonic()
            ready = self._selector.select(min(0.05, max(0.0, next_s)))
            for key, _ in ready:
                if key.data.sock is key.fileobj:
                    self._guarded(key.data)
            took_s = time.monotonic() - now
            self._stalled_s += took_s if took_s > STALLED_S else 0.0

    def mark(self) -> None:
        """Start counting anew."""
        self.latencies = []
        for kept in (self._decoded, self._changes, self._watched):
            kept.clear()
        self.lost = self.gave_up = self.unconnected = self.reports = 0

    def begin_telling(self) -> None:
        """From now on each task is to be informed of a change."""
        self.informed, self.informed_from = {}, time.monotonic()

    # -- connections ---------------------------------------------------------------------------------

    def connect_all(self, seconds: float | None = None) -> None:
        """Start all tasks that have no connection, within this many seconds, or as fast as tasks of a stage
        start."""
        away = [task for task in self.tasks if task.sock is None]
        seconds = len(away) / CONNECTS_PER_S if seconds is None else seconds
        for number, task in enumerate(away):
            self.after(seconds * number / len(away), partial(self._connect, task))

    @property
    def connected(self) -> int:
        return sum(task.stage == 2 for task in self.tasks)

    def cut(self) -> None:
        """The network drops all connections."""
        for task in self.tasks:
            if task.sock is not None:
                self._end(task)
                self.after(self.chance.random() * AT_ONCE_S, partial(self._connect, task))

    def leave(self) -> None:
        """End all tasks."""
        for task in self.tasks:
            if task.sock is not None:
                self._end(task)
        self._due.clear()

    def _connect(self, task: Task) -> None:
        if task.sock is not None:
            return
        found = self.find()
        plain = socket.socket()
        plain.setblocking(False)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        plain.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
        plain.bind((task.source, 0))
        if plain.connect_ex(("127.0.0.1", found.address.port)) not in (0, errno.EINPROGRESS):
            plain.close()
            self._retry(task)
            return
        task.sock, task.stage = plain, 0
        task.frames = FrameReader(MAX_MESSAGE_BYTES)
        task.attempt += 1
        task.since = self.clock()
        self._selector.register(plain, selectors.EVENT_WRITE, task)
        self.after(CONNECT_S, partial(self._bound_connecting, task, task.attempt))

    def _bound_connecting(self, task: Task, attempt: int) -> None:
        if task.attempt != attempt or task.sock is None or task.stage == 2:
            return
        left_s = task.since + CONNECT_S - self.clock()
        if left_s > 0:
            self.after(left_s, partial(self._bound_connecting, task, attempt))
        else:
            self.unconnected += 1
            self._end(task)
            self._retry(task)

    def _retry(self, task: Task) -> None:
        task.failures += 1
        wait_s = self._backoff.delay_ms(task.failures) / 1000 * (0.5 + self.chance.random())
        self.after(wait_s, partial(self._connect, task))

    def _end(self, task: Task) -> None:
        self._selector.unregister(task.sock)
        task.sock.close()
        task.sock, task.stage, task.alive_at, task.beat_at = None, 0, 0.0, 0.0
        task.has_muted_broker, task.muted_partitions, task.report_at = False, 0, 0.0

    def _guarded(self, task: Task) -> None:
        try:
            self._on_ready(task)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            pass
        except OSError:
            self._lose(task)

    def _on_ready(self, task: Task) -> None:
        if task.stage == 0:
            if error := task.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, "not connected")
            plain, name = task.sock, self.find().address.name
            self._selector.unregister(plain)
            task.sock = self._context.wrap_socket(plain, server_hostname=name, do_handshake_on_connect=False)
            task.stage = 1
            self._selector.register(task.sock, selectors.EVENT_READ, task)
        if task.stage == 1:
            task.sock.do_handshake()
            self._begin(task)
        with suppress(ssl.SSLWantReadError):
            while task.sock is not None:
                data = task.sock.recv(_READ_BYTES)
                if not data:
                    raise OSError(errno.ECONNRESET, "the coordinator closed it")
                task.frames.feed(data)
        while task.sock is not None and (message := task.frames.next_message()) is not None:
            self._on_message(task, self._decode(message))

    def _begin(self, task: Task) -> None:
        """A task has connected: it sends the proof, the group, and its first messages."""
        found = self.find()
        hello = Hello(found.group_of(OPTIONS.identity_of_cluster()), CLUSTER_ID, OPTIONS.group_settings())
        proof = framed_bytes(bytes((VERSION,)) + found.address.token)
        task.stage, task.failures = 2, 0
        self._write(task, proof + framed(hello) + self._uses + self._writing + self._alive)
        task.alive_at = self.clock()
        self._beat_after(task, ALIVE_S * self.chance.random())
        self.after(USE_S * self.chance.random(), partial(self._use, task, task.attempt))
        # The first report comes soon, so that it is seen; a task that connects again reports within its
        # interval.
        self._report_after(task, FIRST_REPORT_S + self.chance.random() * task.report_s)

    def _write(self, task: Task, data: bytes) -> None:
        task.said_at = self.clock()
        try:
            task.sock.send(data)
        except OSError:
            # The coordinator is gone, or has not read for so long that the system's buffers are full.
            self._lose(task)

    def _lose(self, task: Task) -> None:
        self.lost += 1
        self._end(task)
        self._retry(task)

    def _say(self, task: Task, *frames: bytes) -> None:
        if task.stage == 2:
            self._write(task, b"".join(frames))

    def _decode(self, data: bytes) -> Message:
        """Decode a message to many tasks once for all of them."""
        found = self._decoded.get(data)
        if found is None:
            found = self._decoded[data] = decode(data)
            if isinstance(found, Mutes):
                self._note(found)
        return found

    # -- metadata ------------------------------------------------------------------------------------

    def _use(self, task: Task, attempt: int) -> None:
        if task.stage == 2 and task.attempt == attempt:
            self._write(task, self._uses)
            self.after(USE_S, partial(self._use, task, attempt))

    def _on_fetch(self, task: Task, message: Fetch) -> None:
        count = len(self.partitions)
        leaders = (number % BROKERS for number in range(count))
        topic = TopicMetadata(TOPIC, None, Partitions(TOPIC, leaders, [0] * count))
        nodes = tuple(Node(number, f"kafka-{number}", 9092, None) for number in range(BROKERS))
        snapshot = MetadataSnapshot((TopicSnapshot(topic, 0.0),), nodes, 0.0, CLUSTER_ID)
        self._say(task, framed(TopicsFetched(message.number, next(parts_of(snapshot)))))

    # -- signs of life -------------------------------------------------------------------------------

    def _beat_after(self, task: Task, seconds: float) -> None:
        task.beat_at = time.monotonic() + seconds
        self.after(seconds, partial(self._beat, task, task.beat_at))

    def _beat(self, task: Task, at: float) -> None:
        if task.stage != 2 or task.beat_at != at:
            return
        now = self.clock()
        quiet_s = now - task.said_at
        if task.alive_at and now - task.alive_at >= GIVE_UP_S:
            self.gave_up += 1
            self.latencies.append(now - task.alive_at)
            self._end(task)
            self._retry(task)
        elif task.alive_at:
            self._beat_after(task, max(0.0, task.alive_at + GIVE_UP_S - now))
        elif task.is_waiting or quiet_s >= ALIVE_S:
            task.alive_at = now
            self._write(task, self._alive)
            self._beat_after(task, GIVE_UP_S)
        else:
            self._beat_after(task, ALIVE_S - quiet_s)

    def _on_alive(self, task: Task, _: Alive) -> None:
        if task.alive_at:
            now = self.clock()
            self.latencies.append(now - task.alive_at)
            task.alive_at = 0.0
            self._beat_after(task, ALIVE_MUTED_S if task.is_waiting else ALIVE_S)

    # -- the live view -------------------------------------------------------------------------------

    def _report_after(self, task: Task, seconds: float) -> None:
        task.report_at = time.monotonic() + seconds
        self.after(seconds, partial(self._report, task, task.report_at))

    def _report(self, task: Task, at: float) -> None:
        if task.stage == 2 and task.report_at == at:
            self.reports += 1
            self._say(task, framed(report_of(task.number)))
            self._report_after(task, task.report_s)

    def _on_report_every(self, task: Task, message: ReportEvery) -> None:
        task.report_s = message.interval_ms / 1000
        self._report_after(task, task.report_s * (0.5 + 0.5 * self.chance.random()))

    # -- the breaker ---------------------------------------------------------------------------------

    def freeze(self, share: float) -> None:
        """A broker freezes, and this share of the tasks finds evidence of its own within some seconds. The
        time until all are informed counts from the first of these tasks' reports."""
        self.responds = False
        self.begin_telling()
        self.informed_from = 0.0
        for task in self.tasks:
            if self.chance.random() < share:
                self.after(SILENCE_S + self.chance.random() * NOTICE_S, partial(self._notice, task))

    def _notice(self, task: Task) -> None:
        if not self.responds and not task.has_muted_broker and task.stage == 2:
            self.informed_from = self.informed_from or time.monotonic()
            self._say(task, self._wanted)

    def thaw(self) -> None:
        self.responds = True
        self.begin_telling()

    def fail(self) -> None:
        """All partitions fail for all tasks, which report some of them at most at once."""
        self.fails = True
        self._failing = self._outcomes(self.partitions)
        self.begin_telling()
        for task in self.tasks:
            self.after(self._spread_s(OUTCOMES_S), partial(self._report_failures, task))

    def _spread_s(self, least_s: float) -> float:
        """The time at which a task reports what other tasks will also report: the more tasks there are, the
        later."""
        return self.chance.random() * max(least_s, SPREAD_S * len(self.tasks))

    def recover(self) -> None:
        self.fails = False
        self.begin_telling()

    def _report_failures(self, task: Task) -> None:
        if self.fails and self._failing:
            self._say(task, self.chance.choice(self._failing))
            self.after(OUTCOMES_S, partial(self._report_failures, task))

    def _outcomes(self, partitions: list[TopicPartition]) -> list[bytes]:
        """The messages that report how these partitions fare."""
        failed, written, error = (3, 0, "NOT_ENOUGH_REPLICAS") if self.fails else (0, 3, "")
        said = []
        for start in range(0, len(partitions), MAX_TARGETS):
            found = [
                PartitionOutcome(one, written, failed, self.fails, error)
                for one in partitions[start : start + MAX_TARGETS]
            ]
            said.append(framed(Outcomes(1000, tuple(found))))
        return said

    def _on_watch(self, task: Task, message: Watch) -> None:
        answer = self._watched.get(id(message))
        if answer is None:
            outcomes = self._outcomes(list(message.partitions))
            answer = self._watched[id(message)] = b"".join(outcomes)
        self._say(task, answer)

    def _on_question(self, task: Task, message: Question) -> None:
        if self.responds or message.broker != SICK:
            self._say(task, framed(Answer(message.broker, 5.0)))

    def _on_probe(self, task: Task, message: Probe) -> None:
        is_of_broker = any(isinstance(one, int) for one in message.targets)
        succeeds = self.responds if is_of_broker else not self.fails
        if succeeds:
            self.after(BACK_S, partial(self._say, task, framed(MuteChanges(unmuted=message.targets))))
        else:
            self.after(PROBE_S, partial(self._say, task, framed(MuteChanges(failed=message.targets))))

    def _note(self, message: Mutes) -> None:
        """The mutes that it adds and removes, for all tasks that are informed."""
        added, removed = dict(message.added), message.removed
        broker = SICK in added if SICK in (*added, *removed) else None
        partitions = {one for one in added if not isinstance(one, int)}
        gone = {one for one in removed if not isinstance(one, int)}
        self._changes[id(message)] = broker, len(partitions) - len(gone)
        self._muted = (partitions if message.whole else self._muted | partitions) - gone
        if self.fails:
            self._failing = self._outcomes([one for one in self.partitions if one not in self._muted])

    def _on_mutes(self, task: Task, message: Mutes) -> None:
        was_waiting = task.is_waiting
        if message.whole:
            task.has_muted_broker, task.muted_partitions = False, 0
        broker, partitions = self._changes[id(message)]
        task.has_muted_broker = task.has_muted_broker if broker is None else broker
        task.muted_partitions = max(0, task.muted_partitions + partitions)
        all_muted = len(self.partitions) if self.fails else 0
        if task.muted_partitions == all_muted and task.has_muted_broker is not self.responds:
            self.informed.setdefault(task.number, time.monotonic())
        if partitions and len(task.named & self._muted) < MAX_WAITING // 2:
            self._wait_to_name(task)
        if task.is_waiting and not was_waiting:
            self._beat_after(task, ALIVE_MUTED_S * self.chance.random())

    def _wait_to_name(self, task: Task) -> None:
        if task.muted_partitions and not task.says_waiting:
            task.says_waiting = True
            self.after(self._spread_s(WAITING_S), partial(self._say_waiting, task))

    def _say_waiting(self, task: Task) -> None:
        task.says_waiting = False
        if self._muted and task.stage == 2:
            some = self.chance.sample(tuple(self._muted), min(MAX_WAITING, len(self._muted)))
            task.named = frozenset(some)
            self.after(NAME_AGAIN_S, partial(self._wait_to_name, task))
            self._say(task, framed(Waiting(tuple(some), ())))

    @property
    def is_back(self) -> bool:
        """Whether all tasks are connected, and each has had a reply to all that it has said."""
        return all(task.stage == 2 and not task.alive_at for task in self.tasks)

    @property
    def are_told(self) -> bool:
        return len(self.informed) == len(self.tasks)

    def told_s(self) -> float | None:
        """Run until the last task has been informed of the last change, if all tasks have been."""
        if len(self.informed) < len(self.tasks):
            return None
        return max(self.informed.values()) - self.informed_from

    def _on_message(self, task: Task, message: Message) -> None:
        act = self._on.get(type(message))
        if act is not None:
            act(task, message)
