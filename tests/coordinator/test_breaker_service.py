"""The coordinator's mutes for all tasks, its questions and its probes: at exact times, without sockets."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random
from typing import TypeVar

import pytest

from kafka_sink.coordinator.breaker_messages import (
    MAX_MUTES,
    MAX_TARGETS,
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
from kafka_sink.coordinator.schema import MAX_MESSAGE_BYTES, MemoryBudget, Message, decode, deliver, encode
from kafka_sink.errors import ProtocolError
from kafka_sink.model import Target, TopicPartition
from tests.support.fake_outbox import FakeOutbox
from tests.support.footprint import traced
from tests.support.job_of_tasks import P0, P1, named, service

INTERVAL = 2_000.0
SICK = 7
OWN = {"class": "a.users.Class"}
_Kind = TypeVar("_Kind", bound=Message)


def muted(targets: Iterable[Target], reason: str = "no", silence_ms: float = 0.0) -> MuteChanges:
    return MuteChanges(tuple(OwnMute(one, reason, silence_ms) for one in targets))


def unmuted(*targets: Target) -> MuteChanges:
    return MuteChanges(unmuted=targets)


def failed(*targets: Target) -> MuteChanges:
    return MuteChanges(failed=targets)


def parts(targets: Sequence[TopicPartition], size: int = MAX_TARGETS) -> Iterator[Sequence[TopicPartition]]:
    """As many as a message takes."""
    for start in range(0, len(targets), size):
        yield targets[start : start + size]


def outcomes(
    *counts: tuple[TopicPartition, int, int], answered: bool = True, error: str = "NO", rows: int = 1_000
) -> Outcomes:
    """Partition, written, failed."""
    return Outcomes(rows, tuple(PartitionOutcome(*one, answered, error if one[2] else "") for one in counts))


SILENT = muted([SICK], silence_ms=1_000.0)


class Bench:
    """A service with so many tasks. Time passes in ``run``, in steps of 10 ms."""

    def __init__(self, tasks: int, budget: MemoryBudget | None = None, /, **breaker: str) -> None:
        self.out = FakeOutbox()
        self.now = 100_000.0
        self.service = service(self.out, budget, **breaker)
        # How tasks answer.
        self.answer: Callable[[int, Message], Iterable[Message]] = lambda peer, message: ()
        self.pushed: list[tuple[float, int, Message]] = []
        for peer in range(tasks):
            self.service.on_joined(peer, self.now)
        self.service.on_time(self.now)
        self.take()

    def say(self, peer: int, message: Message) -> None:
        deliver(self.service, peer, decode(encode(message)), self.now)

    def fails(self, peer: int, *partitions: TopicPartition) -> None:
        """Nothing that this task has written there was taken."""
        for some in parts(partitions):
            self.say(peer, outcomes(*((one, 0, 5) for one in some)))

    def mutes(self, peer: int, targets: Iterable[Target], reason: str = "no") -> None:
        self.say(peer, muted(targets, reason))

    def take(self) -> list[tuple[int, Message]]:
        found = self.out.taken()
        self.pushed += [(self.now, peer, message) for peer, message in found]
        return found

    def run(self, ms: float) -> None:
        until = self.now + ms
        while self.now < until:
            self.now += 10.0
            for _ in range(100):
                if self.service.next_change_ms(self.now) > 0:
                    break
                self.service.on_time(self.now)
            for peer, message in self.take():
                for said in self.answer(peer, message):
                    self.say(peer, said)

    def muted(self) -> set[Target]:
        return set(self.service.mutes)

    def of(self, kind: type[Message]) -> list[tuple[float, int]]:
        """When who was told so."""
        return [(at, peer) for at, peer, message in self.pushed if isinstance(message, kind)]

    def sent(self, kind: type[_Kind]) -> list[_Kind]:
        return [message for _, _, message in self.pushed if isinstance(message, kind)]

    def writes(self, failing: Sequence[int], *, written: int = 5) -> None:
        """Tasks answer what they watch: it fails for these."""

        def answer(peer: int, message: Message) -> Iterable[Message]:
            if isinstance(message, Watch):
                counts = (0, 5) if peer in failing else (written, 0)
                for some in parts(message.partitions):
                    yield outcomes(*((one, *counts) for one in some))

        self.answer = answer


# -- messages -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        outcomes(*((one, 1, 1) for one in named(401))),
        muted(range(401)),
        muted([-1]),
        unmuted(*named(401)),
        failed(*named(401)),
        Waiting(tuple(range(101)), ()),
    ],
)
def test_a_message_about_too_much_changes_nothing(message: Message) -> None:
    bench = Bench(2, **OWN)
    with pytest.raises(ProtocolError):
        bench.say(0, message)
    bench.run(1_000)
    assert not bench.muted()
    assert not bench.pushed[2:]


# -- partitions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("failing", "muted"), [(1_000, True), (800, True), (200, False), (10, False)])
def test_a_sample_decides_for_all_tasks(failing: int, muted: bool) -> None:
    """Catches: a thousand tasks that are asked about 300 partitions each, which took ten seconds to count;
    and the few that report by themselves counted as if they were a tenth of all."""
    bench = Bench(1_000)
    bench.writes(range(failing))
    for peer in range(min(failing, 30)):
        bench.fails(peer, P0)
    bench.run(600)
    assert (len(bench.of(Watch)), bench.muted() == {P0}) == (100, muted)


def test_a_host_with_a_bad_network_mutes_none_of_thousands_of_partitions() -> None:
    """Of so many, ten tasks are asked about each. Beside them, few that report by themselves count."""
    bench = Bench(1_000)
    host = range(10)
    bench.writes(host)
    for peer in host:
        bench.fails(peer, *named(2_000))
    bench.run(1_000)
    assert len(bench.of(Watch)) >= 10
    assert not bench.muted()


def test_each_task_counts_once_and_three_failures_are_needed() -> None:
    """Sums of batches would let one busy task decide, and failures that are capped would never be half of
    them."""
    bench = Bench(4)
    bench.writes([0, 1], written=1_000)
    bench.fails(0, P0)
    bench.run(200)
    assert bench.muted() == {P0}, "half of the tasks"
    assert (
        bench.sent(Mutes)[-1]
        .added[0]
        .reason.endswith("2 of 4 tasks that write to it and were asked; last error: NO")
    )
    for lost in (3, 2):
        # One lost connection of a task says nothing, an error of a broker does.
        one = {peer: outcomes((P0, 0, 1), answered=peer != lost) for peer in range(3)}
        bench = Bench(3)
        bench.answer = lambda peer, message, one=one: [one[peer]] * isinstance(message, Watch)
        bench.say(0, one[0])
        bench.run(1_000)
        assert bench.muted() == ({P0} if lost == 3 else set())


def test_the_decision_comes_with_the_last_answer_or_after_400_ms() -> None:
    bench = Bench(3)
    bench.writes([0, 1, 2])
    bench.fails(0, P0)
    bench.run(70)
    assert bench.muted() == {P0}
    bench = Bench(3)
    bench.fails(0, P0)
    bench.run(400)
    assert not bench.muted()
    bench.run(60)
    assert bench.muted() == {P0}, "nobody else writes there"


def test_rows_of_all_tasks_count_and_go_on_counting() -> None:
    """trigger.message.count: of 1,000, with 400 of each task since its producer began."""
    bench = Bench(3, trigger_message_count="1000")
    few = 400
    bench.answer = lambda peer, message: (
        [outcomes((P0, 0, 5), rows=few)] * (isinstance(message, Watch) and peer < 2)
    )
    bench.say(0, outcomes((P0, 0, 5), rows=few))
    bench.run(1_000)
    assert not bench.muted(), "800 are known"
    bench.service.on_gone(1, bench.now)
    bench.say(2, outcomes((P1, 0, 5), rows=few))
    bench.run(3_000)
    assert P1 in bench.muted(), "the rows of a task that has ended count"


def test_a_partition_that_does_not_fail_rests_for_a_second_and_reports_meanwhile_are_not_lost() -> None:
    """Catches: after the first failure of many all was found well, and when the others failed in the same
    second, nobody looked before the next request timed out."""
    bench = Bench(10)
    bench.writes([0])
    for _ in range(40):
        bench.fails(0, P0)
        bench.run(100)
    assert len({at for at, _ in bench.of(Watch)}) == 4
    assert not bench.muted()
    bench = Bench(10)
    bench.writes([0])
    bench.fails(0, P0)
    bench.run(100)
    bench.writes(range(10))
    for peer in range(1, 10):
        bench.fails(peer, P0)
    bench.run(1_200)
    assert bench.muted() == {P0}


# -- brokers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("age_ms", "muted"), [(350.0, False), (550.0, True)])
def test_a_response_in_the_second_half_of_a_silence_rejects_it(age_ms: float, muted: bool) -> None:
    bench = Bench(30)
    bench.answer = lambda peer, message: [Answer(SICK, age_ms)] * isinstance(message, Question)
    bench.say(3, SILENT)
    bench.run(240)
    assert not bench.muted()
    bench.run(20)
    assert (bench.muted() == {SICK}) is muted
    asked = [peer for _, peer in bench.of(Question)]
    assert len(asked) == len(set(asked)) == 20
    assert 3 not in asked


@pytest.mark.parametrize("withdrawn", [False, True])
def test_only_who_wanted_a_mute_or_was_asked_prevents_it(withdrawn: bool) -> None:
    bench = Bench(30)
    bench.say(3, SILENT)
    bench.take()
    for peer in set(range(30)) - {peer for _, peer in bench.of(Question)} - {3}:
        bench.say(peer, Answer(SICK, 0.0))
        bench.say(peer, unmuted(SICK))
    bench.run(100)
    if withdrawn:
        bench.say(3, unmuted(SICK))
    bench.run(500)
    assert bench.muted() == (set() if withdrawn else {SICK})


def test_thousands_that_mute_a_frozen_broker_cost_one_question() -> None:
    """Catches: each such report looked at all tasks: ten thousand within two seconds kept the coordinator
    busy for 14 s."""
    bench = Bench(4_000)
    for peer in range(4_000):
        bench.say(peer, SILENT)
        if peer % 20 == 0:
            bench.run(10)
    assert bench.muted() == {SICK}
    assert len(bench.of(Question)) == 20
    assert len(bench.of(Mutes)) == 2 * 4_000, "once on coming, and once about the broker"


# -- probes ---------------------------------------------------------------------------------------------


def muted_broker(bench: Bench) -> None:
    bench.say(0, SILENT)
    bench.run(260)
    assert bench.muted() == {SICK}


def test_any_task_probes_a_broker_one_at_a_time_and_in_turns() -> None:
    bench = Bench(60)
    muted_broker(bench)
    bench.run(10 * INTERVAL)
    probes = bench.of(Probe)
    assert len(probes) in (9, 10)
    assert len({peer for _, peer in probes}) == len(probes)
    gaps = [later - earlier for (earlier, _), (later, _) in itertools.pairwise(probes)]
    assert all(INTERVAL <= gap <= INTERVAL + 100 for gap in gaps)
    asked = {peer for _, peer in bench.of(Question)}
    assert not asked.intersection(peer for _, peer in probes), "these have a request with the broker"


def test_the_next_probe_waits_after_a_failure_and_after_its_task_is_gone() -> None:
    bench = Bench(3)
    muted_broker(bench)
    bench.run(INTERVAL + 100)
    ((_, first),) = bench.of(Probe)
    bench.say((first + 1) % 3, failed(SICK))
    assert bench.service.mutes[SICK].prober is not None, "another task's ends no probe"
    bench.say(first, failed(SICK))
    failed_ms = bench.now
    bench.run(INTERVAL + 100)
    at, second = bench.of(Probe)[-1]
    assert at - failed_ms >= INTERVAL
    assert second != first
    bench.service.on_gone(second, bench.now)
    probed_ms = at
    bench.run(INTERVAL + 200)
    at, third = bench.of(Probe)[-1]
    assert at - probed_ms >= INTERVAL
    assert third != second


def test_a_partitions_first_probe_is_made_after_the_interval_by_a_task_with_a_batch_or_else_with_rows() -> (
    None
):
    """Catches: the first permit went to a task with rows, and the one with batches came an interval later."""
    bench = Bench(4, **OWN)
    bench.mutes(0, [P0])
    bench.run(100)
    bench.say(1, Waiting((), (P0,)))
    bench.say(0, Waiting((P0,), ()))
    bench.run(INTERVAL)
    bench.say(0, failed(P0))
    bench.run(INTERVAL + 100)
    bench.say(1, failed(P0))
    bench.say(2, Waiting((P0,), ()))
    bench.run(INTERVAL + 100)
    assert [peer for _, peer in bench.of(Probe)] == [0, 1, 2]
    assert [probe.new_rows for probe in bench.sent(Probe)] == [False, True, False]


def test_a_probe_that_a_task_has_no_rows_for_goes_to_another_at_once() -> None:
    """Catches: with a task that had no rows any longer, the first probe came after two intervals."""
    bench = Bench(4, **OWN)
    bench.mutes(0, [P0])
    bench.run(100)
    bench.say(1, Waiting((P0,), ()))
    bench.say(2, Waiting((), (P0,)))
    bench.answer = lambda peer, message: (
        [MuteChanges(unused=(P0,))] if isinstance(message, Probe) and peer == 1 else ()
    )
    bench.run(INTERVAL + 100)
    assert [peer for _, peer in bench.of(Probe)] == [1, 2]
    bench.say(1, MuteChanges(unused=(P0,)))
    assert bench.service.mutes[P0].prober == 2, "it returns its own permit only"


def test_no_probe_goes_out_before_the_mute_that_it_is_for() -> None:
    bench = Bench(3, **OWN, **{"mute.retry.interval": "100"})
    bench.mutes(0, [P0])
    bench.run(20)
    # Tasks are told so soon again only after a pause.
    bench.mutes(0, [P1])
    bench.say(1, Waiting((P1,), ()))
    bench.say(2, unmuted(P1))
    bench.run(300)
    found = [
        one
        for _, _, one in bench.pushed
        if P1 in (*getattr(one, "targets", ()), *dict(getattr(one, "added", ())))
    ]
    assert [type(one) for one in found[:4]] == [Mutes, Mutes, Mutes, Probe]


def test_only_those_that_know_at_first_hand_end_a_mute() -> None:
    bench = Bench(60)
    muted_broker(bench)
    bench.run(200)
    bench.say(5, unmuted(SICK))
    assert bench.muted() == {SICK}
    bench.run(100)
    ((_, prober),) = bench.of(Probe)
    assert prober != 5, "another task finds out"
    bench.say(prober, unmuted(SICK))
    assert not bench.muted()
    bench = Bench(60)
    muted_broker(bench)
    bench.run(20)
    bench.say(5, Answer(SICK, 0.0))
    bench.run(50)
    assert bench.of(Probe), "as after a late response"
    bench.say(0, unmuted(SICK))
    assert not bench.muted(), "it was the one that wanted it"
    bench.run(400)
    assert bench.pushed[-1][2] == Mutes(False, (), (SICK,), 60), "of so many one after the other sends to it"


def test_mutes_of_brokers_and_unused_partitions_end_after_ten_minutes() -> None:
    """Catches: a liar's thousand mutes of brokers that do not exist stayed for ever."""
    bench = Bench(2, **OWN)
    bench.mutes(0, [P0, SICK])
    bench.run(INTERVAL + 300)
    bench.say(1, failed(SICK))
    bench.now += 590_000.0
    bench.run(600)
    assert bench.muted() == {P0, SICK}
    bench.now += 11_000.0
    bench.run(600)
    assert bench.muted() == set()


