"""Where the processor time of ``write_arrow`` goes, by the shape of the rows, and what no client can avoid.

    python -m benchmarks.arrow_profile [--repeats N] [--shapes NAME,...] [--smoke]

Values of 20 and 110 bytes, 1 kB and 10 kB; without keys, with keys of 10 bytes, with two headers; 4 and 100
partitions. All have the defaults and lz4. The floor takes the blocks of the same batches: it compresses each
with the same codec, computes the CRC32C of what comes out, and copies each once. The first table has our
processor time as a multiple of the floor's, measured in turns without any instrument, and the part of it that
the kernel takes. No client avoids that part: over loopback, the kernel charges the whole transfer to the
sender. The second one has the processor time of each phase, from a run with timers. A phase does not include
the phases that it calls.
"""

from __future__ import annotations

import functools
import json
import random
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import google_crc32c
import numpy as np
import pyarrow as pa

from benchmarks import charts
from benchmarks.arrow_clients import rows_of
from benchmarks.surroundings import environment, keep, machine, parser_of
from kafka_sink.records.compression import Lz4Codec
from local_kafka import LocalBroker

# Goals: our processor time as a multiple of the floor's, for rows without keys and four partitions.
GOALS = {"110 B keyless, 4": 2.0, "1 kB keyless, 4": 1.5}
# Bytes of a value: its name, and the rows that take some tenths of a second.
SIZES = {
    20: ("20 B", 2_000_000),
    110: ("110 B", 1_000_000),
    1_000: ("1 kB", 200_000),
    10_000: ("10 kB", 20_000),
}
KINDS = ("keyless", "keyed", "headers")
PARTITIONS = (4, 100)
# Blocks of this many rows are kept for the floor, as a share of all rows.
_KEPT_SHARE = 0.4
# A topic keeps only its last bytes, so that the broker's disk does not fill.
_TOPIC = {"retention.bytes": 32 << 20, "segment.bytes": 16 << 20}


@dataclass(frozen=True)
class Shape:
    """Rows of one kind, and the number of the topic's partitions."""

    size: int
    kind: str
    partitions: int

    @property
    def name(self) -> str:
        return f"{SIZES[self.size][0]} {self.kind}, {self.partitions}"

    def table(self, rows: int) -> pa.Table:
        """Rows without their keys unless the kind is ``keyed``."""
        full = rows_of(rows, max(self.size, 110))
        columns = {"value": full["value"]}
        if self.size < 110:
            columns["value"] = pa.chunked_array([_cut(chunk, self.size) for chunk in full["value"].chunks])
        if self.kind == "keyed":
            columns["key"] = full["key"]
        if self.kind == "headers":
            columns["headers"] = pa.chunked_array([_headers(chunk) for chunk in full["key"].chunks])
        return pa.table(columns)


SHAPES = [Shape(size, kind, count) for count in PARTITIONS for kind in KINDS for size in SIZES]


def _cut(values: pa.Array, size: int) -> pa.Array:
    """The last bytes of the JSON values, which differ from row to row."""
    data = np.frombuffer(values.buffers()[2], np.uint8).reshape(len(values), -1)
    ends = np.arange(0, (len(values) + 1) * size, size, dtype=np.int32)
    part = np.ascontiguousarray(data[:, 6 : 6 + size])
    return pa.StringArray.from_buffers(len(values), pa.py_buffer(ends), pa.py_buffer(part))


def _headers(keys: pa.Array) -> pa.Array:
    """Two headers for each row: its key as a trace, and a source that is the same for all."""
    count = len(keys)
    names = pa.array(["trace", "source"] * count)
    values = pa.array([text for key in keys.to_pylist() for text in (key.encode(), b"bench")], pa.binary())
    pairs = pa.StructArray.from_arrays([names, values], ["key", "value"])
    return pa.ListArray.from_arrays(pa.array(range(0, 2 * count + 1, 2), pa.int32()), pairs)


# -- timers: processor time of each phase, by thread -------------------------------------------------


@dataclass
class Phases:
    """Nanoseconds of each thread's processor time, by phase."""

    spent: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    _inner: threading.local = field(default_factory=threading.local)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose own time is added to the phase."""

        @functools.wraps(function)
        def run(*arguments: Any, **named: Any) -> Any:
            outer = getattr(self._inner, "ns", 0)
            self._inner.ns = 0
            started = time.thread_time_ns()
            try:
                return function(*arguments, **named)
            finally:
                taken = time.thread_time_ns() - started
                self.spent[name] += taken - self._inner.ns
                self._inner.ns = outer + taken

        return run

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Times every phase within the block."""
        with ExitStack() as stack:
            for owner, attribute, name in phases():
                timed = self.timed(name, getattr(owner, attribute))
                stack.enter_context(mock.patch.object(owner, attribute, timed))
            yield


# The phases and their colours: the floor's are shades of grey.
PHASES = {
    "LZ4": "#d0d0d0",
    "CRC": "#a8a8a8",
    "records": charts.OURS,
    "partitions": charts.LIGHT,
    "tables": charts.SECOND,
    "blocks": charts.BROKER,
    "chunks": charts.THIRD,
    "task": "#7fb3a0",
    "socket": "#c97b63",
    "sender": "#e3b5a4",
    "rest": charts.SHADE,
}


