"""How long single turns of the coordinator's loop take where thousands of things happen at once.

    python -m benchmarks.coordinator_turns [reconnect] [mutes] [view] [stall]

As in ``coordinator_work``, all that the server does with a frame is done in this process, without sockets.
Only its processor time counts, so a busy machine blurs little. A turn handles what has come when it begins;
what comes meanwhile waits for its end.

- reconnect: 4,000 tasks of 500 executors lose their connections while a broker is muted, and enter a server
  that has just been started. All report figures to the live view.
- mutes: 5,000 and 10,000 partitions fail together and are muted, each of 1,000 reporters holds batches for
  700 of them, and they are unmuted. A reporter is a relay with its tasks, or a worker without one.
- view: 1,000 tasks write to 20 topics on 10 brokers, report all they report, and two clients read the live
  view as often as it changes.
- stall: the same with 10,000 tasks, and the server stands still for 5 s. Tasks whose report has had no reply
  for 2 s leave their relay and enter again. What has come meanwhile is handled at once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from benchmarks.coordinator_work import KEY, PER_HOST, STEP_MS, Nowhere, resident_mib, timed
from benchmarks.modelled_relay import ModelledRelay
from benchmarks.modelled_tasks import SECRET, SICK, written_figures
from benchmarks.surroundings import RESULTS
from kafka_sink.coordinator.breaker.cluster_breakers import ClusterBreakers
from kafka_sink.coordinator.breaker.messages import (
    MAX_MUTES,
    MAX_TARGETS,
    BreakerReport,
    BreakerUpdate,
    MuteReport,
    OutcomeCounts,
    UnmuteReport,
    decode_update,
    encode_report,
)
from kafka_sink.coordinator.figures.application_figures import ApplicationFigures
from kafka_sink.coordinator.figures.channel import FiguresChannel
from kafka_sink.coordinator.figures.messages import TaskIdentity
from kafka_sink.coordinator.figures.metrics import exposition
from kafka_sink.coordinator.process.server_process import _handlers, collect_garbage_seldom
from kafka_sink.coordinator.transport.connections import ServerBounds
from kafka_sink.coordinator.transport.message_format import prefixed, split_lines, unpacked
from kafka_sink.coordinator.transport.peer_connection import PeerConnection
from kafka_sink.coordinator.transport.server import CoordinatorServer
from kafka_sink.coordinator.transport.session import MAX_FRAME_BYTES, FrameReader, Session, parse
from kafka_sink.model import TopicPartition
from kafka_sink.options import parse as parse_options
from kafka_sink.timing_bounds import COORDINATOR_SILENCE_MS, HEALTHY_REPORT_MS
from tests.support.fake_broker import FakeCluster

FILE = RESULTS / "coordinator_turns.json"
HEALTHY = BreakerReport({0: 5.0, 2: 5.0}, 4800)


class Turns:
    """A server, its connections, and how long its turns have taken since ``begin``."""

    def __init__(self, bootstrap: str) -> None:
        self.now_ms = 1_000_000.0
        self.figures = ApplicationFigures()
        bounds = ServerBounds(connections=100_000, messages_per_s=1e9)
        self.server = CoordinatorServer(SECRET, _handlers(self.figures), lambda: self.now_ms, bounds)
        self.server.add_cluster(KEY, parse_options({"kafka.bootstrap.servers": bootstrap}).options)
        self.server._loop = asyncio.get_running_loop()
        self.hosts: list[Host] = []
        self.spent: list[float] = []

    def begin(self) -> None:
        self.spent = []

    def ended(self) -> dict[str, Any]:
        return {
            "seconds": round(sum(self.spent), 3),
            "longest_ms": round(1000 * max(self.spent), 1),
            "rss_mib": round(resident_mib()),
        }

    async def take(self, host: Host, payload: bytes) -> None:
        data = host.client.encode_payload(payload)
        self.spent.append(timed(lambda: self.server.on_bytes(host.peer, data)))
        await self.write()

    async def tick(self, ms: float) -> None:
        self.now_ms += ms
        running = self.server._clusters.running(KEY)
        if running is not None and running.next_change_ms(self.now_ms) <= 0:
            self.spent.append(timed(lambda: self.server._on_time(KEY)))
            await self.write()

    async def write(self) -> None:
        """The rest of what it writes, which it does in further turns."""
        while self.server._to_write:
            started = time.thread_time()
            await asyncio.sleep(0)
            self.spent.append(time.thread_time() - started)


class Host:
    """An executor's connection, with or without a relay that adds up."""

    def __init__(self, turns: Turns, number: int, relay: ModelledRelay | None = None) -> None:
        self.turns = turns
        self.relay = relay
        self.client, self.written = Session(SECRET, "client"), Nowhere()
        server = turns.server
        server._count += 1
        self.peer = PeerConnection(
            server._count, f"h{number}", Session(SECRET, "server"), server, turns.now_ms
        )
        # The clock stands still meanwhile.
        self.peer.allowance = math.inf
        self.frames = FrameReader(MAX_FRAME_BYTES)
        self.count = 0
        turns.hosts.append(self)
        turns.spent.append(timed(self._greet))
        proof = self.client.reply_to_greeting(self.written.taken())
        turns.spent.append(timed(lambda: server.on_bytes(self.peer, proof)))
        self.client.verify_proof(self.written.taken())
        named = self.client.encode({"cluster": KEY, **({} if relay is None else {"relay": True})})
        turns.spent.append(timed(lambda: server.on_bytes(self.peer, named)))

    def _greet(self) -> None:
        self.turns.server._connections.add(self.peer)
        self.peer.connection_made(self.written)

    def line(self, task: int, kind: str, body: Mapping[str, Any]) -> bytes:
        self.count += 1
        message = {"id": self.count, "kind": kind, "body": body}
        return prefixed((task,), json.dumps(message, separators=(",", ":")).encode())

    def say(self, task: int, kind: str, body: Mapping[str, Any]) -> None:
        """By way of the relay."""
        assert self.relay is not None
        self.count += 1
        self.relay.say(task, self.count, kind, body, self.turns.now_ms)

    def received(self) -> Iterable[tuple[tuple[int, ...], dict[str, Any]]]:
        """For which tasks the server has written what. Messages for the relay itself reach it."""
        self.frames.feed(self.written.taken(with_length=True))
        while (frame := self.frames.next_frame()) is not None:
            for line in split_lines(self.client.payload(frame)):
                if not line.tasks and self.relay is not None:
                    self.relay.receive(line.message, self.turns.now_ms)
                else:
                    yield line.tasks, parse(line.message)


