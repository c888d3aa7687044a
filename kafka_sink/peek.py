"""``python -m kafka_sink.peek``: shows rows and dead letters in the terminal, and writes letters back."""

from __future__ import annotations

import argparse
import base64
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from datetime import datetime, timezone
from typing import Any, TextIO

from kafka.errors import KafkaError

from kafka_sink.dead_letters.rejected_rows import CUT_PREFIX, PREFIX
from kafka_sink.driver.command_line import add_options, given_options, parser_of
from kafka_sink.driver.kafka_python import client_settings
from kafka_sink.errors import ConfigurationError, DeliveryError, KafkaSinkError
from kafka_sink.options import parse
from kafka_sink.printable import printable

_DESCRIPTION = """\
Shows the last rows of a topic, or those from the beginning, from an offset, or as they come (--follow). Of a
dead letter it shows where it was meant to go and why it was rejected. Groups of readers do not notice. It
shows committed rows only.

Letters are written back like this:

  python -m kafka_sink.peek LETTERS --bootstrap-servers HOST:PORT --from beginning --count 1000000 --json \
    > letters.jsonl
  (mend letters.jsonl, or raise the limit that they exceeded; delete lines that are not to be written)
  python -m kafka_sink.peek --write-back letters.jsonl --bootstrap-servers HOST:PORT

Each goes to the topic that rejected it, or to --to, with its key, value, timestamp and own headers, once; a
second run writes it again. The topic of letters stays as it is. It ends with 1 if anything was not shown or
written.
"""
_TOPIC, _REASON = "__connect.errors.topic", "__connect.errors.exception.message"
_CUT = tuple(CUT_PREFIX.decode() + name for name in ("key.length", "value.length", "headers.dropped"))
_CONTEXT = (PREFIX.decode(), CUT_PREFIX.decode())
_SHOWN = 200
_POLL_MS = 500
_DELIVERY_S = 120


def rows(consumer: Any, topic: str, args: argparse.Namespace) -> Iterator[Any]:
    """kafka-python's records, in the order of their partitions' logs; ends at the present end of the topic,
    after ``args.timeout`` seconds without a row, or never with ``args.follow``."""
    from kafka import TopicPartition

    known = consumer.partitions_for_topic(topic)
    if not known:
        raise ConfigurationError(f"there is no topic '{topic}', or this login may not see it (DESCRIBE)")
    wanted = sorted(known) if args.partition is None else [args.partition]
    if not known.issuperset(wanted):
        raise ConfigurationError(
            f"topic '{topic}' has no partition {args.partition}, but {len(known)} others"
        )
    places = [TopicPartition(topic, number) for number in wanted]
    consumer.assign(places)
    first, end = consumer.beginning_offsets(places), consumer.end_offsets(places)
    for place in places:
        consumer.seek(place, _start(args.start, first[place], end[place], args.count))
    last_s = time.monotonic()
    while args.follow or any(consumer.position(place) < end[place] for place in places):
        found = [row for batch in consumer.poll(timeout_ms=_POLL_MS).values() for row in batch]
        if found:
            last_s = time.monotonic()
        elif not args.follow and time.monotonic() - last_s > args.timeout:
            raise DeliveryError(f"no row came within --timeout={args.timeout:g} s: brokers respond slowly")
        yield from sorted(found, key=lambda row: row.timestamp)


def _start(given: str, first: int, end: int, count: int) -> int:
    if given == "beginning":
        return first
    return max(first, min(end, int(given) if given.isdecimal() else end - count))


def described(row: Any) -> dict[str, Any]:
    """A row as JSON has it. Bytes that are no text become {"base64": ...}."""
    headers = [[name, _plain(value)] for name, value in row.headers]
    found = {
        "topic": row.topic,
        "partition": row.partition,
        "offset": row.offset,
        "timestamp": row.timestamp,
        "key": _plain(row.key),
        "value": _plain(row.value),
        "headers": headers,
    }
    context = dict(headers)
    if _TOPIC in context:
        found |= {"origin": context[_TOPIC], "reason": context.get(_REASON)}
    return found


def _plain(data: bytes | None) -> Any:
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def _bytes(value: Any) -> bytes | None:
    """Raises ValueError for what ``_plain`` does not make."""
    if value is None:
        return None
    if isinstance(value, dict) and set(value) == {"base64"}:
        return base64.b64decode(value["base64"], validate=True)
    if isinstance(value, str):
        return value.encode()
    raise ValueError('a key, value or header is a text, {"base64": ...} or null')


def line_of(row: Mapping[str, Any]) -> str:
    """A row for the terminal: on one line, its texts made safe and cut."""
    parts = [f"{row['topic']}-{row['partition']} @ {row['offset']}", _instant(row["timestamp"])]
    parts += [f"{name}={_shown(row[name])}" for name in ("key", "value")]
    own = [f"{name}={_shown(value)}" for name, value in row["headers"] if not name.startswith(_CONTEXT)]
    if own:
        parts.append("headers: " + ", ".join(own))
    if "origin" in row:
        parts.append(f"rejected by {_shown(row['origin'])}: {_shown(row['reason'])}")
    return "  ".join(parts)


