"""Spark's side as values: drivers, task attempts and the network between them and Kafka.

Every message is delivered at a moment of its own, or never, or a second time much later; actors crash or
freeze between any two of them. The explorer chooses what happens next (a random walk, or all
ways).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from kafka_sink.errors import IncompleteBatchError, TransactionError
from kafka_sink.transactions import batch as batches
from kafka_sink.transactions import decision as decisions
from kafka_sink.transactions import driver, task_attempt
from kafka_sink.transactions.batch import AttemptReport, BatchRun, TaskHandover, TaskRole
from kafka_sink.transactions.decision import BatchIdentity, Part, RowsDigest
from kafka_sink.transactions.operations import (
    NO_TRANSACTION,
    OPEN,
    EndTransaction,
    FetchOffsets,
    ListOpen,
    LookUp,
    ProducerEpoch,
    RecordOffsets,
    Scope,
)
from tests.support.transaction_steps import through
from tests.support.transactions_of_kafka import Kafka, NotYet, Produce, Row

# More versions of one writer than this there are not.
_KEYS = 100
Choose = Callable[[int], int]
# The possible events: the fault that an event uses up or "", its kind, its target, and its function. The
# names are for people who read a trace, and most possible events never happen, so no text is made beforehand.
Move = tuple[str, str, object, Callable[[], object]]
Body = Generator[Any, Any, Any]
# Steps of a run without faults; one that waits for ever counts as never done.
_MAX_RUN = 300
# Jobs of one schedule that fail before it is given up.
_MAX_FAILURES = 4
# In traces: a message that arrives although its sender has given it up, and a repeated answer.
_LATE, _NOT_YET = "late", "not yet"


@dataclass
class Faults:
    """How many faults of each kind may still happen."""

    crashes: int = 1
    drivers: int = 1
    late_copies: int = 1
    timeouts: int = 0
    late_attempts: int = 1
    layout_changes: int = 0
    former_coordinators: int = 0
    former_coordinators_of_ids: int = 0
    weeks: int = 0
    expires_ids: bool = False
    # Reruns of a job whose user has seen that it is written.
    reruns: int = 0
    # The command, run by a person.
    operators: int = 0
    # Brokers go from transaction protocol 1 to 2; running processes keep the protocol that they found.
    upgrades: int = 0
    # The progress topic gets another partition; running processes keep the number that they found.
    growths: int = 0


@dataclass
class Actor:
    """A process: its code, and the operations that it waits for. ``responses`` fill up in any order."""

    name: str
    body: Body
    waiting: dict[int, Any] = field(default_factory=dict)
    responses: dict[int, Any] = field(default_factory=dict)
    # An attempt's handover, its task, and its number.
    given: tuple[Any, ...] = ()
    task: int = 0
    attempt: int = 0
    awaits_tasks: list[Actor] = field(default_factory=list)
    done: bool = False
    result: Any = None
    error: Exception | None = None
    children: list[Actor] = field(default_factory=list)
    # The value of Kafka.inits when it last asked for open transactions.
    listed: int = -1
    # The protocol of the brokers when it started.
    protocol: int = 2
    # The last epoch that a driver has taken.
    driver_epoch: tuple[Scope, ProducerEpoch] | None = None
    # For each scope, the handover that the driver's last commit left for its next batch.
    next_handovers: dict[Scope, TaskHandover] = field(default_factory=dict)


@dataclass
class Settings:
    """``layouts``: rows of each task, by layout. ``patience``: how much likelier than a fault each other
    event is. ``last_epoch``: the last epoch of a producer id. ``protocol``: Kafka's transaction protocol.
    ``writers``: this many applications, of which ``count`` versions each are run in any order; 0 is a query
    with as many micro-batches. ``partitions``: the progress topic's number at first. The callables are the
    sink's own, which tests replace by wrong ones."""

    layouts: tuple[tuple[tuple[int, ...], ...], ...] = (((0, 1), (2,)),)
    count: int = 2
    faults: Faults = field(default_factory=Faults)
    patience: int = 1
    last_epoch: int = 32_766
    protocol: int = 2
    writers: int = 0
    delays_offsets: bool = False
    partitions: int = 2
    take_over: Callable[..., Any] = driver.take_over
    mark: Callable[..., Any] = task_attempt.mark_steps
    commit: Callable[..., Any] = batches.commit
    abort: Callable[..., Any] = driver.abort
    handover: Callable[..., TaskHandover] = TaskHandover.of


