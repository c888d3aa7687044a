"""Show the last rows of a topic in the terminal, or those from the beginning or an offset, or as they come.

    pip install kafka-python
    python examples/peek.py localhost:9092 orders
    python examples/peek.py localhost:9092 orders-dead-letters --from beginning --count 1000000 --json > file
    python examples/peek.py localhost:9092 orders --write-back file

Of a dead letter it shows which topic rejected it, and why. Only committed rows are shown, and groups of
readers notice nothing. The third line writes dead letters back, once their cause is fixed in the file or in
the topic: those that the named topic rejected, with key, value, timestamp and their own headers. Others are
left out. To write one to another topic, change its "origin" in the file. A second run writes them again.

Secured brokers: --client FILE, a JSON object of kafka-python's settings, such as {"security_protocol":
"SASL_SSL", "sasl_mechanism": "SCRAM-SHA-512", "sasl_plain_username": "reader", "sasl_plain_password": "..."}.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from datetime import datetime, timezone
from typing import Any

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import KafkaError

# The headers that the sink adds to a dead letter. The first kind is Kafka Connect's (KIP-298).
CONTEXT = ("__connect.errors.", "kafka-chunked.errors.")
ORIGIN, REASON = "__connect.errors.topic", "__connect.errors.exception.message"
CUT = tuple(f"kafka-chunked.errors.{name}" for name in ("key.length", "value.length", "headers.dropped"))
SHOWN = 200
POLL_MS = 500
DELIVERY_S = 120


def rows(consumer: Any, args: argparse.Namespace) -> Iterator[Any]:
    """kafka-python's records; ends at the present end of the topic, or never with --follow."""
    known = consumer.partitions_for_topic(args.topic)
    if not known:
        raise ValueError(f"there is no topic '{args.topic}', or this login may not see it")
    places = [TopicPartition(args.topic, number) for number in sorted(known)]
    consumer.assign(places)
    first, end = consumer.beginning_offsets(places), consumer.end_offsets(places)
    for place in places:
        start = {"beginning": first[place], "end": end[place] - args.count}.get(args.start)
        wanted = int(args.start) if start is None else start
        consumer.seek(place, max(first[place], min(end[place], wanted)))
    last_s = time.monotonic()
    while args.follow or any(consumer.position(place) < end[place] for place in places):
        found = [row for batch in consumer.poll(timeout_ms=POLL_MS).values() for row in batch]
        if found:
            last_s = time.monotonic()
        elif not args.follow and time.monotonic() - last_s > args.timeout:
            raise TimeoutError(f"no row came within --timeout={args.timeout:g} s")
        yield from sorted(found, key=lambda row: row.timestamp)


def described(row: Any) -> dict[str, Any]:
    """A row as JSON has it. Bytes that are no text become {"base64": ...}."""
    headers = [[name, plain(value)] for name, value in row.headers]
    found = {name: getattr(row, name) for name in ("topic", "partition", "offset", "timestamp")}
    found |= {"key": plain(row.key), "value": plain(row.value), "headers": headers}
    context = dict(headers)
    if ORIGIN in context:
        found |= {"origin": context[ORIGIN], "reason": context.get(REASON)}
    return found


def plain(data: bytes | None) -> Any:
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data or b"").decode()}


def as_bytes(value: Any) -> bytes | None:
    """The bytes of a value that ``plain`` made. Raises ValueError for other values."""
    if value is None:
        return None
    if isinstance(value, dict) and set(value) == {"base64"}:
        return base64.b64decode(value["base64"], validate=True)
    if isinstance(value, str):
        return value.encode()
    raise ValueError('a key, value or header is a text, {"base64": ...} or null')


def line_of(row: Mapping[str, Any]) -> str:
    """A row for the terminal, on one line. Whatever comes from it is made printable, as it may hold escape
    codes."""
    parts = [f"{row['topic']}-{row['partition']} @ {row['offset']}", instant(row["timestamp"])]
    parts += [f"{name}={shown(row[name])}" for name in ("key", "value")]
    own = [f"{shown(name)}={shown(value)}" for name, value in row["headers"] if not name.startswith(CONTEXT)]
    if own:
        parts.append("headers: " + ", ".join(own))
    if "origin" in row:
        parts.append(f"rejected by {shown(row['origin'])}: {shown(row['reason'])}")
    return "  ".join(parts)


def instant(timestamp_ms: int) -> str:
    try:
        at = datetime.fromtimestamp(timestamp_ms / 1000, timezone.utc).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        # Brokers take any number, such as microseconds.
        return f"{timestamp_ms} ms"
    return at.replace("+00:00", "Z")


