"""One hour of a producer with 10,000 topics: what it asks for metadata, in requests and bytes.

    python -m benchmarks.metadata_simulation [--smoke]

Simulated, hence the same on every machine: the sink's own metadata cache with a clock of numbers, and the
real encoded sizes of Metadata requests and responses (version 12, three brokers, three partitions a topic,
three replicas). Steady topics are written once a minute; of mixed ones a quarter each every 30 s, 2, 8 and 40
minutes, so half of them are forgotten in between. Topics of a second are one unit; metadata.max.age.ms and
metadata.max.idle.ms are 5 minutes. Against it:

- all at each expiry: one request for all topics in use every 5 minutes, new ones asked for when they come;
- before KIP-526: a request for each new topic, and each names all topics in use (the KIP's motivation).
"""

from __future__ import annotations

import argparse
import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

from kafka.protocol.metadata import MetadataResponse

from benchmarks import charts
from benchmarks.surroundings import RESULTS
from kafka_sink.metadata.cache import MetadataCache
from kafka_sink.model import MetadataUpdate, Node, PartitionInfo, TopicMetadata
from kafka_sink.network import apis, requests

TOPICS = 10_000
SECONDS = 3600
MAX_AGE_MS = IDLE_MS = 300_000.0
# Seconds from one write to the next; a topic has the period of its number modulo their count.
WORKLOADS = {"steady": (60,), "mixed": (30, 120, 480, 2400)}
# By then every topic has been new once.
STARTED_S = 2400
PARTITIONS = 3
STEP_MS = 100.0
VERSION = 12
NODES = tuple(Node(number, "broker-0.example.org", 9092) for number in range(3))
_Broker = MetadataResponse.MetadataResponseBroker
_Topic = MetadataResponse.MetadataResponseTopic
_Partition = _Topic.MetadataResponsePartition


class Policy(Protocol):
    """When to ask for what."""

    def note_use(self, topics: Sequence[str], now_ms: float) -> None: ...

    def requests(self, now_ms: float) -> list[Sequence[str]]:
        """Sent now and answered before the next step."""


class Kip526:
    """The sink's cache."""

    def __init__(self) -> None:
        self._cache = MetadataCache(
            max_age_ms=MAX_AGE_MS,
            idle_ms=IDLE_MS,
            retry_backoff_ms=100,
            retry_backoff_max_ms=1000,
            random=lambda: 0.5,
        )

    def note_use(self, topics: Sequence[str], now_ms: float) -> None:
        self._cache.note_use(topics, now_ms)

    def requests(self, now_ms: float) -> list[Sequence[str]]:
        asked = self._cache.next_request(now_ms)
        if asked is None:
            return []
        response = MetadataUpdate(NODES, tuple(metadata(name) for name in asked))
        self._cache.on_response(response, asked, now_ms)
        return [asked]


class AllAtExpiry:
    """All topics in use every max.age; new ones when they come, ``one_by_one``: each together with all."""

    def __init__(self, *, one_by_one: bool) -> None:
        self._one_by_one = one_by_one
        self._used_ms: dict[str, float] = {}
        self._new: list[str] = []
        self._refreshed_ms = 0.0

    def note_use(self, topics: Sequence[str], now_ms: float) -> None:
        self._new += [name for name in topics if name not in self._used_ms]
        self._used_ms.update(dict.fromkeys(topics, now_ms))

    def requests(self, now_ms: float) -> list[Sequence[str]]:
        sent: list[Sequence[str]] = []
        new, self._new = self._new, []
        if new and self._one_by_one:
            names = list(self._used_ms)
            known = len(names) - len(new)
            sent += [names[: known + count + 1] for count in range(len(new))]
            self._refreshed_ms = now_ms
        elif new:
            sent.append(new)
        if now_ms - self._refreshed_ms >= MAX_AGE_MS:
            self._used_ms = {name: at for name, at in self._used_ms.items() if now_ms - at < IDLE_MS}
            self._refreshed_ms = now_ms
            sent.append(list(self._used_ms))
        return sent


