"""``kafka-chunked-transactions``: shows what each transactional.id.prefix has left behind, and ends it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from typing import TextIO

from kafka_sink.clock import CONNECT_BOUND_MS, wall_ms
from kafka_sink.driver.command_line import given_options, parser_of
from kafka_sink.driver.planning_client import PlanningClient
from kafka_sink.errors import ConfigurationError, KafkaSinkError, ProtocolError
from kafka_sink.options import parse
from kafka_sink.printable import one_line
from kafka_sink.transactions import driver, proof
from kafka_sink.transactions import operations as ops
from kafka_sink.transactions.batch import counted
from kafka_sink.transactions.client import TransactionClient
from kafka_sink.transactions.decision import Decision
from kafka_sink.transactions.operations import Described, Scope, TransactionSteps

# The time limit of an action. No option sets it.
_TIMEOUT = (60_000.0, "")
_NEAR = 3
_LONGEST = 10_000
_DESCRIPTION = """\
Shows and ends what the transactions of a transactional.id.prefix have left behind.

  list      shows the last decision, what was written, and which transactions are open; without --prefix, the
            prefixes of the cluster. It changes nothing.
  complete  commits what was decided and aborts everything else that is open, as the next run would.
  rewrite   is for a batch that stays incomplete because its run now has other tasks. It drops the
            decision, and the next run writes the whole batch. Readers then see twice the rows they see now.
  abandon   is also for such a batch. It counts the batch as written as it is: readers see no row twice, and
            never see the missing rows.

All but list take the prefix over: a query or job that runs with it fails. A query between two micro-batches
may fail as well, so stop it first.
The exit code is 0 if it was done, 1 if not, and 2 if a batch stays incomplete.
"""


def main(
    arguments: Sequence[str] | None = None,
    out: TextIO = sys.stdout,
    connect_bound_ms: float = CONNECT_BOUND_MS,
) -> int:
    """Return 0 if it was done, 1 if not (stderr has the reason), and 2 if a batch stays incomplete."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.prefix is None and args.action != "list":
        parser.error(f"{args.action} needs --prefix; list without it shows the prefixes of the cluster")
    given = given_options(parser, args)
    try:
        parsed = parse(given | {"delivery.guarantee": "exactly-once"})
        for warning in parsed.warnings:
            _say(f"warning: {warning}", sys.stderr)
        # This takes only a short time if no broker can be reached, and the error lists each address.
        with closing(PlanningClient(parsed.options, connect_bound_ms)) as first:
            first.connect()
        client = TransactionClient(parsed.options)
        try:
            known = client.run(_prefixes(), *_TIMEOUT)
            _warn_of_brokers(client)
            if args.prefix is None:
                return _list_prefixes(client, known, out)
            scope = _known_scope(client, args.prefix, args.topic, known)
            return _ACTIONS[args.action](client, scope, out)
        finally:
            client.close()
    except KafkaSinkError as error:
        _say(f"error: {error}", sys.stderr)
        return 1


def _say(line: str, out: TextIO) -> None:
    """Print a line. Anybody may have written the prefixes and ids in it, with any characters."""
    print(one_line(line, _LONGEST), file=out)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("kafka-chunked-transactions", _DESCRIPTION)
    parser.add_argument("action", choices=tuple(_ACTIONS))
    parser.add_argument(
        "--prefix", help="transactional.id.prefix; the driver's log has it, and list shows it"
    )
    parser.add_argument(
        "--topic",
        help="the option topic of the job, or its transaction.progress.topic; needed if no "
        "batch was decided yet",
    )
    return parser


def _prefixes() -> TransactionSteps[frozenset[str]]:
    (ids,) = yield (ops.ListIds(),)
    return frozenset(map(ops.prefix_of, ids))


def _warn_of_brokers(client: TransactionClient) -> None:
    if client.left_out:
        named = ", ".join(map(str, sorted(client.left_out)))
        _say(f"warning: broker {named} did not respond: its transactions are not listed", sys.stderr)


def _known_scope(client: TransactionClient, prefix: str, topic: str | None, known: Iterable[str]) -> Scope:
    """Find the prefix. Raises KafkaSinkError if nobody has used it: a take-over would create its ids."""
    # Decisions are found without the topic and its number of partitions.
    decision = client.run(driver.read_decision(Scope(prefix, "", 1)), *_TIMEOUT)
    driver_id = Scope(prefix, "", 1).driver_id
    # The list cannot show this, because it does not wait for a broker that hangs.
    if decision is None and not client.run(ops.describe(driver_id), *_TIMEOUT):
        raise KafkaSinkError(_unknown(prefix, known))
    named = topic or (decision.topic if decision is not None else None)
    if named is None:
        raise KafkaSinkError(f"no batch was decided under '{prefix}': give its progress topic with --topic")
    partitions = client.partitions(named, *_TIMEOUT)
    if not partitions:
        raise KafkaSinkError(f"topic '{named}' does not exist")
    return Scope(prefix, named, partitions)