def phases() -> list[tuple[Any, str, str]]:
    """The functions that are timed, each with the name of its phase."""
    from kafka_sink.arrow import columns
    from kafka_sink.arrow.producer import ArrowProducer
    from kafka_sink.cluster.partition import ProducerBatch
    from kafka_sink.engine.appender import AppendPass
    from kafka_sink.engine.sender import Sender
    from kafka_sink.memory.buffer import ChunkedBuffer
    from kafka_sink.network.transport import PlaintextTransport
    from kafka_sink.records import encoder
    from kafka_sink.rows.partitioner import Partitioner
    from kafka_sink.rows.rebatching import Rebatcher
    from kafka_sink.task import producer as task_producer

    return [
        (ArrowProducer, "send", "task"),
        (columns, "require_sound", "tables"),
        (Rebatcher, "offer", "tables"),
        (task_producer, "extract", "tables"),
        (Partitioner, "order", "partitions"),
        (AppendPass, "plan", "task"),
        (encoder, "encode", "records"),
        (ProducerBatch, "append", "blocks"),
        (ProducerBatch, "seal", "blocks"),
        (Lz4Codec, "compress_block", "LZ4"),
        (ChunkedBuffer, "write_growing", "chunks"),
        (Sender, "run_once", "sender"),
        (ProducerBatch, "write_header", "CRC"),
        (PlaintextTransport, "send", "socket"),
    ]


# -- one measurement, in a process of its own --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Profile:
    """Nanoseconds of processor time a row: ours, the floor's, by phase, and the kernel's part of ours."""

    ours_ns: float
    floor_ns: float
    phases: dict[str, float]
    kernel_ns: float


def cpu_ns() -> int:
    """The processor time of all threads of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return round((used.ru_utime + used.ru_stime) * 1e9)


def kernel_ns() -> int:
    """The kernel's part of ``cpu_ns``."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_stime * 1e9)


def measure(shape: Shape, rows: int, bootstrap: str, topic: str) -> Profile:
    """Write three times: to keep the blocks, after which everything is warm; for our time; with timers."""
    import kafka_sink

    table = shape.table(rows)
    options = {"kafka.bootstrap.servers": bootstrap, "topic": topic, "kafka.compression.type": "lz4"}
    options |= {"log.summary": "false"}
    blocks: list[bytes] = []
    compress = Lz4Codec.compress_block

    def kept(codec: Lz4Codec, raw: Any) -> Any:
        blocks.append(bytes(raw))
        return compress(codec, raw)

    first = table.slice(0, max(1, int(table.num_rows * _KEPT_SHARE)))
    with mock.patch.object(Lz4Codec, "compress_block", kept):
        kafka_sink.write_arrow(first, options)
    before, kernel_before = cpu_ns(), kernel_ns()
    kafka_sink.write_arrow(table, options)
    ours, kernel = cpu_ns() - before, kernel_ns() - kernel_before
    floor = floor_ns(blocks)
    phases = Phases()
    with phases.installed():
        before = cpu_ns()
        kafka_sink.write_arrow(table, options)
        rest = cpu_ns() - before - sum(phases.spent.values())
    spent = {name: taken / table.num_rows for name, taken in {**phases.spent, "rest": rest}.items()}
    return Profile(ours / table.num_rows, floor / first.num_rows, spent, kernel / table.num_rows)


def floor_ns(blocks: list[bytes]) -> int:
    """The processor time that compressing, summing and copying the blocks once takes alone."""
    codec = Lz4Codec(9)
    room = memoryview(bytearray(Lz4Codec.block_size))
    before = time.thread_time_ns()
    for block in blocks:
        room[: len(block)] = block
        head, body = codec.compress_block(block)
        google_crc32c.value(head)
        google_crc32c.value(bytes(body) if type(body) is not bytes else body)
    return time.thread_time_ns() - before


def run_shape(shape: Shape, rows: int, broker: LocalBroker) -> Profile:
    """Measures in a new process, on a topic that the shapes of as many partitions share."""
    command = [sys.executable, "-m", "benchmarks.arrow_profile", "--shape", shape.name, "--rows", str(rows)]
    command += ["--bootstrap", broker.bootstrap_servers, "--topic", f"profile-{shape.partitions}"]
    done = subprocess.run(command, env=environment(), check=True, stdout=subprocess.PIPE, text=True)
    return Profile(**json.loads(done.stdout.splitlines()[-1]))


