"""Exactly once, over random and over all orders of events of a small model."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from kafka_sink.transactions import batch as batches
from kafka_sink.transactions import decision as decisions
from kafka_sink.transactions import driver, proof, task_attempt
from kafka_sink.transactions.batch import TaskHandover
from kafka_sink.transactions.operations import (
    OPEN,
    EndTransaction,
    FetchOffsets,
    FetchStableOffsets,
    ListOpen,
    Operation,
    Scope,
    TransactionSteps,
    describe,
    fetch_offsets,
)
from kafka_sink.transactions.proof import Clock
from tests.support.effort import EFFORT, tries
from tests.support.transaction_steps import through
from tests.support.transactions_of_spark import Faults, Settings, World

# Each wrong protocol below is found within 60.
WALKS = tries(60)
_UNTIL_FOUND = 10 * max(60, WALKS)
_LONGEST = 400
LAYOUTS = (((0, 1), (2,)), ((0,), (1, 2)), ((0, 1, 2),))


def walk(settings: Settings, seed: int) -> World:
    """One random order of events, which prefers what goes on to faults."""
    chance = random.Random(seed)
    faults = replace(settings.faults)
    world = World(
        replace(settings, faults=faults, patience=1 + seed % 12), lambda count: chance.randrange(count)
    )
    for _ in range(_LONGEST):
        if not world.step():
            break
    world.quiet_end()
    return world


def problems(settings: Settings, walks: int, *, stop: bool = False) -> list[str]:
    """The faults, and the walks in which they occurred."""
    found = []
    for seed in range(walks):
        world = walk(settings, seed)
        wrong = {
            "doubled": world.doubled(),
            "lost": world.lost(),
            "aborted though decided": world.aborted_decided,
            "tasks may still write under": world.escaped,
        }
        found += [f"seed {seed}: {what} {which}" for what, which in wrong.items() if which]
        # A batch may stay incomplete only where its tasks have changed, or brokers have forgotten.
        may_be_stuck = len(settings.layouts) > 1 or settings.faults.expires_ids
        # With protocol 1 ids tell nothing of transactions that were aborted.
        may_be_stuck |= settings.protocol == 1 and settings.faults.weeks > 0
        if world.undone() and not (world.is_stuck() and may_be_stuck):
            found.append(f"seed {seed}: never done")
        if found and stop:
            return found
    return found


CRASHES = Faults(crashes=2, drivers=1, late_copies=1, late_attempts=1)
SETTINGS = {
    "crashes, zombies and speculation": Settings(faults=CRASHES),
    "two drivers": Settings(faults=Faults(crashes=0, drivers=2, late_copies=2, late_attempts=2)),
    "timeouts": Settings(faults=replace(CRASHES, timeouts=2)),
    "other tasks after a restart": Settings(
        layouts=LAYOUTS, faults=replace(CRASHES, late_copies=0, layout_changes=2)
    ),
    "former coordinators": Settings(faults=replace(CRASHES, former_coordinators=3)),
    "former coordinators of ids": Settings(faults=replace(CRASHES, former_coordinators_of_ids=3)),
    "weeks": Settings(count=3, faults=Faults(crashes=0, drivers=0, late_copies=0, late_attempts=0, weeks=3)),
    # Attempts that thaw after weeks take ids over, and nobody can know any more.
    "weeks and zombies": Settings(count=3, faults=replace(CRASHES, weeks=2, expires_ids=True)),
    "epochs run out": Settings(count=3, faults=replace(CRASHES, timeouts=2), last_epoch=2),
    "timeouts and other tasks": Settings(
        layouts=LAYOUTS, faults=replace(CRASHES, timeouts=2, layout_changes=1)
    ),
}


# All transactions of a version can be lost behind its decision, and other versions follow.
PEOPLE = Faults(crashes=2, drivers=1, late_copies=0, late_attempts=0, timeouts=2, reruns=1)
SETTINGS |= {
    "versions of applications": Settings(layouts=(((0, 1),),), writers=2, faults=PEOPLE),
    "versions and the command": Settings(writers=1, count=3, faults=replace(PEOPLE, operators=2)),
    "the command and a query": Settings(faults=replace(CRASHES, timeouts=1, operators=1)),
}
SETTINGS |= {
    f"{name}, from protocol 1 to 2": replace(
        SETTINGS[name], protocol=1, faults=replace(SETTINGS[name].faults, upgrades=1)
    )
    for name in ("crashes, zombies and speculation", "timeouts", "versions of applications")
}
SETTINGS |= {
    f"{name}, offsets reported late": replace(SETTINGS[name], protocol=1, delays_offsets=True)
    for name in ("crashes, zombies and speculation", "timeouts", "versions of applications", "weeks")
}
SETTINGS |= {
    f"{name}, with protocol 1": replace(SETTINGS[name], protocol=1)
    for name in ("crashes, zombies and speculation", "two drivers", "timeouts", "weeks", "epochs run out")
}
# The progress topic gets partitions between a decision, its repair and the runs after it. The markers of
# these two tasks are in other groups then.
SETTINGS |= {
    "partitions are added": Settings(
        layouts=(((), (), (0,), (1,)),),
        writers=1,
        partitions=1,
        faults=replace(PEOPLE, drivers=2, growths=1),
    ),
    "two drivers, from protocol 1 to 2": Settings(
        layouts=(((0,),),),
        writers=1,
        protocol=1,
        faults=Faults(crashes=1, drivers=3, late_copies=0, late_attempts=0, reruns=1, upgrades=1),
    ),
}
# All faults at once: each driver may be another's predecessor or successor, by either protocol.
ALL = Faults(
    crashes=2,
    drivers=2,
    late_copies=2,
    late_attempts=2,
    timeouts=1,
    former_coordinators=2,
    former_coordinators_of_ids=2,
    growths=1,
)
SETTINGS |= {
    "all faults": Settings(partitions=1, faults=ALL),
    "all faults, from protocol 1 to 2": Settings(partitions=1, protocol=1, faults=replace(ALL, upgrades=1)),
    "all faults, versions and the command": Settings(
        writers=1, count=3, partitions=1, faults=replace(ALL, reruns=2, operators=1)
    ),
    "all faults, versions and the command, from protocol 1 to 2": Settings(
        writers=1, count=3, partitions=1, protocol=1, faults=replace(ALL, reruns=2, operators=1, upgrades=1)
    ),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_no_order_of_events_loses_or_doubles_a_row(name: str) -> None:
    assert problems(SETTINGS[name], WALKS) == []


def test_the_model_reaches_what_it_is_for() -> None:
    """Decisions that another run completes, batches written before, repairs, loud errors."""
    seen: set[str] = set()

    def commit(*args: Any, **named: Any) -> TransactionSteps[Any]:
        outcome = yield from batches.commit(*args, **named)
        seen.update(name for name in ("repaired", "aborted") if getattr(outcome, name))
        seen.update(["skipped"] if outcome.skipped is not None else [])
        return outcome

    def take_over(scope: Any, clock_ms: Clock) -> TransactionSteps[Any]:
        ownership = yield from driver.take_over(scope, clock_ms)
        seen.update(name for name in ("completed", "aborted", "missing") if getattr(ownership, name))
        return ownership

    faults = replace(CRASHES, crashes=4, late_copies=0, late_attempts=0, timeouts=2, layout_changes=2)
    hard = Settings(layouts=LAYOUTS, faults=faults)
    wanted = {"skipped", "repaired", "aborted", "completed", "missing", "loud"}
    for seed in range(1000):
        if walk(replace(hard, commit=commit, take_over=take_over), seed).loud:
            seen.add("loud")
        if seen == wanted:
            return
    assert seen == wanted


# -- wrong protocols, which the model must tell from the right one ---------------------------------


def with_outcomes(
    decision: decisions.Decision, outcome: decisions.Outcome, parts: Iterable[Any]
) -> decisions.Decision:
    """As if this had become of these parts, without a record of it."""
    outcomes = {part.task: outcome for part in parts}
    return replace(decisions.recorded(decision, outcomes), number=decision.number)


def without_taking_over(scope: Any, clock_ms: Clock) -> TransactionSteps[Any]:
    """Planning reads without fencing, so it shares the driver's epoch with an older driver."""
    known = yield from describe(scope.driver_id)
    if scope.driver_id not in known:
        return (yield from driver.take_over(scope, clock_ms))
    decision = yield from driver.read_decision(scope)
    if decision is not None:
        yield proof.ends_of(scope, decision.parts)
    (names,) = yield (ListOpen(scope.prefix),)
    found = yield from describe(*names)
    yield from proof.abort_others(found, scope, ())
    return driver.Ownership(known[scope.driver_id].producer, decision)