# -- a task that comes ------------------------------------------------------------------------------------


def test_a_task_that_comes_is_told_everything_by_one_message_for_all() -> None:
    """Catches: encoding 9,000 reasons took 55 ms for each task that came."""
    bench = Bench(3, **OWN)
    bench.mutes(0, named(300))
    bench.run(100)
    encoded = bench.out.encoded
    for peer in (7, 8, 9):
        bench.service.on_joined(peer, bench.now)
    bench.service.on_gone(9, bench.now)
    bench.service.on_time(bench.now)
    (_, first), (_, second) = bench.take()
    assert bench.out.encoded == encoded + 1
    bench.service.on_joined(10, bench.now)
    bench.service.on_time(bench.now)
    assert bench.take() == [], "others may come soon"
    assert isinstance(first, Mutes)
    assert (len(first.added), first.whole, first == second) == (300, True, True)


@pytest.mark.parametrize(
    ("topic", "reason"),
    [("x", "\U0001d11e" * 250), ("{number:05}" + "x" * 240, "no")],
    ids=["long reasons", "long names"],
)
def test_mutes_take_no_more_bytes_than_a_message_has(topic: str, reason: str) -> None:
    """Catches: ten thousand mutes with long reasons ended the connection of every task that came, and with
    long names of topics no task was told any more."""
    bench = Bench(30, **OWN)
    names = [TopicPartition(topic.format(number=number), number) for number in range(10_000)]
    for turn, some in enumerate(parts(names, 200)):
        bench.mutes(turn // 2, some, reason)
    bench.run(100)
    assert 200 < len(bench.muted()) < 8_000
    bench.service.on_joined(99, bench.now)
    bench.run(100)
    messages = [message for _, peer, message in bench.pushed if peer == 99]
    assert [len(encode(one)) < MAX_MESSAGE_BYTES for one in messages] == [True]


def test_ended_and_new_mutes_fit_into_one_message() -> None:
    """Catches: thousands of mutes with long names that one task replaced by others within a second made a
    message that was larger than 2 MiB."""
    bench = Bench(3_000, **OWN)
    for turn in range(2):
        names = [TopicPartition(f"{turn}{number:06}".ljust(249, "x"), 0) for number in range(6_800)]
        for some in parts(names):
            bench.mutes(0, some)
        if not turn:
            bench.run(1_000)
            assert len(bench.muted()) > 6_000
            for some in parts(names):
                bench.say(0, unmuted(*some))
    # Each message is encoded.
    bench.run(2_500)


def test_ended_mutes_fit_into_one_message() -> None:
    """Catches: a task of a user's class that mutes and unmutes ever others within a second; all tasks refused
    the message about it and lost their connections."""
    bench = Bench(3_500, **OWN)
    for turn in range(30):
        bench.mutes(0, named(MAX_TARGETS, f"{turn}"))
        bench.say(0, unmuted(*named(MAX_TARGETS, f"{turn}")))
    # Each message is encoded and decoded.
    bench.run(2_500)
    assert max(len(message.removed) for message in bench.sent(Mutes)) == MAX_MUTES


# -- a connection that lies -----------------------------------------------------------------------------


@pytest.mark.parametrize("own_class", [False, True])
def test_a_liar_mutes_nothing_for_most_of_the_time(own_class: bool) -> None:
    """Catches: one connection kept all partitions muted for 99 % of the time."""
    bench = Bench(10, **(OWN if own_class else {}))
    liar = 9

    def answer(peer: int, message: Message) -> Iterable[Message]:
        """Honest tasks' probes get through. They have batches for what is muted, or rows."""
        if isinstance(message, Probe):
            yield failed(*message.targets) if peer == liar else unmuted(*message.targets)
        elif peer != liar and isinstance(message, Mutes):
            added = tuple(one.target for one in message.added[:100])
            yield Waiting((), added) if own_class else Waiting(added, ())

    bench.answer = answer
    muted_times = 0
    for _ in range(600):
        bench.fails(liar, *named(20))
        bench.mutes(liar, named(20), "a lie")
        bench.say(liar, Waiting(tuple(named(20)), ()))
        bench.run(100.0)
        muted_times += bool(bench.muted())
    assert 0 < muted_times < 0.3 * 600


def test_a_liar_mutes_nothing_that_others_write_to_or_get_responses_of() -> None:
    bench = Bench(10)
    liar = 9

    def answer(peer: int, message: Message) -> Iterable[Message]:
        if peer != liar and isinstance(message, Watch):
            yield outcomes((P0, 5, 0))
        if peer != liar and isinstance(message, Question):
            yield Answer(message.broker, 5.0)

    bench.answer = answer
    for _ in range(300):
        bench.say(liar, outcomes((P0, 0, 1_000), rows=10**9))
        bench.say(liar, muted([SICK], silence_ms=1e9))
        bench.mutes(liar, [3])
        bench.run(100.0)
        assert not bench.muted()


def test_a_liar_causes_few_probes_and_ends_no_mute() -> None:
    bench = Bench(40)
    muted_broker(bench)
    began = bench.now
    for _ in range(400):
        bench.say(9, unmuted(SICK))
        bench.say(9, Answer(SICK, 0.0))
        bench.run(50)
        for _, prober in bench.of(Probe)[-1:]:
            bench.say(prober, failed(SICK))
    assert bench.muted() == {SICK}
    assert len(bench.of(Probe)) <= 2 * (bench.now - began) / INTERVAL + 1


# -- thousands at once ----------------------------------------------------------------------------------


def test_thousands_of_partitions_that_fail_for_a_thousand_hosts_are_muted_in_about_a_second() -> None:
    """Catches: hundreds of tasks asked about each of 5,000 partitions, and iterations of more than a second.

    Tasks report at random times within half a second. An iteration is a message or a call of on_time.
    """
    random, partitions = Random(2), 10_000
    names = sorted(
        TopicPartition(f"orders-of-{number % 100:03}", number // 100) for number in range(partitions)
    )
    bench = Bench(1_000)
    longest = spent = 0.0

    def timed(work: Callable[[], object]) -> None:
        nonlocal longest, spent
        started = time.thread_time()
        work()
        took = time.thread_time() - started
        longest, spent = max(longest, took), spent + took

    def say(peer: int, part: Sequence[TopicPartition]) -> None:
        said = encode(outcomes(*((one, 0, 5) for one in part), error="NOT_ENOUGH_REPLICAS"))
        timed(lambda: deliver(bench.service, peer, decode(said), bench.now))

    due = sorted((bench.now + random.random() * 500.0, peer) for peer in range(1_000))
    began, watched, muted = bench.now, 0, set[Target]()
    gc.disable()
    try:
        while len(muted) < partitions:
            bench.now += 10.0
            assert bench.now - began < 1_100.0
            while due and due[0][0] <= bench.now:
                _, peer = due.pop(0)
                start = random.randrange(partitions)
                rest = [one for one in (*names[start:], *names[:start])[:MAX_TARGETS] if one not in muted]
                say(peer, rest)
            while bench.service.next_change_ms(bench.now) <= 0:
                timed(lambda: bench.service.on_time(bench.now))
            for peer, message in bench.take():
                if isinstance(message, Watch):
                    watched += len(message.partitions)
                    for some in parts(message.partitions):
                        say(peer, some)
                elif isinstance(message, Mutes) and peer == 0:
                    muted |= {one.target for one in message.added}
    finally:
        gc.enable()
    assert watched <= 20 * partitions
    # 9 ms and 0.8 to 1.4 s where nothing else runs.
    assert longest < 0.1
    assert spent < 10.0
    assert sum(len(encode(one)) for one in {id(one): one for one in bench.sent(Mutes)}.values()) < 200 * 1024


def test_probes_of_thousands_of_mutes_take_bounded_parts_of_the_time() -> None:
    """Catches: each message about rows walked over all mutes, and without any task all were walked over for
    as long as the service was kept."""
    bench = Bench(12, **OWN)
    targets = [one for peer in range(5) for one in named(800, f"t{peer}")]
    for turn, some in enumerate(parts(targets)):
        bench.mutes(turn // 2, some)
    bench.run(3_000)
    assert len(bench.muted()) == 4_000
    for some in parts(targets, 100):
        bench.say(11, Waiting(tuple(some), ()))
    assert not bench.of(Probe)
    bench.now += 20.0
    bench.service.on_time(bench.now)
    ((peer, probe),) = bench.take()
    assert isinstance(probe, Probe)
    assert (peer, len(probe.targets)) == (11, 250)
    assert bench.service.next_change_ms(bench.now) == 20.0
    bench.run(400)
    assert sum(len(one.targets) for one in bench.sent(Probe)) == 4_000
    for peer in range(12):
        bench.service.on_gone(peer, bench.now)
    bench.now += 10_000
    assert bench.service.next_change_ms(bench.now) == float("inf")


def test_services_of_all_clusters_take_bounded_memory() -> None:
    """Catches: a connection that named another cluster with each Hello took 220 MiB within 12 s; questions
    about brokers that do not exist, without end."""
    budget = MemoryBudget(2 * 2**20)
    with traced() as memory:
        benches = [Bench(2, budget, **breaker) for breaker in (OWN, {}, OWN, {})]
        for turn, bench in itertools.product(range(13), benches):
            bench.fails(1, *(TopicPartition(f"{turn}-{one}".ljust(249, "x"), one) for one in range(400)))
            bench.mutes(1, range(400 * turn, 400 * turn + 400), "a lie")
            bench.mutes(1, named(400, f"{turn}"), "a lie")
            bench.run(10)
    assert memory.peak < 7 * 2**20
    assert budget.used < 4 * 2**20
    for bench in benches:
        assert len(bench.of(Question)) <= 200, "each asks the only other task"
        bench.service.close()
    assert budget.used == 0
    honest = Bench(2, budget)
    honest.fails(0, P0)
    honest.run(500)
    assert honest.muted() == {P0}
