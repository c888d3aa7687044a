"""``local-kafka``: runs Kafka until it is stopped."""

from __future__ import annotations

import argparse
import sys

from local_kafka import KAFKA_HOME_ENV, KAFKA_VERSION, LocalBroker
from local_kafka.jars import find_jars
from local_kafka.processes import announce, run_until_stopped


def _property(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"{text!r} is not name=value")
    return name, value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="local-kafka",
        description=f"Runs Apache Kafka {KAFKA_VERSION} here until Ctrl-C, and then deletes its data. Prints "
        "the address for kafka.bootstrap.servers on stdout, and nothing else there.",
    )
    parser.add_argument("--brokers", type=int, default=1, choices=(1, 3), help="how many brokers (default 1)")
    parser.add_argument(
        "--port", type=int, help="the first broker's port; others take the next ones (default: free ones)"
    )
    parser.add_argument(
        "--property",
        type=_property,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a property of the brokers, such as num.partitions=1; may be given again",
    )
    parser.add_argument(
        "--no-auto-create", action="store_true", help="do not create topics when clients use them"
    )
    parser.add_argument(
        "--kafka-home",
        metavar="FOLDER",
        help=f"an unpacked Kafka instead of the download (or {KAFKA_HOME_ENV})",
    )
    parser.add_argument("--heap", default="512m", metavar="SIZE", help="each broker's heap (default 512m)")
    parser.add_argument(
        "--download-only",
        action="store_true",
        help="download Kafka into the cache, print where it is, and exit",
    )
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Print the bootstrap address on stdout, then wait for Ctrl-C or SIGTERM."""
    args = _parser().parse_args(arguments)

    def run() -> None:
        if args.download_only:
            print(find_jars(kafka_home=args.kafka_home))
            return
        with LocalBroker(
            args.brokers,
            args.port,
            dict(args.property),
            kafka_home=args.kafka_home,
            auto_create_topics=not args.no_auto_create,
            heap=args.heap,
        ) as broker:
            announce(broker.bootstrap_servers, "Kafka is running. Ctrl-C stops it and deletes its data.")

    return run_until_stopped(run)


if __name__ == "__main__":
    sys.exit(main())
