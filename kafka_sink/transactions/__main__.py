"""``python -m kafka_sink.transactions list|complete|abort|rewrite``: what a transactional.id.prefix has left.

``list`` looks. The others take the prefix over, so no query or job may be running with it: that one would
fail. ``complete`` commits what was decided and aborts everything else that is open, as the next run would;
``abort`` is another name for it, for where nothing was decided. ``rewrite`` is for a batch that stays
incomplete, since its tasks are others now: it forgets the decision, and the next run writes the whole batch.
Readers then see the rows that are visible by now twice.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TextIO

from kafka_sink.clock import wall_ms
from kafka_sink.errors import KafkaSinkError
from kafka_sink.options import SinkOptions, parse
from kafka_sink.transactions import driver
from kafka_sink.transactions.client import TransactionClient
from kafka_sink.transactions.operations import OPEN, Described, ListOpen, Steps, describe
from kafka_sink.transactions.scope import Scope

_TIMEOUT_MS = 60_000.0


def main(arguments: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """0 where it was done, 1 with the reason on stderr where not, 2 where a batch is incomplete."""
    args = _parser().parse_args(arguments)
    try:
        options = _options(args)
        client = TransactionClient(options)
        try:
            partitions = client.partitions(args.topic, _TIMEOUT_MS)
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
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("list", "complete", "abort", "rewrite"))
    parser.add_argument("--bootstrap-servers", required=True)
    parser.add_argument("--prefix", required=True, help="transactional.id.prefix; the driver's log names it")
    parser.add_argument(
        "--topic", required=True, help="the option topic of the job, or its transaction.progress.topic"
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another option of the sink; no secret, as others see command lines",
    )
    parser.add_argument("--options-file", help="a file of NAME=VALUE lines, for options with secrets")
    return parser


def _options(args: argparse.Namespace) -> SinkOptions:
    lines = list(args.option)
    if args.options_file:
        try:
            with open(args.options_file, encoding="utf-8") as file:
                lines += [line.strip() for line in file if line.strip() and not line.startswith("#")]
        except OSError as error:
            raise KafkaSinkError(f"--options-file: {error}") from error
    raw = {"kafka.bootstrap.servers": args.bootstrap_servers, "delivery.guarantee": "exactly-once"}
    for line in lines:
        name, equals, value = line.partition("=")
        if not equals:
            raise KafkaSinkError("an option is not NAME=VALUE")
        raw[name.strip()] = value.strip()
    return parse(raw).options


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