def shown(value: Any) -> str:
    if isinstance(value, dict):
        return f"({len(as_bytes(value) or b'')} bytes)"
    text = "null" if value is None else str(value)
    text = text[: SHOWN - 3] + "..." if len(text) > SHOWN else text
    return "".join(char if char.isprintable() else " " for char in text)


def write_back(producer: Any, topic: str, lines: Sequence[str]) -> tuple[int, int]:
    """Write the dead letters that ``topic`` rejected, and wait for them. Returns how many, and how many
    others were left out. Raises ValueError where one cannot be read or was cut, and then writes nothing;
    RuntimeError where brokers did not acknowledge all."""
    records = {}
    for number, line in enumerate(lines, 1):
        try:
            record = record_of(json.loads(line), topic)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"line {number}: {shown(error)}. Nothing was written") from None
        if record is not None:
            records[number] = record
    failed = {}
    sent = {number: producer.send(topic, **record) for number, record in records.items()}
    for number, one in sent.items():
        try:
            one.get(DELIVERY_S)
        except KafkaError as error:
            failed[number] = error
    if failed:
        errors = "; ".join(f"line {number}: {error!r}" for number, error in failed.items())
        raise RuntimeError(
            f"{len(failed)} of {len(sent)} dead letters were not acknowledged. The others are written: "
            f"delete their lines before a second run. {errors}"
        )
    return len(sent), len(lines) - len(sent)


def record_of(row: Mapping[str, Any], topic: str) -> dict[str, Any] | None:
    """The arguments of kafka-python's ``send``; None if another topic rejected the row, which never says
    where it goes."""
    if row.get("origin") != topic:
        return None
    cut = [name for name, _ in row["headers"] if name in CUT]
    if cut:
        raise ValueError(f"the dead letter was cut ({', '.join(cut)}): restore it, and remove these headers")
    headers = [(name, as_bytes(value)) for name, value in row["headers"] if not name.startswith(CONTEXT)]
    found = {"key": as_bytes(row["key"]), "value": as_bytes(row["value"]), "headers": headers}
    return {**found, "timestamp_ms": row.get("timestamp")}


def show(settings: Mapping[str, Any], args: argparse.Namespace) -> None:
    reading = {"isolation_level": "read_committed", "enable_auto_commit": False, "group_id": None}
    with closing(KafkaConsumer(**settings, **reading)) as consumer:
        for number, row in enumerate(rows(consumer, args), 1):
            found = described(row)
            print(json.dumps(found) if args.json else line_of(found), flush=True)
            if number >= args.count and not args.follow and args.start != "end":
                return


def run(args: argparse.Namespace) -> None:
    settings = {"bootstrap_servers": args.servers.split(",")}
    if args.client:
        with open(args.client, encoding="utf-8") as file:
            settings |= json.load(file)
    if args.write_back is None:
        show(settings, args)
        return
    with open(args.write_back, encoding="utf-8") as file:
        lines = [line for line in file if line.strip()]
    with closing(KafkaProducer(**settings, acks="all", enable_idempotence=True)) as producer:
        written, others = write_back(producer, args.topic, lines)
    left_out = f"; {others:,} that other topics rejected were left out" if others else ""
    print(f"{written:,} dead letters written back to {args.topic}{left_out}")


def place(given: str) -> str:
    if given in ("beginning", "end") or given.isdecimal():
        return given
    raise argparse.ArgumentTypeError(f"{given!r} is neither 'beginning', 'end' nor an offset")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("servers", metavar="HOST:PORT")
    parser.add_argument("topic")
    parser.add_argument("--from", dest="start", type=place, default="end", metavar="beginning|end|OFFSET")
    parser.add_argument("--count", type=int, default=10, help="rows at most; of each partition from the end")
    parser.add_argument("--follow", action="store_true", help="go on until Ctrl-C")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds to wait for a row")
    parser.add_argument("--json", action="store_true", help="one JSON object a row, whole")
    parser.add_argument("--write-back", metavar="FILE", help="write dead letters of this file to the topic")
    parser.add_argument("--client", metavar="FILE", help="settings of kafka-python, for secured brokers")
    return parser.parse_args()


if __name__ == "__main__":
    arguments_given = arguments()
    try:
        run(arguments_given)
    except KeyboardInterrupt:
        sys.exit("interrupted: some dead letters may be written" if arguments_given.write_back else 0)
    except (OSError, ValueError, RuntimeError, KafkaError) as problem:
        sys.exit(f"error: {shown(problem)}")