def seen(scope: Any) -> TransactionSteps[Any]:
    return (yield from fetch_offsets(scope.marker_key(0).group))


def commits_without_deciding(reports: Any, **_: Any) -> TransactionSteps[Any]:
    """As most sinks do: the driver commits one transaction after the other."""
    for report in reports:
        if report.part is not None:
            name = report.run.scope.task_id(report.task, report.part.slot)
            yield (EndTransaction(name, report.part.producer, commit=True),)


def forgets_what_is_missing(scope: Scope, ownership: Any, now_ms: float) -> TaskHandover:
    """Tasks believe that what was decided is written."""
    decision = ownership.decision
    if decision is not None:
        decision = with_outcomes(decision, decisions.Outcome.COMMITTED, decision.parts)
    return TaskHandover.of(scope, replace(ownership, decision=decision), now_ms)


def repairs_whatever_the_tasks_are(reports: Any, **named: Any) -> TransactionSteps[Any]:
    """The rows that tasks were given are not compared."""
    if reports and reports[0].run.is_repair:
        parts = tuple(report.part for report in reports if report.part is not None)
        previous = yield from driver.read_decision(reports[0].run.scope)
        assert previous is not None
        decision = decisions.repaired(reports[0].run.scope, previous, parts)
        run = reports[0].run
        return (yield from driver.decide(run.scope, run.handover.driver_epoch, decision, parts))
    return (yield from batches.commit(reports, **named))


