"""Two relays, their tasks and the coordinator in random orders: whatever comes when, each report is answered
once, and all tasks come to know the same."""

from __future__ import annotations

import json
from collections import deque
from random import Random
from typing import Any

import pytest

from kafka_sink.breaker.states import Target
from kafka_sink.coordinator.breaker.cluster_breakers import breaker_handler
from kafka_sink.coordinator.breaker.group import BreakerGroup
from kafka_sink.coordinator.breaker.messages import (
    KIND,
    BreakerReport,
    BreakerUpdate,
    MuteReport,
    OutcomeCounts,
    UnmuteReport,
    decode_update,
    encode_report,
)
from kafka_sink.coordinator.transport.group import Groups
from kafka_sink.coordinator.transport.handlers import Reply
from kafka_sink.coordinator.transport.peer_connection import encode_message
from kafka_sink.model import TopicPartition
from kafka_sink.options import parse

# Together they take about a second of processor time.
ORDERS, STEPS = 40, 150
BROKERS = (1, 2, 3)
PARTITIONS = tuple(TopicPartition("t", number) for number in range(3))
CLUSTERS = ("here", "there")
OPTIONS = parse({"kafka.bootstrap.servers": "h:1", "topic": "t", "mute.retry.interval": "1000"}).options


class Task:
    """What a task knows of the coordinator's mutes, and of which reports it awaits a reply."""

    def __init__(self, relay: Relay, number: int) -> None:
        self.relay, self.number = relay, number
        self.sent = 0
        self.awaited: set[int] = set()
        self.cluster: str | None = None
        self.is_apart = False
        self.muted: set[Target] | None = None
        self.leases: set[Target] = set()

    def say(self, **report: Any) -> None:
        self.sent += 1
        self.awaited.add(self.sent)
        self.cluster = report.get("cluster_id") or self.cluster
        body = encode_report(BreakerReport(**report))
        message = json.loads(json.dumps({"id": self.sent, "kind": KIND, "body": body}))
        if not self.relay.groups.on_task(self.number, message, self.relay.scene.now):
            self.is_apart = True
            self.relay.upward.append((self.number, message))
        self.relay.tell_tasks()

    def hear(self, message: dict[str, Any]) -> None:
        if "id" in message:
            self.awaited.remove(message["id"])
        body = message["body"]
        update = decode_update(body, 1_000) if body else BreakerUpdate()
        if update.whole:
            self.muted = set()
            self.leases.clear()
        if self.muted is None:
            assert not update.added
            assert not update.removed
            return
        self.muted |= update.added.keys()
        self.muted -= set(update.removed)
        self.leases -= {*update.added, *update.removed}
        self.leases |= update.leases.keys()


