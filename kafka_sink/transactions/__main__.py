"""``python -m kafka_sink.transactions``: what a transactional.id.prefix has left, and ends of it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TextIO

from kafka_sink.clock import wall_ms
from kafka_sink.command_line import add_options, given_options
from kafka_sink.errors import KafkaSinkError
from kafka_sink.options import SinkOptions, parse
from kafka_sink.planning_client import CONNECT_BOUND_MS
from kafka_sink.transactions import driver
from kafka_sink.transactions.client import TransactionClient
from kafka_sink.transactions.operations import OPEN, Described, ListOpen, Steps, describe
from kafka_sink.transactions.scope import Scope

_TIMEOUT_MS = 60_000.0
_DESCRIPTION = """\
Shows and ends what the transactions of a transactional.id.prefix have left behind.

  list      shows the last decision, what was written, and which transactions are open. It changes nothing.
  complete  commits what was decided and aborts everything else that is open, as the next run would.
  abort     is another name for complete, for use where nothing was decided.
  rewrite   is for a batch that stays incomplete because its tasks are others now. It forgets the decision,
            and the next run writes the whole batch. Readers then see twice what they can see of it by now.

All but list take the prefix over: a query or job that runs with it fails.
It ends with 0, with 1 if it could not be done, and with 2 if a batch stays incomplete.
"""


def main(arguments: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """0 where it was done, 1 with the reason on stderr where not, 2 where a batch is incomplete."""
    parser = _parser()
    args = parser.parse_args(arguments)
    given = given_options(parser, args)
    try:
        options = _options(given, args.bootstrap_servers)
        client = TransactionClient(options)
        try:
            partitions = client.partitions(args.topic, CONNECT_BOUND_MS)
            if not partitions:
                raise KafkaSinkError(f"there is no topic '{args.topic}'")
            scope = Scope(args.prefix, args.topic, partitions)
            action = {"list": _list, "rewrite": _rewrite}.get(args.action, _complete)
            return action(client, scope, out)
        finally:
            client.close()
    except KafkaSinkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kafka_sink.transactions",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("list", "complete", "abort", "rewrite"))
    parser.add_argument("--bootstrap-servers", required=True, metavar="HOST:PORT")
    parser.add_argument("--prefix", required=True, help="transactional.id.prefix; the driver's log names it")
    parser.add_argument(
        "--topic", required=True, help="the option topic of the job, or its transaction.progress.topic"
    )
    add_options(parser)
    return parser


def _options(given: dict[str, str], bootstrap_servers: str) -> SinkOptions:
    required = {"kafka.bootstrap.servers": bootstrap_servers, "delivery.guarantee": "exactly-once"}
    return parse(given | required).options


def _list(client: TransactionClient, scope: Scope, out: TextIO) -> int:
    decision = client.run(driver.read_decision(scope), _TIMEOUT_MS)
    if decision is None:
        print("no batch was decided", file=out)
    else:
        missing = client.run(driver.uncommitted(scope, decision), _TIMEOUT_MS)
        state = f"{len(missing)} of them not committed" if missing else "all committed"
        print(
            f"last decided: {decision.batch}, {decision.tasks} tasks, "
            f"{len(decision.parts)} transactions, {state}",
            file=out,
        )
        for writer, number in decision.progress.items():
            print(f"written of {writer}: up to {number}", file=out)
    found = client.run(_open(scope), _TIMEOUT_MS)
    print(f"{len(found):,} transaction{'' if len(found) == 1 else 's'} open", file=out)
    now_ms = wall_ms()
    for name, one in sorted(found.items()):
        print(
            f"{name}: open for {max(0.0, now_ms - one.started_ms) / 1000:.0f} s in {one.partitions} "
            f"partitions, producer {one.producer.producer_id}, epoch {one.producer.epoch}",
            file=out,
        )
    return 0


def _open(scope: Scope) -> Steps[dict[str, Described]]:
    (names,) = yield (ListOpen(scope.prefix),)
    found = yield from describe(*names, scope.driver_id)
    return {name: one for name, one in found.items() if one.state == OPEN}


def _complete(client: TransactionClient, scope: Scope, out: TextIO) -> int:
    ownership = client.run(driver.take_over(scope), _TIMEOUT_MS)
    print(f"{len(ownership.completed)} transactions committed, {len(ownership.aborted)} aborted", file=out)
    if ownership.decision is not None and ownership.missing:
        print(driver.incomplete(scope, ownership.decision, ownership.missing), file=out)
        return 2
    return 0


def _rewrite(client: TransactionClient, scope: Scope, out: TextIO) -> int:
    ownership = client.run(driver.take_over(scope), _TIMEOUT_MS)
    if ownership.decision is None or not ownership.missing:
        print("no batch is incomplete: nothing is changed", file=out)
        return 0
    client.run(driver.forget(scope, ownership.claim, ownership.decision), _TIMEOUT_MS)
    print(f"{ownership.decision.batch} is forgotten; the next run writes all of it", file=out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
