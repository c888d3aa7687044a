"""The coordinator is killed at each message of a scripted run: that costs efficiency only. Exact times."""

from __future__ import annotations

from collections import defaultdict, deque

from kafka_sink.coordinator.schema import Message
from kafka_sink.errors import BrokerRefusedError
from kafka_sink.model import Target, TopicPartition
from tests.support.job_of_tasks import P0, P1, P2, Job

PARTITIONS = (P0, P1, P2)
REPLICAS = BrokerRefusedError("NOT_ENOUGH_REPLICAS", 19)
TASKS = 3
RESPONSE_MS = 20.0
# Broker 1 is frozen, then partition 1 fails; after that all is well. A task has rows for each partition.
FROZEN_MS, FAILS_MS, WELL_MS, END_MS = (500.0, 2_500.0), (3_000.0, 4_500.0), 4_500.0, 8_500.0
ROWS_MS = 100.0


class World(Job):
    """Brokers that respond, and tasks whose batches go out unless they are muted. A failed batch waits and
    goes out again. The coordinator is killed at a message, and another one takes its place, or none."""

    def __init__(self, killed_at: int, *, comes_back: bool) -> None:
        self.messages, self.killed_at, self.comes_back = 0, killed_at, comes_back
        super().__init__(TASKS)
        self.began = self.now
        self.back_ms = float("inf")
        # By task and broker: what has no response yet, with the time it was sent.
        self.out_there: dict[tuple[int, int], deque[tuple[float, TopicPartition]]] = defaultdict(deque)
        self.asked: dict[int, set[int]] = defaultdict(set)
        self.seen = [0] * TASKS
        self.probes_seen = [0] * TASKS
        self.written = [0] * TASKS
        self.sent_to_frozen = 0

    @property
    def at(self) -> float:
        return self.now - self.began

    def is_frozen(self, node: int) -> bool:
        return node == 1 and FROZEN_MS[0] <= self.at < FROZEN_MS[1]

    def say(self, number: int, message: Message) -> None:
        if self._passes():
            super().say(number, message)

    def tell(self, number: int, message: Message) -> None:
        if self._passes():
            super().tell(number, message)

    def _passes(self) -> bool:
        self.messages += 1
        if self.messages == self.killed_at:
            self.restart()
            self.back_ms = self.now + 300.0 if self.comes_back else float("inf")
        return bool(self.connected)

    def step(self) -> None:
        super().step()
        if self.now >= self.back_ms:
            self.back_ms = float("inf")
            for number in range(TASKS):
                self.connect(number)
        for task in self.tasks:
            self._send(task.number)
            self._respond(task.number)

    def _send(self, number: int) -> None:
        task = self.tasks[number]
        if self.at < WELL_MS + 1_000.0 and self.at % ROWS_MS == 0:
            task.waiting |= set(PARTITIONS)
        # If everything is muted, mutes are ignored.
        mutes = task.gate.avoided
        for partition in sorted(task.waiting):
            busy = any(one == partition for _, one in self.out_there[number, task.node(partition)])
            if partition not in mutes and not busy:
                task.waiting.discard(partition)
                task.send(partition)
        for at, partition in task.sent[self.seen[number] :]:
            self.out_there[number, task.node(partition)].append((at, partition))
            self.sent_to_frozen += self.is_frozen(task.node(partition))
        self.seen[number] = len(task.sent)
        for _, node in task.probed[self.probes_seen[number] :]:
            self.asked[number].add(node)
        self.probes_seen[number] = len(task.probed)

    def _respond(self, number: int) -> None:
        task = self.tasks[number]
        for node in [one for one in self.asked[number] if not self.is_frozen(one)]:
            self.asked[number].discard(node)
            task.gate.on_probe_done(node, None, self.now)
        for (owner, node), waiting in self.out_there.items():
            while owner == number and waiting and waiting[0][0] + RESPONSE_MS <= self.now:
                if self.is_frozen(node):
                    break
                _, partition = waiting.popleft()
                fails = partition == P1 and FAILS_MS[0] <= self.at < FAILS_MS[1]
                task.answer(partition, REPLICAS if fails else None)
                self.written[number] += not fails
                if fails:
                    task.waiting.add(partition)

    def finish(self) -> list[set[Target]]:
        """What tasks mute while the broker is frozen, and that all is written in the end."""
        self.run(FROZEN_MS[1] - 100.0 - self.at)
        frozen = self.mutes()
        self.run(END_MS - self.at)
        assert self.mutes() == [set()] * TASKS
        assert all(not task.waiting for task in self.tasks)
        assert not any(self.out_there.values())
        assert min(self.written) > 90
        return frozen


def test_the_scripted_run_with_a_coordinator() -> None:
    world = World(0, comes_back=False)
    world.run(FAILS_MS[1] - 100.0)
    assert set(world.service.mutes) == {P1}
    assert world.finish() == [{P1}] * TASKS
    assert 30 < world.messages < 200
    assert world.sent_to_frozen < 4 * TASKS


def test_losing_it_at_any_message_costs_only_efficiency() -> None:
    """No task fails, waits for ever, or goes on sending to a broker that it knows to be frozen."""
    whole = World(0, comes_back=False)
    whole.finish()
    for killed_at in range(1, whole.messages + 1):
        world = World(killed_at, comes_back=killed_at % 2 == 0)
        assert world.finish() == [{1}] * TASKS, f"killed at message {killed_at}"
        assert world.sent_to_frozen < 8 * TASKS