@dataclass
class Outcome:
    """``sizes``: (time in s, topics, request bytes, response bytes) of each request."""

    name: str
    sizes: list[tuple[float, int, int, int]] = field(default_factory=list)

    @property
    def summary(self) -> dict[str, Any]:
        responses = [response for _, _, _, response in self.sizes]
        late = [response for at, _, _, response in self.sizes if at > STARTED_S]
        return {
            "requests": len(self.sizes),
            "request_bytes": sum(size for _, _, size, _ in self.sizes),
            "response_bytes": sum(responses),
            "largest_response": max(responses),
            "largest_response_after_the_start": max(late, default=0),
        }


def name_of(number: int) -> str:
    return f"orders.region-{number:05}"


def metadata(name: str) -> TopicMetadata:
    return TopicMetadata.of(name, b"i" * 16, tuple(PartitionInfo(name, p, p, 0) for p in range(PARTITIONS)))


def unit(second: int, topics: int, periods: Sequence[int]) -> list[str]:
    """The topics written in this second: each at its period, spread evenly."""
    count = len(periods)
    return [
        name_of(number)
        for kind, period in enumerate(periods)
        for number in range(kind + count * (second % period), topics, count * period)
    ]


class Sizes:
    """Encoded bytes by number of topics, with headers and lengths. Linear but for the arrays' lengths, which
    ``check`` holds against messages that are really encoded."""

    def __init__(self) -> None:
        self._request = encoded_request(1) - encoded_request(0)
        self._response = encoded_response(1) - encoded_response(0)
        self._bases = encoded_request(0), encoded_response(0)

    def __call__(self, topics: int) -> tuple[int, int]:
        """(request, response) in bytes."""
        # Flexible versions write an array's length plus one, as a varint.
        more = len(range(7, (topics + 1).bit_length(), 7))
        return self._bases[0] + topics * self._request + more, self._bases[1] + topics * self._response + more

    def check(self, topics: int) -> None:
        assert self(topics) == (encoded_request(topics), encoded_response(topics)), topics


def encoded_request(topics: int) -> int:
    names = tuple(map(name_of, range(topics)))
    header = requests.encode_header(apis.METADATA, VERSION, 1, "kafka-chunked")
    return 4 + len(header) + len(requests.encode_metadata(VERSION, names, True))


def encoded_response(topics: int) -> int:
    brokers = [
        _Broker(version=VERSION, node_id=node.id, host=node.host, port=node.port, rack=None) for node in NODES
    ]
    rows = []
    for number in range(topics):
        partitions = [
            _Partition(
                version=VERSION,
                error_code=0,
                partition_index=index,
                leader_id=index,
                leader_epoch=0,
                replica_nodes=[0, 1, 2],
                isr_nodes=[0, 1, 2],
                offline_replicas=[],
            )
            for index in range(PARTITIONS)
        ]
        rows.append(
            _Topic(
                version=VERSION,
                error_code=0,
                name=name_of(number),
                topic_id=uuid.UUID(int=number + 1),
                partitions=partitions,
            )
        )
    response = MetadataResponse(
        version=VERSION,
        throttle_time_ms=0,
        brokers=brokers,
        cluster_id="dGhpcyBpcyBhIGNsdXN0ZQ",
        controller_id=0,
        topics=rows,
    )
    response.with_header(correlation_id=1)
    return len(response.encode(header=True, framed=True))