def takes_expired_markers_for_missing(scope: Any, clock_ms: Clock) -> TransactionSteps[Any]:
    """What is not proven by a progress marker is taken for lost."""
    found = yield from driver.take_over(scope, clock_ms)
    if found.decision is None:
        return found
    parts = tuple(replace(part, outcome=decisions.Outcome.UNRECORDED) for part in found.decision.parts)
    decision = replace(found.decision, parts=parts)
    absent = yield from proof.not_visible(scope, decision, (yield from seen(scope)))
    return replace(found, decision=with_outcomes(decision, decisions.Outcome.LOST, absent))


def ends_only_what_is_open(reports: Any, **named: Any) -> TransactionSteps[Any]:
    """Ids that a task has taken over, and not written under yet, are left to it."""

    def ask(wanted: tuple[Operation, ...]) -> TransactionSteps[Any]:
        answers = list((yield wanted))
        for index, operation in enumerate(wanted):
            if isinstance(operation, ListOpen):
                found = yield from describe(*answers[index])
                answers[index] = [name for name, one in found.items() if one.state == OPEN]
        return tuple(answers)

    return (yield from through(batches.commit(reports, **named), ask))


def counts_what_is_lost(reports: Any, **named: Any) -> TransactionSteps[Any]:
    """The next decision takes the one before it for written, whatever became of that."""
    one = reports[0].run
    parts = tuple(report.part for report in reports if report.part is not None)
    if one.is_repair or not parts:
        return (yield from batches.commit(reports, **named))
    previous, last = (yield from driver.read_decision(one.scope)), one.handover.last
    if previous is not None:
        last = with_outcomes(previous, decisions.Outcome.COMMITTED, previous.parts).summary
    decision = decisions.next_decision(one.scope, last, one.batch, len(reports), parts)
    return (yield from driver.decide(one.scope, one.handover.driver_epoch, decision, parts))


