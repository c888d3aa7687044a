"""Options of the sink on a command line, and the findings of its tools. Imports no third-party library."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from enum import Enum
from functools import partial

from kafka_sink.printable import one_line

# Findings quote texts of brokers, registries and processes, so their length must be limited.
_LONGEST = 10_000


def parser_of(program: str, description: str) -> argparse.ArgumentParser:
    """A parser for a tool that takes the options of a job. The description keeps its line breaks."""
    parser = argparse.ArgumentParser(
        prog=program, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--bootstrap-servers", metavar="HOST:PORT", help="as --option kafka.bootstrap.servers=HOST:PORT"
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of the job, such as kafka.security.protocol=SASL_SSL; may be given again",
    )
    parser.add_argument(
        "--options-file",
        metavar="FILE",
        help="a JSON object of options, for passwords, which a command line would show to others",
    )
    return parser


def given_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> dict[str, str]:
    """The options given with ``--options-file``, overridden by the other arguments.

    If they cannot be read, ends the program with code 2 and a line that contains no value.
    """
    options: dict[str, str] = {}
    if args.options_file:
        try:
            with open(args.options_file, encoding="utf-8") as file:
                for name, value in json.load(file).items():
                    options[name] = value if isinstance(value, str) else json.dumps(value)
        except (OSError, ValueError, AttributeError) as error:
            # The error must not quote the file, which may contain passwords.
            reason = error.strerror if isinstance(error, OSError) else "it is not a JSON object"
            parser.error(f"--options-file {args.options_file}: {reason}")
    for pair in args.option:
        name, equals, value = pair.partition("=")
        if not equals:
            parser.error("an --option lacks '=': write NAME=VALUE")
        options[name.strip()] = value
    if args.bootstrap_servers:
        options["kafka.bootstrap.servers"] = args.bootstrap_servers
    return options


class Level(Enum):
    """How serious a finding is. A PROBLEM makes a job fail."""

    OK = "ok"
    NOTE = "note"
    PROBLEM = "PROBLEM"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    level: Level
    text: str

    def __str__(self) -> str:
        return f"{self.level.value:>8}  {self.text}"


def finding(level: Level, text: str) -> Finding:
    return Finding(level, one_line(text, _LONGEST))


ok, note, problem = (partial(finding, level) for level in (Level.OK, Level.NOTE, Level.PROBLEM))