# -- all reconnect ----------------------------------------------------------------------------------


async def reconnect(bootstrap: str, tasks: int = 4000) -> dict[str, Any]:
    turns = Turns(bootstrap)
    turns.begin()
    for number in range(tasks // PER_HOST):
        Host(turns, number, ModelledRelay(0.0, turns.now_ms))
    found = {"handshake": turns.ended()}
    turns.begin()
    mute = MuteReport(SICK, "silent", 3000.0)
    first = BreakerReport(rows=1, cluster_id="modelled-kafka", muted=(mute,), holds=(SICK,))
    live: list[FiguresChannel] = []
    for host in turns.hosts:
        for task in range(1, PER_HOST + 1):
            host.say(task, "metadata", {"use": ["orders"], "stale": []})
            host.say(task, "breaker", encode_report(first))
            live.append(live_channel(turns, len(live)))
    for _ in range(10):
        for host in turns.hosts:
            if host.relay is not None and (payload := host.relay.payload(turns.now_ms)):
                await turns.take(host, payload)
            list(host.received())
        await turns.tick(10.0)
    found["first_reports"] = turns.ended()
    # All at once, as if the loop had stood still meanwhile.
    turns.begin()
    turns.now_ms += 300.0
    for number, host in enumerate(turns.hosts):
        channels = enumerate(live[number * PER_HOST : (number + 1) * PER_HOST], 1)
        bodies = [(task, channel.next_message(turns.now_ms)) for task, channel in channels]
        lines = [host.line(task, "figures", body) for task, body in bodies if body is not None]
        await turns.take(host, b"\n".join(lines))
    found["figures"] = turns.ended()
    return {"tasks": tasks, **found, "reports_taken": turns.figures.reports}


# -- thousands of partitions muted together -----------------------------------------------------------


class Mutes(Turns):
    """So many partitions, and reporters on connections of eight."""

    def __init__(self, bootstrap: str, partitions: int, reporters: int) -> None:
        super().__init__(bootstrap)
        self.names = sorted(
            TopicPartition(f"orders-of-region-{number % 100:03}", number // 100)
            for number in range(partitions)
        )
        self.reporters = reporters
        self.reported_ms = self.now_ms
        for number in range(-(-reporters // PER_HOST)):
            Host(self, number)

    @property
    def muted(self) -> int:
        running = self.server._clusters.running(KEY)
        assert running is not None
        breakers = running.handlers["breaker"]
        assert isinstance(breakers, ClusterBreakers)
        return sum(1 for _ in breakers.muted(self.now_ms))

    async def say(self, place: int, report: BreakerReport) -> None:
        host = self.hosts[place // PER_HOST]
        await self.take(host, host.line(place % PER_HOST + 1, "breaker", encode_report(report)))

    async def fail(self, place: int, failing: list[TopicPartition]) -> None:
        for start in range(0, len(failing), MAX_TARGETS):
            part = failing[start : start + MAX_TARGETS]
            outcomes = tuple(OutcomeCounts(one, 0, 5, True, "NOT_ENOUGH_REPLICAS") for one in part)
            await self.say(place, BreakerReport(rows=4800, outcomes=outcomes))

    def told(self) -> Iterator[tuple[int, BreakerUpdate]]:
        """Reporters and what they were told since the last time."""
        for at, host in enumerate(self.hosts):
            for tasks, message in host.received():
                if message["body"]:
                    update = decode_update({"whole": False, **unpacked(message["body"])}, MAX_MUTES)
                    for task in tasks:
                        yield at * PER_HOST + task - 1, update

    async def mute_all(self) -> None:
        """Ten fail by themselves, and others when they are asked."""
        for place in range(10):
            await self.fail(place, self.names)
        for _ in range(200):
            await self.tick(50.0)
            for place, update in list(self.told()):
                await self.fail(place, [one for one in update.asks if isinstance(one, TopicPartition)])
            if self.muted == len(self.names):
                return
        raise RuntimeError(f"{self.muted} of {len(self.names)} partitions are muted")

    async def hold(self) -> None:
        for place in range(self.reporters):
            start = place * MAX_TARGETS % (len(self.names) - MAX_TARGETS + 1)
            await self.say(place, BreakerReport(holds=tuple(self.names[start : start + MAX_TARGETS])))
            if place % 100 == 0:
                await self.tick(50.0)

    async def wait(self, steps: int, step_ms: float = 50.0) -> None:
        """Time passes, in which all report as often as they do."""
        for _ in range(steps):
            await self.tick(step_ms)
            since_ms, self.reported_ms = self.reported_ms, self.now_ms
            first, last = (int(one * self.reporters / HEALTHY_REPORT_MS) for one in (since_ms, self.now_ms))
            for place in range(max(first, last - self.reporters), last):
                await self.say(place % self.reporters, BreakerReport(rows=4800))

    async def unmute(self) -> None:
        """Those with leases find that all is well."""
        while leased := [(place, update.leases) for place, update in self.told() if update.leases]:
            for place, leases in leased:
                over = tuple(UnmuteReport(one, "it responds") for one in leases)
                await self.say(place, BreakerReport(unmuted=over))
            await self.wait(1)


async def mutes(bootstrap: str, partitions: int, reporters: int = 1000) -> dict[str, Any]:
    turns = Mutes(bootstrap, partitions, reporters)
    for place in range(reporters):
        await turns.say(place, BreakerReport(rows=100_000, cluster_id="modelled-kafka"))
    list(turns.told())
    turns.begin()
    began_ms = turns.now_ms
    await turns.mute_all()
    found = {"until_muted": {**turns.ended(), "after_ms": turns.now_ms - began_ms}}
    turns.begin()
    await turns.hold()
    found["all_hold"] = turns.ended()
    turns.begin()
    await turns.wait(240)
    found["muted_12_s"] = turns.ended()
    turns.begin()
    await turns.unmute()
    found["unmuting"] = {**turns.ended(), "left": turns.muted}
    return {"partitions": partitions, "reporters": reporters, **found}


# -- the live view ------------------------------------------------------------------------------------


class View(Turns):
    """Tasks behind relays that report all they report."""

    step_ms = STEP_MS

    def __init__(self, bootstrap: str, tasks: int) -> None:
        super().__init__(bootstrap)
        self.live: list[tuple[Host, int, FiguresChannel]] = []
        # Of each look: what stops the loop, and what the view's own thread does.
        self.snapshots: list[float] = []
        self.answers: list[float] = []
        for number in range(tasks // PER_HOST):
            phase_ms = number * 0.618034 % 1 * HEALTHY_REPORT_MS
            host = Host(self, number, ModelledRelay(phase_ms, self.now_ms))
            for task in range(1, PER_HOST + 1):
                self.live.append((host, task, live_channel(self, number * PER_HOST + task)))
                first = BreakerReport(rows=1, cluster_id="modelled-kafka")
                host.say(task, "breaker", encode_report(first))

    def begin(self) -> None:
        super().begin()
        self.snapshots, self.answers = [], []

    def tasks_say(self) -> list[int]:
        """The places of those that send figures."""
        steps = int(HEALTHY_REPORT_MS / self.step_ms)
        said = []
        for place, (host, task, channel) in enumerate(self.live):
            if int(self.now_ms / self.step_ms) % steps == place * 7 % steps:
                host.say(task, "breaker", encode_report(HEALTHY))
            while (body := channel.next_message(self.now_ms)) is not None:
                host.say(task, "figures", body)
                said.append(place)
        return said

    async def relays_send(self) -> None:
        for number, host in enumerate(self.hosts):
            relay = host.relay
            if relay is None or relay.due_ms(self.now_ms) > self.now_ms:
                continue
            await self.take(host, relay.payload(self.now_ms))
            for tasks, message in host.received():
                for task in tasks:
                    channel = self.live[number * PER_HOST + task - 1][2]
                    channel.on_reply(message["body"], True, self.now_ms)

    def look(self) -> None:
        shown: list[Mapping[str, Any]] = []
        self.snapshots.append(timed(lambda: shown.append(self.figures.snapshot(self.now_ms))))
        self.answers.append(timed(lambda: _encode(shown[0])))

    async def run(self, seconds: int) -> None:
        until_ms = self.now_ms + 1000 * seconds
        while self.now_ms < until_ms:
            self.tasks_say()
            await self.relays_send()
            await self.tick(self.step_ms)
            if self.now_ms % 1000 == 0:
                self.spent.append(timed(lambda: self.figures.sample(self.now_ms)))
            if self.now_ms % 500 == 0:
                self.look()


def _encode(shown: Mapping[str, Any]) -> None:
    json.dumps(shown)
    exposition(shown)


def live_channel(turns: Turns, task: int) -> FiguresChannel:
    """Of a task that has just begun."""
    channel = FiguresChannel(
        lambda identity: written_figures(identity, int(turns.now_ms / 100)), lambda: turns.now_ms
    )
    channel.begin(TaskIdentity("write", task, host=f"h{task // PER_HOST}"))
    return channel


async def view(bootstrap: str, tasks: int = 1000, seconds: int = 30) -> dict[str, Any]:
    turns = View(bootstrap, tasks)
    await turns.run(30)
    turns.begin()
    reports = turns.figures.reports
    await turns.run(seconds)
    turns.spent += turns.snapshots
    return {
        "tasks": tasks,
        "reports_a_second": round((turns.figures.reports - reports) / seconds),
        "percent_of_a_core": round(100 * (sum(turns.spent) + sum(turns.answers)) / seconds, 1),
        "longest_ms": round(1000 * max(turns.spent), 1),
        "longest_snapshot_ms": round(1000 * max(turns.snapshots), 1),
    }


class Stall(View):
    """A view whose server may stand still. Relays go on, and so do tasks."""

    step_ms = 50.0

    def __init__(self, bootstrap: str, tasks: int) -> None:
        super().__init__(bootstrap, tasks)
        self.waiting: list[tuple[Host, bytes]] = []
        # By place, since when a report waits for its reply.
        self.asked_ms: dict[int, float] = {}
        self.gave_up = 0

    def tasks_give_up(self) -> None:
        for place, asked_ms in list(self.asked_ms.items()):
            if self.now_ms - asked_ms > COORDINATOR_SILENCE_MS:
                del self.asked_ms[place]
                self.gave_up += 1
                host, task, channel = self.live[place]
                assert host.relay is not None
                host.relay.leave(task, self.now_ms)
                host.say(task, "metadata", {"use": ["orders"], "stale": []})
                host.say(task, "breaker", encode_report(BreakerReport(rows=1, cluster_id="modelled-kafka")))
                channel.on_connected(self.now_ms)

    async def stand_still(self, seconds: float) -> None:
        until_ms = self.now_ms + 1000 * seconds
        while self.now_ms < until_ms:
            for place in self.tasks_say():
                self.asked_ms.setdefault(place, self.now_ms)
            self.tasks_give_up()
            for host in self.hosts:
                if host.relay is not None and host.relay.due_ms(self.now_ms) <= self.now_ms:
                    self.waiting.append((host, host.relay.payload(self.now_ms)))
            self.now_ms += self.step_ms

    async def go_on(self) -> None:
        for host, payload in self.waiting:
            if payload:
                await self.take(host, payload)
        await self.tick(self.step_ms)


async def stall(bootstrap: str, tasks: int = 10_000, seconds: int = 5) -> dict[str, Any]:
    turns = Stall(bootstrap, tasks)
    # Until reports are as far apart as so many tasks are asked to leave.
    await turns.run(90)
    await turns.stand_still(seconds)
    turns.begin()
    frames, lines = len(turns.waiting), sum(payload.count(b"\n") + 1 for _, payload in turns.waiting)
    await turns.go_on()
    return {
        "tasks": tasks,
        "stalled_s": seconds,
        "gave_up": turns.gave_up,
        "frames": frames,
        "messages": lines,
        "until_all_is_handled": turns.ended(),
    }


async def measured(names: list[str], bootstrap: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "reconnect" in names:
        found["reconnect"] = await reconnect(bootstrap)
    if "mutes" in names:
        for partitions in (5_000, 10_000):
            found[f"{partitions} mutes"] = await mutes(bootstrap, partitions)
    if "view" in names:
        found["view"] = await view(bootstrap)
    if "stall" in names:
        found["stall"] = await stall(bootstrap)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cases = ["reconnect", "mutes", "view", "stall"]
    parser.add_argument("names", nargs="*", choices=[*cases, []])
    names = parser.parse_args().names or cases
    collect_garbage_seldom()
    with FakeCluster({"orders": 12}) as cluster:
        found = asyncio.run(measured(names, cluster.bootstrap_servers))
    for name, figures in found.items():
        print(name, json.dumps(figures), flush=True)
    kept = json.loads(FILE.read_text()) if FILE.exists() else {}
    FILE.write_text(json.dumps({**kept, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