class Relay:
    """A relay with its connection: ``upward`` and ``downward`` are on their way."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        self.groups = Groups([BreakerGroup(scene.random.random)], scene.now)
        self.tasks: dict[int, Task] = {}
        self.count = 0
        # As it was reported to the coordinator.
        self.cluster: str | None = None
        self.numbers: dict[int | None, int] = {}
        self.upward: deque[tuple[int | None, dict[str, Any] | None]] = deque()
        self.downward: deque[tuple[int | None, dict[str, Any]]] = deque()

    def enter(self, **report: Any) -> None:
        self.count += 1
        task = self.tasks[self.count] = Task(self, self.count)
        task.say(**report)

    def leave(self, task: Task) -> None:
        del self.tasks[task.number]
        self.groups.on_task_left(task.number, self.scene.now)
        if task.is_apart:
            self.upward.append((task.number, None))
        self.tell_tasks()

    def tell_tasks(self) -> None:
        for number, line in self.groups.for_tasks():
            if number in self.tasks:
                self.tasks[number].hear(json.loads(line))

    def send(self) -> None:
        if self.groups.due_ms(self.scene.now) <= self.scene.now:
            for line in self.groups.messages(self.scene.now):
                message = json.loads(line)
                self.cluster = message["body"].get("cluster", self.cluster)
                self.upward.append((None, message))

    def receive(self) -> None:
        number, message = self.downward.popleft()
        if number is None:
            self.groups.on_coordinator(message, self.scene.now)
            self.tell_tasks()
        elif number in self.tasks:
            self.tasks[number].hear(message)


class Scene:
    """The coordinator and two relays."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.now = 10_000.0
        self.handler = breaker_handler(OPTIONS, lambda: None)
        self.peers: dict[int, tuple[Relay, int | None]] = {}
        self.count = 0
        self.relays = [Relay(self), Relay(self)]

    # -- the coordinator ----------------------------------------------------------------------------

    def serve(self, relay: Relay) -> None:
        """It takes the relay's next message."""
        task, message = relay.upward.popleft()
        if message is None:
            self.disconnect(relay, task)
            return
        if task not in relay.numbers:
            self.count += 1
            relay.numbers[task] = self.count
            self.peers[self.count] = relay, task
        self.send(self.handler.on_message(relay.numbers[task], message["id"], message["body"], self.now))

    def disconnect(self, relay: Relay, task: int | None) -> None:
        number = relay.numbers.pop(task, None)
        if number is not None:
            del self.peers[number]
            self.handler.on_disconnect(number, self.now)

    def send(self, messages: Any) -> None:
        for one in messages:
            if one.task in self.peers:
                relay, task = self.peers[one.task]
                head = {"kind": KIND, **({"id": one.request, "last": True} if isinstance(one, Reply) else {})}
                relay.downward.append((task, json.loads(b"".join(encode_message(head, one.body)))))

    def pass_time(self, ms: float) -> None:
        self.now += ms
        if self.handler.next_change_ms(self.now) <= 0:
            self.send(self.handler.on_time(self.now))

    # -- what may happen ----------------------------------------------------------------------------

    def report(self) -> dict[str, Any]:
        """What a task may say."""
        chance, choice = self.random.random, self.random.choice
        report: dict[str, Any] = {"rows": 1}
        if chance() < 0.3:
            report["responses"] = {choice(BROKERS): 5.0}
        if chance() < 0.2:
            report["muted"] = (MuteReport(choice(BROKERS), "silent", choice((0.0, 2_000.0))),)
        if chance() < 0.2:
            failed = choice((0, 4))
            report["outcomes"] = (OutcomeCounts(choice(PARTITIONS), 4 - failed, failed, bool(failed), "no"),)
        if chance() < 0.2:
            report["holds"] = tuple(self.random.sample(PARTITIONS, choice((0, 1, 2))))
        if chance() < 0.2:
            report["wants"] = tuple(self.random.sample(PARTITIONS, choice((0, 1, 2))))
        if chance() < 0.1:
            report["is_resting"] = True
        if chance() < 0.25:
            report["cluster_id"] = choice(CLUSTERS)
        return report

    def task_acts(self, relay: Relay) -> None:
        chance = self.random.random()
        if chance < 0.15 or not relay.tasks:
            relay.enter(**self.report())
            return
        task = self.random.choice(list(relay.tasks.values()))
        if chance < 0.3:
            relay.leave(task)
        elif chance < 0.6 and task.leases:
            target = task.leases.pop()
            if self.random.random() < 0.5:
                task.say(failed=((target, "late"),))
            else:
                task.say(unmuted=(UnmuteReport(target, "it responds"),))
        else:
            task.say(**self.report())

    def relay_dies(self, place: int) -> None:
        relay = self.relays[place]
        for task in list(relay.numbers):
            self.disconnect(relay, task)
        self.relays[place] = Relay(self)
        for _ in relay.tasks:
            self.relays[place].enter(**self.report())

    def step(self) -> None:
        place = self.random.randrange(2)
        relay, chance = self.relays[place], self.random.random()
        if chance < 0.35:
            self.task_acts(relay)
        elif chance < 0.5:
            relay.send()
        elif chance < 0.65 and relay.upward:
            self.serve(relay)
        elif chance < 0.8 and relay.downward:
            relay.receive()
        elif chance < 0.99:
            self.pass_time(self.random.choice((0.0, 1.0, 5.0, 60.0, 60.0, 500.0, 3_000.0)))
        else:
            self.relay_dies(place)

    def settle(self, rounds: int = 60, *, heals: bool = False) -> None:
        """All that is on its way arrives. Leases are used where all brokers respond again (``heals``)."""
        for _ in range(rounds):
            for relay in self.relays:
                for task in relay.tasks.values() if heals else ():
                    over = tuple(UnmuteReport(target, "it responds") for target in task.leases)
                    task.leases.clear()
                    task.say(rows=1, unmuted=over)
                relay.send()
                while relay.upward:
                    self.serve(relay)
                while relay.downward:
                    relay.receive()
            self.pass_time(100.0)

    def truth(self, cluster: str | None) -> set[Target]:
        """What a task is told that comes now."""
        (reply, *_) = self.handler.on_message(
            0, 1, encode_report(BreakerReport(cluster_id=cluster)), self.now
        )
        self.handler.on_disconnect(0, self.now)
        return set(decode_update(reply.body, 1_000).added)

    def check(self, seed: int) -> set[Target]:
        """All know the same. Returns what any of them has muted."""
        muted: set[Target] = set()
        for relay in self.relays:
            for task in relay.tasks.values():
                assert not task.awaited, f"a report without reply, order {seed}"
                assert task.muted is not None, f"a task that waits for ever, order {seed}"
                cluster = task.cluster if task.is_apart else relay.cluster
                if cluster is not None:
                    assert task.muted == self.truth(cluster), f"order {seed}"
                muted |= task.muted
        return muted


@pytest.mark.parametrize("first", range(0, ORDERS, 10))
def test_whatever_comes_when_all_tasks_come_to_know_the_same(first: int) -> None:
    for seed in range(first, first + 10):
        scene = Scene(seed)
        for _ in range(STEPS):
            scene.step()
        scene.settle()
        scene.check(seed)
        scene.settle(40, heals=True)
        assert not scene.check(seed).intersection(BROKERS), f"a lease that nobody has, order {seed}"