def _instant(timestamp_ms: int) -> str:
    try:
        at = datetime.fromtimestamp(timestamp_ms / 1000, timezone.utc).isoformat(timespec="milliseconds")
    except (ValueError, OverflowError, OSError):
        # Brokers take any number, such as microseconds.
        return f"{timestamp_ms} ms"
    return at.replace("+00:00", "Z")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return f"({len(_bytes(value) or b'')} bytes)"
    return "null" if value is None else printable(str(value), _SHOWN)


def write_back(producer: Any, lines: Sequence[str], to: str | None) -> int:
    """Write the letters of these JSON lines, and wait for them. Returns how many.

    Nothing is written unless all lines can be read. Raises ConfigurationError for one that cannot, that
    names no topic, or whose letter was cut; DeliveryError where brokers did not acknowledge all.
    """
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(_record(json.loads(line), to))
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"line {number}: {printable(str(error))}. Nothing was written") from None
    failed: dict[int, Exception] = {}
    sent = {}
    for number, (topic, record) in enumerate(records, 1):
        try:
            sent[number] = producer.send(topic, **record)
        except Exception as error:  # noqa: BLE001 - kafka-python's, told below: letters before it are written
            failed[number] = error
    for number, one in sent.items():
        try:
            one.get(_DELIVERY_S)
        except Exception as error:  # noqa: BLE001 - kafka-python's, told below
            failed[number] = error
    if failed:
        told = (f"line {number}: {type(error).__name__}: {error}" for number, error in sorted(failed.items()))
        raise DeliveryError(
            f"{len(failed)} of {len(records)} letters were not acknowledged; the others are written. Delete "
            f"their lines before a second run. {printable('; '.join(told))}"
        )
    return len(records)


def _record(row: Mapping[str, Any], to: str | None) -> tuple[str, dict[str, Any]]:
    """The topic, and the arguments of kafka-python's ``send``."""
    cut = [name for name, _ in row["headers"] if name in _CUT]
    if cut:
        raise ValueError(f"the letter was cut ({', '.join(cut)}): restore it, and remove these headers")
    topic = to or row.get("origin")
    if not topic:
        raise ValueError("it is no dead letter: name the topic by --to")
    headers = [(name, _bytes(value)) for name, value in row["headers"] if not name.startswith(_CONTEXT)]
    return topic, {
        "key": _bytes(row["key"]),
        "value": _bytes(row["value"]),
        "headers": headers,
        "timestamp_ms": row.get("timestamp"),
    }


def main(arguments: Sequence[str] | None = None, out: TextIO = sys.stdout) -> int:
    """Return 0 where all was shown or written, otherwise 1 with the reason on stderr."""
    parser = _parser()
    args = parser.parse_args(arguments)
    if (args.topic is None) == (args.write_back is None):
        parser.error("name a topic to look at, or --write-back FILE")
    given = given_options(parser, args)
    try:
        options = parse({**given, "kafka.bootstrap.servers": args.bootstrap_servers}).options
        settings = client_settings(options)
        if args.write_back is not None:
            return _write_back(settings, args, out)
        from kafka import KafkaConsumer

        settings |= {"isolation_level": "read_committed", "enable_auto_commit": False, "group_id": None}
        with closing(KafkaConsumer(**settings)) as consumer:
            for number, row in enumerate(rows(consumer, args.topic, args), 1):
                found = described(row)
                print(json.dumps(found) if args.json else line_of(found), file=out, flush=True)
                if number >= args.count and not args.follow and args.start != "end":
                    break
    except KeyboardInterrupt:
        if args.write_back is None:
            return 0
        print("error: interrupted: some letters may be written, and others not", file=sys.stderr)
        return 1
    except KafkaSinkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KafkaError as error:
        print(f"error: {type(error).__name__}: {printable(str(error))}", file=sys.stderr)
        return 1
    return 0


def _write_back(settings: Mapping[str, Any], args: argparse.Namespace, out: TextIO) -> int:
    from kafka import KafkaProducer

    try:
        with open(args.write_back, encoding="utf-8") as file:
            lines = [line for line in file if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--write-back {args.write_back}: {error}") from None
    with closing(KafkaProducer(**settings, acks="all", enable_idempotence=True)) as producer:
        print(f"{write_back(producer, lines, args.to):,} letters written back", file=out)
    return 0


def _place(given: str) -> str:
    if given in ("beginning", "end") or given.isdecimal():
        return given
    raise argparse.ArgumentTypeError(f"{given!r} is neither 'beginning', 'end' nor an offset")


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("peek", _DESCRIPTION)
    parser.add_argument("topic", nargs="?")
    parser.add_argument("--bootstrap-servers", required=True, metavar="HOST:PORT")
    parser.add_argument(
        "--count", type=int, default=10, help="rows at most; of each partition for the last ones"
    )
    parser.add_argument("--partition", type=int)
    parser.add_argument(
        "--from",
        dest="start",
        type=_place,
        default="end",
        metavar="beginning|OFFSET",
        help="default: the last --count",
    )
    parser.add_argument("--follow", action="store_true", help="go on until Ctrl-C")
    parser.add_argument("--timeout", type=float, default=10.0, help="seconds to wait for a row")
    parser.add_argument("--json", action="store_true", help="one JSON object a row, whole")
    parser.add_argument("--write-back", metavar="FILE", help="write the letters of this file")
    parser.add_argument("--to", metavar="TOPIC", help="write them to this topic")
    add_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main())
