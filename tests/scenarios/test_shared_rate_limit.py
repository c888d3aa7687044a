"""The rate limit that two tasks share, all the way through a coordinator."""

from __future__ import annotations

import threading
import time

import pyarrow as pa

from kafka_sink.clock import TaskActivity
from kafka_sink.coordinator.client import CoordinatorClient
from kafka_sink.coordinator.rates import RateChannel, RateService
from kafka_sink.errors import DeliveryError
from kafka_sink.task.rate_limit import RateLimit
from tests.support.coordinator_harness import HELLO, clock_ms, serving
from tests.support.waiting import until

TABLE = pa.table({"value": [b"0123456789"] * 1000})


def test_tasks_share_a_limit_and_go_on_alone_when_the_coordinator_is_lost() -> None:
    done = threading.Event()
    counts = [0, 0]

    def write(number: int, limit: RateLimit) -> None:
        def check() -> None:
            if done.is_set():
                raise DeliveryError("over")

        try:
            while True:
                for one in limit.slices(TABLE, check):
                    counts[number] += one.num_rows
        except DeliveryError:
            pass

    with serving(services={RateService: RateService}) as server:
        clients, threads, begun = [], [], time.monotonic()
        for number in range(2):
            channel = RateChannel()
            client = CoordinatorClient(server.address, [channel], lambda: HELLO, clock_ms)
            limit = RateLimit({"rows": 2000}, TaskActivity(clock_ms), clock_ms)
            limit.begin("job", 2, channel)
            client.start()
            client.resume()
            clients.append(client)
            threads.append(threading.Thread(target=write, args=(number, limit), daemon=True))
            threads[-1].start()
        # With a third of these rows, the half second below hid a rate that was half as high again.
        until(lambda: min(counts) > 3_000, lambda: counts)
        sent = sum(counts)
        # A grant may go into debt, and a job may catch up on some rows after a pause.
        assert sent < 2_000 * (time.monotonic() - begun + 0.5)
    alone = sum(counts)
    until(lambda: sum(counts) > alone + 500)
    done.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    for client in clients:
        client.close()