def run_all(shapes: list[Shape], repeats: int, rows: int = 0) -> dict[str, Any]:
    """``rows``: of each shape; 0 for enough to measure."""
    found: dict[str, list[Profile]] = {shape.name: [] for shape in shapes}
    with LocalBroker() as broker:
        for count in {shape.partitions for shape in shapes}:
            broker.create_topic(f"profile-{count}", count, config=_TOPIC)
        for number in range(repeats):
            for shape in random.Random(number).sample(shapes, len(shapes)):
                profile = run_shape(shape, rows or SIZES[shape.size][1], broker)
                found[shape.name].append(profile)
                print(
                    f"  round {number}  {shape.name:20}{profile.ours_ns:10,.0f}{profile.floor_ns:10,.0f}"
                    f" ns a row{profile.ours_ns / profile.floor_ns:8.2f}",
                    flush=True,
                )
    rounds = "one round" if repeats == 1 else f"medians of {repeats} rounds"
    conditions = f"lz4, defaults, all rows acknowledged, {rounds}; {machine()}"
    return {
        "conditions": conditions,
        "profiles": {name: [asdict(one) for one in of] for name, of in found.items()},
    }


def medians(profiles: list[dict[str, Any]]) -> Profile:
    """Each figure's median; the ratio of two medians may differ from the median of the ratios."""
    names = {name: None for one in profiles for name in one["phases"]}
    phases = {name: statistics.median(one["phases"].get(name, 0.0) for one in profiles) for name in names}
    fields = ("ours_ns", "floor_ns", "kernel_ns")
    # Older results lack the kernel's part.
    ours, floor, kernel = (statistics.median(one.get(field, 0.0) for one in profiles) for field in fields)
    return Profile(ours, floor, phases, kernel)


def report(run: dict[str, Any]) -> None:
    """Prints each phase, and the ratios with their goals."""
    print(f"\n{run['conditions']}\n")
    print(
        f"{'nanoseconds a row':20}{'ours':>8}{'kernel':>8}{'floor':>8}{'ratio':>8}"
        + "".join(f"{name:>11}" for name in PHASES)
    )
    for name, one in found_in(run).items():
        parts = "".join(f"{one.phases.get(phase, 0.0):11,.0f}" for phase in PHASES)
        print(
            f"{name:20}{one.ours_ns:8,.0f}{one.kernel_ns:8,.0f}{one.floor_ns:8,.0f}"
            f"{one.ours_ns / one.floor_ns:8.2f}{parts}"
        )
    for name, goal in GOALS.items():
        if name in run["profiles"]:
            one = found_in(run)[name]
            print(f"{name}: {one.ours_ns / one.floor_ns:.2f} times the floor (goal {goal})")


def found_in(run: dict[str, Any]) -> dict[str, Profile]:
    """The medians of each shape."""
    return {name: medians(profiles) for name, profiles in run["profiles"].items()}


def table(run: dict[str, Any]) -> Iterator[str]:
    """The lines of the table in docs/benchmarks.md."""
    found = found_in(run)
    yield "| | " + " | ".join(label for label, _ in SIZES.values()) + " |"
    yield "|---|" + "---|" * len(SIZES)
    for partitions in PARTITIONS:
        for kind in KINDS:
            shapes = [found[Shape(size, kind, partitions).name] for size in SIZES]
            kernels = [f", kernel {one.kernel_ns:,.0f}" if one.kernel_ns else "" for one in shapes]
            cells = [
                f"{one.ours_ns / one.floor_ns:.2f} ({one.ours_ns:,.0f} ns{kernel})"
                for one, kernel in zip(shapes, kernels, strict=True)
            ]
            yield f"| {kind}, {partitions} partitions | " + " | ".join(cells) + " |"


def plot(run: dict[str, Any], file: Path) -> None:
    """Bars of phases, one for each shape, as multiples of the floor."""
    found = found_in(run)
    made, all_axes = charts.figure(
        "write_arrow: processor time as a multiple of LZ4, CRC and one copy of the same bytes",
        [run["conditions"], "by phase, from runs with timers, scaled to the runs without"],
        (11, 1.8 + 0.3 * len(found)),
    )
    axes, names = all_axes[0, 0], list(found)
    left = np.zeros(len(found))
    for phase, colour in PHASES.items():
        shares = [
            one.phases.get(phase, 0.0) / sum(one.phases.values()) * one.ours_ns / one.floor_ns
            for one in found.values()
        ]
        drawn = charts.bars(axes, names, shares, left=left, color=colour, label=phase)
        left = left + np.array(shares)
    charts.label(axes, drawn, [f"{total:.2f}" for total in left])
    axes.axvline(1.0, color=charts.ALERT, linewidth=0.8)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))
    charts.save(made, file)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shapes", help="their names, separated by semicolons; default: all")
    parser.add_argument("--shape", help="one measurement in this process")
    parser.add_argument("--rows", type=int, default=0)
    parser.add_argument("--bootstrap")
    parser.add_argument("--topic")
    options = parser.parse_args()
    known = {shape.name: shape for shape in SHAPES}
    if options.shape:
        profile = measure(known[options.shape], options.rows, options.bootstrap, options.topic)
        print(json.dumps(asdict(profile)))
        return
    if options.smoke:
        report(run_all([known["110 B headers, 100"]], 1, 1000))
        return
    shapes = [known[name.strip()] for name in options.shapes.split(";")] if options.shapes else SHAPES
    run = run_all(shapes, options.repeats, options.rows)
    report(run)
    if not options.shapes:
        keep("arrow_profile", run, plot)


if __name__ == "__main__":
    main()