def _unknown(prefix: str, known: Iterable[str]) -> str:
    # The prefix of each writer begins with the option's value and continues with digits.
    similar = sorted(name for name in known if name.startswith(prefix))
    hint = "; similar ones: " + ", ".join(similar[:_NEAR]) if similar else ""
    return (
        f"no broker lists transactional.id.prefix '{prefix}'{hint}. list without --prefix shows all. Brokers "
        "delete ids that were not used for transactional.id.expiration.ms, and list only those that this "
        "login may describe"
    )


def _list_prefixes(client: TransactionClient, known: Iterable[str], out: TextIO) -> int:
    """Print a line for each prefix.

    Ids of other applications may look alike, and anybody may have committed offsets under the names of a
    prefix's groups. So a prefix whose decision cannot be read does not prevent the others from being listed.
    """
    prefixes = sorted(known)
    for prefix in prefixes:
        scope = Scope(prefix, "", 1)
        try:
            decision = client.run(driver.read_decision(scope), *_TIMEOUT)
            decided = "nothing decided" if decision is None else _decided(client, scope, decision)
        except (ProtocolError, ConfigurationError) as error:
            decided = f"its decision cannot be read: {error}"
        _say(f"{prefix}: {decided}; {counted(len(client.run(_open(scope), *_TIMEOUT)), 'open')}", out)
    if not prefixes:
        _say("brokers list no prefix", out)
    return 0


def _list(client: TransactionClient, scope: Scope, out: TextIO) -> int:
    decision = client.run(driver.read_decision(scope), *_TIMEOUT)
    if decision is None:
        _say("no batch was decided", out)
    else:
        _say(f"last decided: {_decided(client, scope, decision)}", out)
        _say(f"written of {decision.batch.writer}: {decision.written}", out)
    transactions = client.run(_open(scope), *_TIMEOUT)
    _warn_of_brokers(client)
    _say(counted(len(transactions), "open"), out)
    now_ms = wall_ms()
    for name, described in sorted(transactions.items()):
        _say(
            f"{name}: open for {max(0.0, now_ms - described.started_ms) / 1000:.0f} s in "
            f"{described.partitions} partitions, producer {described.producer.producer_id}, "
            f"epoch {described.producer.epoch}",
            out,
        )
    return 0


def _decided(client: TransactionClient, scope: Scope, decision: Decision) -> str:
    missing = client.run(proof.uncommitted(scope, decision), *_TIMEOUT)
    state = f"{len(missing)} of them not committed" if missing else "all committed"
    state = "which counts as not written" if decision.is_lost else state
    return f"{decision.batch}, {decision.tasks} tasks, {len(decision.parts)} transactions, {state}"


def _open(scope: Scope) -> TransactionSteps[dict[str, Described]]:
    (names,) = yield (ops.ListOpen(scope.prefix),)
    descriptions = yield from ops.describe(*names, scope.driver_id)
    return {name: described for name, described in descriptions.items() if described.state == ops.OPEN}


def _complete(client: TransactionClient, scope: Scope, out: TextIO) -> int:
    ownership = client.run(driver.take_over(scope, wall_ms), *_TIMEOUT)
    _say(f"{ownership.completed} transactions committed, {ownership.aborted} aborted", out)
    problem = driver.problem_of(scope, ownership)
    if problem:
        _say(problem, out)
        return 2
    return 0


def resolve(client: TransactionClient, scope: Scope, out: TextIO, *, rewrite: bool) -> int:
    """The action ``rewrite``, or else ``abandon``."""
    ownership = client.run(driver.take_over(scope, wall_ms), *_TIMEOUT)
    decision, missing = ownership.decision, ownership.missing | ownership.unknown
    if decision is None or not missing:
        _say("no batch is incomplete: nothing is changed", out)
        return 0
    if decision.is_lost:
        _say(f"{decision.batch} counts as not written, the next run writes it: nothing is changed", out)
        return 0
    client.run(driver.resolve(scope, ownership.driver_epoch, decision, rewrite=rewrite), *_TIMEOUT)
    if rewrite:
        _say(f"the decision of {decision.batch} is dropped; the next run writes all of the batch", out)
        return 0
    rows = sum(decision.digest_of(task).rows for task in missing)
    _say(
        f"{decision.batch} now counts as written: {rows} rows of {len(missing)} tasks "
        f"{'may be' if ownership.unknown else 'are'} missing, and no run writes them",
        out,
    )
    return 0


_ACTIONS: dict[str, Callable[[TransactionClient, Scope, TextIO], int]] = {
    "list": _list,
    "complete": _complete,
    "rewrite": partial(resolve, rewrite=True),
    "abandon": partial(resolve, rewrite=False),
}


if __name__ == "__main__":
    sys.exit(main())