def takes_what_is_told_by_now(scope: Scope, clock_ms: Clock) -> TransactionSteps[Any]:
    """A decision whose offsets are reported late is not waited for."""

    def ask(wanted: tuple[Operation, ...]) -> TransactionSteps[Any]:
        is_read = any(isinstance(one, FetchOffsets) for one in wanted)
        kept = [one for one in wanted if not (is_read and isinstance(one, FetchStableOffsets))]
        answers = list((yield tuple(kept)))
        if len(kept) < len(wanted):
            answers.append(next(one for one in answers if isinstance(one, dict)))
        return tuple(answers)

    return (yield from through(driver.take_over(scope, clock_ms), ask))


def leaves_no_marker(scope: Any, driver_epoch: Any, *_: Any) -> TransactionSteps[None]:
    """A transaction that was committed looks like one that timed out."""
    yield from task_attempt.require_driver_epoch(scope, driver_epoch)


_CRASHES, _DRIVERS, _TIMEOUTS, _OTHER_TASKS = (
    "crashes, zombies and speculation",
    "two drivers",
    "timeouts",
    "timeouts and other tasks",
)
WRONG: dict[str, tuple[str, dict[str, Any]]] = {
    "planning fences nobody": (_DRIVERS, {"take_over": without_taking_over}),
    "no decision": (_CRASHES, {"commit": commits_without_deciding}),
    "missing tasks forgotten": (_TIMEOUTS, {"handover": forgets_what_is_missing}),
    "repair of other tasks": (_OTHER_TASKS, {"commit": repairs_whatever_the_tasks_are}),
    "expired progress markers taken for missing": ("weeks", {"take_over": takes_expired_markers_for_missing}),
    "ids without a transaction left to their tasks": (_CRASHES, {"commit": ends_only_what_is_open}),
    "no progress marker": (_DRIVERS, {"mark": leaves_no_marker}),
    "what is lost counts as written": ("versions of applications", {"commit": counts_what_is_lost}),
    "a decision that is reported late is not waited for": (
        "versions of applications, offsets reported late",
        {"take_over": takes_what_is_told_by_now},
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_protocol_is_found_out(name: str) -> None:
    setting, wrong = WRONG[name]
    assert problems(replace(SETTINGS[setting], **wrong), _UNTIL_FOUND, stop=True)


def in_all_orders(settings: Settings, most: int) -> Iterator[World]:
    """Every order of events, by running each again up to its last choice with an alternative."""
    taken: list[int] = []
    for _ in range(most):
        widths: list[int] = []

        def choose(count: int, widths: list[int] = widths) -> int:
            widths.append(count)
            if len(widths) > len(taken):
                taken.append(0)
            return taken[len(widths) - 1]

        world = World(replace(settings, faults=replace(settings.faults)), choose)
        while world.step():
            pass
        world.quiet_end()
        yield world
        del taken[len(widths) :]
        while taken and taken[-1] + 1 >= widths[len(taken) - 1]:
            taken.pop()
        if not taken:
            return
        taken[-1] += 1
    raise AssertionError(f"more than {most} orders")


def dies(_: Scope, __: Any, ___: float) -> TransactionSteps[None]:
    """A driver that does not get as far as to abort what failed."""
    yield from ()


SMALL = Settings(
    layouts=(((0,),),),
    count=1,
    faults=Faults(crashes=1, drivers=0, late_copies=0, late_attempts=0),
    abort=dies,
)
AND_A_TIMEOUT = replace(SMALL, faults=replace(SMALL.faults, timeouts=1))


# With a timeout they are ten times as many, of which a usual run walks through some.
@pytest.mark.parametrize("settings", [SMALL, *([AND_A_TIMEOUT] if EFFORT > 1 else [])])
def test_one_task_with_one_crash_in_all_orders(settings: Settings) -> None:
    count = 0
    for count, world in enumerate(in_all_orders(settings, 200_000)):  # noqa: B007 - the last one's
        wrong = world.doubled() or world.lost() or world.undone()
        assert not wrong, world.trace
    assert count >= 10


def test_one_task_with_a_crash_and_a_timeout_in_random_orders() -> None:
    assert problems(AND_A_TIMEOUT, WALKS) == []
