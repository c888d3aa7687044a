"""A worker's process without rows: a task's breaker, and its way to the coordinator.

Reads JSON from stdin: first the coordinator's port, secret and cluster, then commands: {"mute": broker},
{"unmute": broker}, {"rows": sent}. Writes what is muted whenever that changes.
"""

from __future__ import annotations

import json
import select
import sys

from kafka_sink.breaker import FailureRateCircuitBreaker
from kafka_sink.breaker.manager import CircuitBreakManager
from kafka_sink.breaker.producer_breaker import ProducerBreaker
from kafka_sink.breaker.states import Evidence
from kafka_sink.clock import monotonic_ms
from kafka_sink.coordinator.breaker.channel import BreakerChannel
from kafka_sink.coordinator.client.client import CoordinatorClient
from kafka_sink.coordinator.process.relay_groups import RELAY_GROUPS
from kafka_sink.coordinator.transport.address import CoordinatorAddress, Rendezvous
from kafka_sink.model import TopicPartition
from tests.support.breaker_cluster import Cluster

PASS_S = 0.02


def main() -> None:
    told = json.loads(sys.stdin.readline())
    address = CoordinatorAddress(
        "127.0.0.1", Rendezvous(told["port"], told["cluster"], bytes.fromhex(told["secret"]))
    )
    cluster = Cluster(t=[1, 2, 3])
    manager, brokers = CircuitBreakManager(cluster, 2_000.0), cluster.brokers
    breaker = FailureRateCircuitBreaker()
    breaker.configure({})
    gate = ProducerBreaker(breaker, manager)
    exchange = BreakerChannel(lambda: None, 500.0)
    gate.share(exchange)
    client = CoordinatorClient(address, [exchange], monotonic_ms, groups=RELAY_GROUPS)
    client.start()
    client.resume()
    known: list[str] | None = None
    while True:
        gate.muted(monotonic_ms())
        for node in gate.brokers_to_probe():
            # Sent; there is nobody who would respond.
            gate.on_probe(node, monotonic_ms())
        muted = sorted(map(str, manager.local.mutes))
        if muted != known and exchange.is_current:
            known = muted
            print(json.dumps(muted), flush=True)
        if select.select([sys.stdin], [], [], PASS_S)[0]:
            line = sys.stdin.readline()
            if not line:
                return
            command = json.loads(line)
            if "mute" in command:
                manager.mute(command["mute"], "silent", Evidence(silence_ms=2_000.0))
            if "unmute" in command:
                manager.unmute(command["unmute"])
            if "rows" in command:
                now_ms, where = monotonic_ms(), TopicPartition("t", 0)
                brokers.send(1, [where], now_ms)
                gate.on_send(brokers[1], [(where, command["rows"])], now_ms)
                brokers[1].responded(now_ms)
                gate.on_complete(brokers[1], [(where, command["rows"])], None, now_ms)


if __name__ == "__main__":
    main()