def _beside(produce: Produce, steps: Body) -> Body:
    """The steps, with the rows on their way during the first of them."""
    is_first = True

    def ask(wanted: tuple[Any, ...]) -> Body:
        nonlocal is_first
        if not is_first:
            return (yield wanted)
        is_first = False
        taken, *answers = yield (produce, *wanted)
        if not taken:
            raise TransactionError("fenced")
        return tuple(answers)

    yield from through(steps, ask)


class World:
    """One run. ``reported`` are the batches, by writer and number, whose run ended well: Spark does not run
    these again, nor does the user of a job without need."""

    def __init__(self, settings: Settings, choose: Choose) -> None:
        self.settings = settings
        self.faults = settings.faults
        self.choose = choose
        self.kafka = Kafka(settings.last_epoch, settings.protocol, delays_offsets=settings.delays_offsets)
        self.protocol = settings.protocol
        self.scopes = [
            Scope(f"q{writer}", "t", settings.partitions) for writer in range(max(1, settings.writers))
        ]
        self.reported: set[tuple[int, int]] = set()
        # Batches whose rows a person has agreed to double, or to leave out.
        self.may_double: set[int] = set()
        self.may_lack: set[int] = set()
        self.layout = 0
        self.actors: list[Actor] = []
        self.copies: list[tuple[Any, int]] = []
        self.loud: list[Exception] = []
        # Decided transactions that a driver aborted, and ids that a driver left for other tasks to write
        # under.
        self.aborted_decided: list[str] = []
        self.escaped: list[str] = []
        self.trace: list[tuple[str, object]] = []
        self._serial = 0
        # Operations that Kafka would not handle yet, until something has happened.
        self._not_yet: list[Any] = []
        self.start_driver()

    # -- actors -----------------------------------------------------------------------------------

    def _now_ms(self) -> float:
        return self.kafka.now_ms

    def start_driver(self) -> None:
        actor = Actor("driver", None)  # type: ignore[arg-type]
        actor.body = self._driver(actor)
        self._start(actor)

    def _start(self, actor: Actor) -> None:
        actor.name = f"{actor.name}#{self._serial}"
        actor.protocol = self.protocol
        self._serial += 1
        self.actors.append(actor)
        self._advance(actor, None)

    def undone(self) -> list[tuple[int, int]]:
        """The steps that have to be run now, or in any order. A query runs its micro-batches in turn."""
        count, writers = self.settings.count, self.settings.writers
        left = [(w, n) for w in range(max(1, writers)) for n in range(count) if (w, n) not in self.reported]
        return left if writers else left[:1]

    def _driver(self, me: Actor) -> Body:
        failures = 0
        while todo := self.undone() + (sorted(self.reported) if self.faults.reruns else []):
            writer, number = todo[self.choose(len(todo)) if len(todo) > 1 else 0]
            self.faults.reruns -= (writer, number) in self.reported
            try:
                yield from self._batch(me, writer, number)
            except (TransactionError, IncompleteBatchError) as error:
                # The next job of a schedule is run all the same.
                failures += 1
                if not self.settings.writers or failures > _MAX_FAILURES:
                    raise
                if isinstance(error, IncompleteBatchError):
                    self.loud.append(error)

    def _batch(self, me: Actor, writer: int, number: int) -> Body:
        scope, rows = self.scopes[writer], self.settings.layouts[self.layout]
        handover = me.next_handovers.pop(scope, None)
        if handover is None or self.choose(2):
            # Planning takes the ids over again if the commit's note is missing or old.
            ownership = yield from self.settings.take_over(scope, self._now_ms)
            self._look_for_escaped(me, scope)
            handover = self.settings.handover(scope, ownership, self.kafka.now_ms)
        me.driver_epoch = scope, handover.driver_epoch
        try:
            reports = yield [
                self._spawn(me, scope, handover, (writer, number), index, ours)
                for index, ours in enumerate(rows)
            ]
            outcome = yield from self.settings.commit(reports)
            self._look_for_escaped(me, scope)
        except (TransactionError, IncompleteBatchError):
            with contextlib.suppress(TransactionError):
                yield from self.settings.abort(scope, handover.driver_epoch, self._now_ms)
            raise
        # Spark's own commit log refuses a batch that another driver of the checkpoint has written.
        if (writer, number) in self.reported and not self.settings.writers:
            raise TransactionError("the commit log has it already")
        self.reported.add((writer, number))
        next_handover = getattr(outcome, "next_handover", None)
        if next_handover is not None:
            me.next_handovers[scope] = next_handover

    def _operator(self, writer: int, action: str) -> Body:
        """The command: ``complete``, ``rewrite`` or ``abandon``."""
        scope = self.scopes[writer]
        ownership = yield from self.settings.take_over(scope, self._now_ms)
        decision = ownership.decision
        if action == "complete" or decision is None or not ownership.missing | ownership.unknown:
            return
        key = next(key for key in self._keys() if decision.batch == self._identity(*divmod(key, _KEYS)))
        (self.may_double if action == "rewrite" else self.may_lack).add(key)
        yield from driver.resolve(scope, ownership.driver_epoch, decision, rewrite=action == "rewrite")

    def _keys(self) -> list[int]:
        writers = range(max(1, self.settings.writers))
        return [writer * _KEYS + number for writer in writers for number in range(self.settings.count)]

    def _identity(self, writer: int, number: int) -> BatchIdentity:
        if self.settings.writers:
            return BatchIdentity.of_application(f"app {writer}", "t", number)
        return BatchIdentity.of_query("query", number)

    def _look_for_escaped(self, me: Actor, scope: Scope) -> None:
        """Check that no id may be written under if a task had taken it over when the driver looked for such
        ids.

        With protocol 1 the driver cannot distinguish them from ids that are not in use.
        """
        if me.protocol == 1:
            return
        self.escaped += [
            name
            for name, one in self.kafka.transactions.items()
            if name.startswith(f"{scope.prefix}-task-")
            and one.state in (OPEN, NO_TRANSACTION)
            and one.taken <= me.listed
            # After a commit with protocol 1 a late copy of a request begins another transaction without rows.
            and (one.ended_with != one.producer or one.rows)
        ]

    def _spawn(
        self,
        parent: Actor,
        scope: Scope,
        handover: TaskHandover,
        batch: tuple[int, int],
        index: int,
        rows: tuple[int, ...],
        attempt: int = 0,
    ) -> Actor:
        given = (scope, handover, batch, index, rows)
        actor = Actor(f"task{index}.{attempt}", self._task(*given, attempt))
        actor.given, actor.task, actor.attempt = given, index, attempt
        parent.children.append(actor)
        self._start(actor)
        return actor

    def _task(
        self,
        scope: Scope,
        handover: TaskHandover,
        of: tuple[int, int],
        index: int,
        rows: tuple[int, ...],
        attempt: int = 0,
    ) -> Body:
        batch, key = self._identity(*of), of[0] * _KEYS + of[1]
        role = handover.role(batch, index)
        digest = RowsDigest(len(rows), len(rows), sum(hash((row,)) & 0xFFFF for row in rows))
        part = None
        slot, began_ms = attempt, self.kafka.now_ms
        if role is TaskRole.WRITE and rows:
            slot, producer = yield from task_attempt.begin_steps(scope, handover.driver_epoch, index, slot)
            name = scope.task_id(index, slot)
            produce = Produce(name, producer, tuple((key, row) for row in rows))
            part = Part(index, slot, producer, digest)
            yield from _beside(produce, self.settings.mark(scope, handover.driver_epoch, batch, part))
        return AttemptReport(BatchRun(batch, scope, handover), index, role, digest, part, began_ms)

    def _advance(self, actor: Actor, sent: Any) -> None:
        """Runs an actor's code to its next operations; an exception is raised there."""
        try:
            wanted = actor.body.throw(sent) if isinstance(sent, Exception) else actor.body.send(sent)
        except StopIteration as stop:
            actor.done, actor.result = True, stop.value
            return
        except (TransactionError, IncompleteBatchError) as error:
            actor.done, actor.error = True, error
            if isinstance(error, IncompleteBatchError):
                self.loud.append(error)
            return
        if isinstance(wanted, list):
            actor.awaits_tasks = wanted
        else:
            actor.waiting = {i: one for i, one in enumerate(wanted) if not isinstance(one, LookUp)}
            if any(isinstance(operation, ListOpen) for operation in wanted):
                actor.listed = self.kafka.inits
            actor.responses = {i: None for i, one in enumerate(wanted) if isinstance(one, LookUp)}
            if not wanted:
                self._advance(actor, ())

    # -- possible events ----------------------------------------------------------------------------

    def moves(self) -> list[Move]:
        """The events that happen without faults."""
        found: list[Move] = []
        for actor in self.actors:
            if actor.done:
                continue
            found += [
                ("", actor.name, operation, partial(self._deliver, actor, index))
                for index, operation in actor.waiting.items()
                if not self._is_behind(actor, index) and not any(operation is one for one in self._not_yet)
            ]
            if actor.awaits_tasks and self._tasks_over(actor):
                found.append(("", actor.name, "tasks over", partial(self._collect, actor)))
        kafka = self.kafka
        found += [("", "markers of", n, partial(self._write_markers, n)) for n in kafka.pending_markers()]
        found += [("", "offsets of", n, partial(self._tell_offsets, n)) for n in kafka.late_offsets()]
        for former in (kafka.former, kafka.former_ids):
            found += [("", "learns that it is replaced", n, partial(former.pop, n)) for n in former]
        return found

    def _is_behind(self, actor: Actor, index: int) -> bool:
        """Whether a request waits for another one of its step: both go to a group's coordinator, over one
        connection, and brokers handle these in turn."""
        ours = actor.waiting[index]
        return isinstance(ours, FetchOffsets) and any(
            isinstance(one, RecordOffsets) and one.group in ours.groups and number < index
            for number, one in actor.waiting.items()
        )

    def fault_moves(self) -> list[Move]:
        faults, kafka = self.faults, self.kafka
        alive = [actor for actor in self.actors if not actor.done]
        found: list[Move] = []

        def add(fault: str, moves: Iterable[tuple[str, object, Callable[[], object]]]) -> None:
            if getattr(faults, fault):
                found.extend((fault, *move) for move in moves)

        add("crashes", (("crash", one.name, partial(self._crash, one)) for one in alive))
        sent = ((op, one.protocol) for one in alive for op in one.waiting.values())
        add("late_copies", (("copy", copy[0], partial(self.copies.append, copy)) for copy in sent))
        attempts = ((driver, one) for driver in alive for one in driver.awaits_tasks)
        add("late_attempts", (("another", one[1].name, partial(self._retry, *one)) for one in attempts))
        found += [("", _LATE, copy[0], partial(self._late, index)) for index, copy in enumerate(self.copies)]
        add("drivers", [("another", "driver", self.start_driver)])
        add("timeouts", (("timeout of", name, partial(kafka.time_out, name)) for name in kafka.open()))
        if faults.former_coordinators:
            groups = dict.fromkeys(key.group for key in kafka.offsets if key.group not in kafka.former)
            add(
                "former_coordinators",
                (("replaced", n, partial(kafka.replace_coordinator, n)) for n in groups),
            )
        if faults.former_coordinators_of_ids:
            ids = {one.driver_id for one in self.scopes} | kafka.transactions.keys() - kafka.former_ids.keys()
            ids |= {self.scopes[0].task_id(0, 0)} - kafka.transactions.keys()
            replace_id = kafka.replace_coordinator_of_id
            add(
                "former_coordinators_of_ids",
                (("replaced", n, partial(replace_id, n)) for n in sorted(ids)),
            )
        asked = ((a, w) for w in range(len(self.scopes)) for a in ("complete", "rewrite", "abandon"))
        add("operators", ((a, self.scopes[w].prefix, partial(self._operate, w, a)) for a, w in asked))
        add("upgrades", [("upgrades", "brokers", partial(setattr, self, "protocol", 2))])
        # Before any progress is recorded, the growth of the topic makes no difference.
        add("growths", [("grows", "the progress topic", self._grow)] if kafka.offsets else [])
        add("weeks", [("passes", "a week", self._pass_week)])
        add("layout_changes", [("changes", "the layout", self._change_layout)])
        return found

    def step(self) -> bool:
        """Let one event happen; return false if no event is left."""
        moves, faults = self.moves(), self.fault_moves()
        if not moves and not any(what == _LATE for _, what, *_ in faults):
            return False
        chosen = self.choose(len(moves) * self.settings.patience + len(faults))
        if chosen < len(moves) * self.settings.patience:
            _, what, whom, act = moves[chosen % len(moves)]
        else:
            fault, what, whom, act = faults[chosen - len(moves) * self.settings.patience]
            if fault:
                setattr(self.faults, fault, getattr(self.faults, fault) - 1)
            self._not_yet = []
        self.trace.append((what, whom))
        act()
        return True

    def _deliver(self, actor: Actor, index: int) -> None:
        self._look_for_suicide(actor.waiting[index])
        self.kafka.protocol = actor.protocol
        try:
            actor.responses[index], follows = self.kafka.send(actor.waiting[index])
        except NotYet:
            self.trace.append((_NOT_YET, ""))
            self._not_yet.append(actor.waiting[index])
            return
        self._not_yet = []
        if follows is not None:
            actor.waiting[index] = follows
            return
        del actor.waiting[index]
        if not actor.waiting:
            self._advance(actor, tuple(actor.responses[i] for i in sorted(actor.responses)))

    def _write_markers(self, name: str) -> None:
        self._not_yet = []
        self.kafka.write_markers(name)

    def _tell_offsets(self, name: str) -> None:
        self._not_yet = []
        self.kafka.tell_offsets(name)

    def _operate(self, writer: int, action: str) -> None:
        self._start(Actor(action, self._operator(writer, action)))

    def _look_for_suicide(self, operation: Any) -> None:
        """No decided transaction that is open may be aborted."""
        if not isinstance(operation, EndTransaction) or operation.commit:
            return
        found = self.kafka.transactions.get(operation.transactional_id)
        if found is None or found.state != OPEN or found.producer != operation.producer:
            return
        if found.ended_with == found.producer and not found.rows:
            # Committed before, with protocol 1: a late copy of a request began another one without rows.
            return
        late = {
            key: text for one in self.kafka.transactions.values() for key, text in one.late_offsets.items()
        }
        offsets = self.kafka.offsets | late
        for scope in self.scopes:
            group = scope.decision_key(0).group
            decision = decisions.decode(text for key, text in offsets.items() if key.group == group)
            for part in () if decision is None else decision.parts:
                if (scope.task_id(part.task, part.slot), part.producer) == (
                    operation.transactional_id,
                    operation.producer,
                ):
                    self.aborted_decided.append(operation.transactional_id)

    def _tasks_over(self, actor: Actor) -> bool:
        """Every partition has an attempt that succeeded, or one of them has none left that could."""
        alive = [one for one in actor.awaits_tasks if not one.done or one.error is None]
        partitions = {one.task for one in actor.awaits_tasks}
        return {one.task for one in alive} != partitions or {
            one.task for one in alive if one.done
        } == partitions

    def _collect(self, actor: Actor) -> None:
        won: dict[int, AttemptReport] = {}
        attempts, actor.awaits_tasks = actor.awaits_tasks, []
        for one in attempts:
            if one.done and one.error is None:
                won.setdefault(one.task, one.result)
        is_whole = len(won) == len({one.task for one in attempts})
        reports = [won[index] for index in sorted(won)]
        self._advance(actor, reports if is_whole else TransactionError("the job failed"))

    def _crash(self, actor: Actor) -> None:
        actor.done, actor.error = True, TransactionError("crashed")
        self.copies += [(one, actor.protocol) for one in actor.waiting.values()]
        actor.waiting = {}

    def _late(self, index: int) -> None:
        operation, self.kafka.protocol = self.copies.pop(index)
        with contextlib.suppress(NotYet):
            self.kafka.send(operation)

    def _retry(self, parent: Actor, child: Actor) -> None:
        """Spark starts another attempt, whether the first is over or not."""
        attempt = 1 + max(one.attempt for one in parent.awaits_tasks)
        parent.awaits_tasks.append(self._spawn(parent, *child.given, attempt=attempt))

    def _pass_week(self) -> None:
        """Marks expire, and their decision not yet."""
        self.kafka.now_ms += 7 * 86_400_000
        for scope in self.scopes:
            self.kafka.expire_offsets(scope.marker_key(0).group)
        if self.faults.expires_ids:
            self.kafka.expire_ids()

    def _grow(self) -> None:
        self.scopes = [replace(scope, partitions=scope.partitions + 1) for scope in self.scopes]

    def _change_layout(self) -> None:
        self.layout = (self.layout + 1) % len(self.settings.layouts)

    # -- the end ----------------------------------------------------------------------------------

    def quiet_end(self) -> None:
        """End all actors; then run drivers without faults until the batches are done or one fails."""
        for actor in self.actors:
            actor.done = True
        self.kafka.former.clear()
        self.kafka.former_ids.clear()
        for _ in range(2 + 2 * len(self._keys())):
            if not self.undone():
                break
            self.start_driver()
            for _ in range(_MAX_RUN):
                moves = self.moves()
                if not moves:
                    break
                _, what, whom, act = moves[0]
                self.trace.append((f"end: {what}", whom))
                act()
                if self.trace[-1][0] == _NOT_YET:
                    pending = self.kafka.pending_markers()
                    for name in pending:
                        self._write_markers(name)
                    for name in () if pending else self.kafka.late_offsets():
                        self._tell_offsets(name)
        for name in self.kafka.pending_markers():
            self.kafka.write_markers(name)

    def is_stuck(self) -> bool:
        """Whether the last run said that a batch is incomplete, and why it cannot complete it."""
        driver = [actor for actor in self.actors if actor.name.startswith("driver")][-1]
        return any(isinstance(one.error, IncompleteBatchError) for one in (driver, *driver.children))

    def expected(self) -> set[Row]:
        """The rows of the batches that nobody will run again."""
        rows = {row for layout in self.settings.layouts for one in layout for row in one}
        keys = {writer * _KEYS + number for writer, number in self.reported} - self.may_lack
        return {(key, row) for key in keys for row in rows}

    def doubled(self) -> list[Row]:
        return [
            row for row, count in self.kafka.visible.items() if count > 1 and row[0] not in self.may_double
        ]

    def lost(self) -> list[Row]:
        """Rows of batches that are reported as written, and that no reader sees nor ever will."""
        return sorted(self.expected() - set(self.kafka.visible))