def simulate(name: str, policy: Policy, topics: int, seconds: int, periods: Sequence[int]) -> Outcome:
    """Runs a policy for ``seconds``."""
    outcome, size = Outcome(name), Sizes()
    for step in range(int(seconds * 1000 / STEP_MS)):
        now_ms = step * STEP_MS
        if now_ms % 1000 == 0:
            policy.note_use(unit(int(now_ms // 1000), topics, periods), now_ms)
        for asked in policy.requests(now_ms):
            outcome.sizes.append((now_ms / 1000, len(asked), *size(len(asked))))
    return outcome


def run(topics: int = TOPICS, seconds: int = SECONDS) -> dict[str, list[Outcome]]:
    """All policies on each workload."""
    return {
        workload: [
            simulate("KIP-526, units announced (this sink)", Kip526(), topics, seconds, periods),
            simulate("all at each expiry", AllAtExpiry(one_by_one=False), topics, seconds, periods),
            simulate("before KIP-526", AllAtExpiry(one_by_one=True), topics, seconds, periods),
        ]
        for workload, periods in WORKLOADS.items()
    }


def report(outcomes: dict[str, list[Outcome]]) -> None:
    for workload, policies in outcomes.items():
        print(
            f"\n{workload:38}{'requests':>9}{'sent MB':>10}{'received MB':>13}{'largest response':>16}"
            f"{'later':>12}"
        )
        for one in policies:
            figures = one.summary
            print(
                f"{one.name:38}{figures['requests']:9,}{figures['request_bytes'] / 1e6:10,.1f}"
                f"{figures['response_bytes'] / 1e6:13,.1f}{figures['largest_response']:16,}"
                f"{figures['largest_response_after_the_start']:12,}"
            )
        ours, expiry, before = (one.summary for one in policies)
        print(
            f"ratios of this sink to all at each expiry / before KIP-526: requests "
            f"{ours['requests'] / expiry['requests']:.2f} / {ours['requests'] / before['requests']:.3f}, "
            f"bytes received {ours['response_bytes'] / expiry['response_bytes']:.2f} / "
            f"{ours['response_bytes'] / before['response_bytes']:.4f}, largest response "
            f"{ours['largest_response'] / expiry['largest_response']:.3f} / "
            f"{ours['largest_response'] / before['largest_response']:.3f}"
        )


def plot(outcomes: dict[str, list[Outcome]], conditions: str, file: Path) -> None:
    made, rows = charts.figure(
        "An hour of Metadata responses for 10,000 topics",
        [conditions],
        (11, 1.2 + 3.2 * len(outcomes)),
        len(outcomes),
        2,
        sharex=True,
    )
    for (left, right), (workload, policies) in zip(rows, outcomes.items(), strict=True):
        for one, colour in zip(policies, (charts.OURS, charts.ALERT, charts.OTHER), strict=True):
            minutes = [at / 60 for at, *_ in one.sizes]
            responses = [response for *_, response in one.sizes]
            total = [size / 1e6 for size in accumulate(responses)]
            left.plot(minutes, total, color=colour, drawstyle="steps-post", label=one.name)
            right.plot(minutes, [size / 1e3 for size in responses], ".", markersize=3, color=colour)
        left.set_ylabel("MB received so far")
        right.set_ylabel("kB of each response")
        for axes in (left, right):
            axes.set_title(f"{workload} use")
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:,g}")
            axes.grid(alpha=0.6)
    for axes in rows[-1]:
        axes.set_xlabel("minutes")
    made.legend(*rows[0, 0].get_legend_handles_labels(), loc="outside upper right", ncols=3)
    charts.save(made, file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="a few topics, no files: does it run at all")
    smoke = parser.parse_args().smoke
    topics, seconds = (200, 600) if smoke else (TOPICS, SECONDS)
    conditions = (
        f"simulated: {topics:,} topics of {PARTITIONS} partitions, {seconds:,} s, steady (each written every "
        f"60 s) and mixed (every 30, 120, 480 or 2,400 s), max.age and max.idle 300 s, Metadata v{VERSION}"
    )
    print(conditions)
    sizes = Sizes()
    for count in (0, 1, 126, 127, 128, topics):
        sizes.check(count)
    outcomes = run(topics, seconds)
    report(outcomes)
    if not smoke:
        RESULTS.mkdir(exist_ok=True)
        summaries = {load: {one.name: one.summary for one in each} for load, each in outcomes.items()}
        text = json.dumps({"conditions": conditions, "workloads": summaries}, indent=1)
        (RESULTS / "metadata_simulation.json").write_text(text + "\n")
        plot(outcomes, conditions, RESULTS / "metadata_simulation.png")


if __name__ == "__main__":
    main()
