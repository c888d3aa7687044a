"""The live view's page in a real browser, while tasks write to three brokers. It makes the pictures too.

KAFKA_CHUNKED_SCREENSHOTS=1 writes the pictures to docs/images; without it, they go to a temporary folder.
"""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pytest
from selenium import webdriver

from kafka_sink.coordinator.address import PlannedCoordinator
from kafka_sink.coordinator.launcher import plan_coordinator
from kafka_sink.coordinator.live.messages import TaskIdentity, report_end
from kafka_sink.coordinator.rendezvous import address_for_driver, read_found
from kafka_sink.errors import KafkaSinkError
from kafka_sink.model import TaskResult
from kafka_sink.options import parse
from kafka_sink.reports.delivery_report import EndedWrite
from kafka_sink.reports.write_report import write_ended
from kafka_sink.rows.column_plan import ColumnPlan
from kafka_sink.task.producer_cache import task_producer
from tests.support.application import Application
from tests.support.fake_broker import FakeCluster
from tests.support.live_view_client import metrics
from tests.support.live_view_page import DRAWS, Page

DOCS = Path(__file__).parents[2] / "docs" / "images"
PLAN = ColumnPlan.of([("key", "string"), ("value", "string")], "orders")
ROWS = 2_000


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    if not DRAWS:
        return tmp_path
    DOCS.mkdir(exist_ok=True)
    return DOCS


class Job:
    """Tasks as threads, which write as Spark's would, and a driver that commits."""

    def __init__(self, brokers: FakeCluster, name: str, tasks: int, **options: str) -> None:
        raw = {"kafka.bootstrap.servers": brokers.bootstrap_servers, "topic": "orders", "ui.port": "0"}
        raw |= {key.replace("_", "."): value for key, value in options.items()}
        # Spark's tasks have processes, hence pools, of their own. Producers with different sizes do here.
        size = int(raw.pop("kafka.buffer.memory", "67108864"))
        self.raw = raw | {"kafka.buffer.memory": str(size)}
        self.size = size
        self.options = parse(self.raw).options
        self.name = name
        self.coordinator: PlannedCoordinator = plan_coordinator(self.options)
        assert self.coordinator.address is not None
        assert self.coordinator.address.has_view
        self.results: list[TaskResult] = []
        self.failures: list[Exception] = []
        self.stop = threading.Event()
        self.threads = [
            threading.Thread(target=self._run, args=(task,), daemon=True) for task in range(tasks)
        ]
        for thread in self.threads:
            thread.start()

    def _run(self, task: int) -> None:
        address = self.coordinator.address
        number = 1_000 * (1 + abs(hash(self.name)) % 1000) + task
        identity = TaskIdentity(self.name, number, task, host="worker-1", application="nightly orders")
        options = parse(self.raw | {"kafka.buffer.memory": str(self.size + task)}).options
        try:
            with task_producer(options, PLAN, address, task=identity) as producer:
                sent = 0
                while not self.stop.wait(0.08):
                    producer.send(orders(sent, keyless=task % 2 == 0))
                    sent += ROWS
                self.results.append(producer.finish())
        except KafkaSinkError as error:
            self.failures.append(error)

    def end(self, **in_transactions: int) -> int:
        """Let the tasks finish, commit, and return the rows of the summary."""
        self.stop.set()
        for thread in self.threads:
            thread.join(120)
        outcome = "aborted" if self.failures else "committed"
        ended = EndedWrite(self.name, outcome, "", None, None, self.results, in_transactions)
        driver = address_for_driver()
        assert driver is not None
        report_end(driver, write_ended(self.options, ended))
        return sum(result.records for result in self.results)


def orders(start: int, *, keyless: bool) -> pa.Table:
    numbers = range(start, start + ROWS)
    values = [
        json.dumps({"order": one, "customer": one % 997, "amount": one % 89, "state": "new"})
        for one in numbers
    ]
    keys = [None if keyless else str(one % 997) for one in numbers]
    return pa.table({"key": pa.array(keys, pa.string()), "value": values})


def url_of(folder: Path) -> str:
    found = read_found(folder / "kafka-chunked-coordinator" / "found")
    assert found is not None
    return found.view_url


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster({"orders": 6}, brokers=3) as made:
        yield made


@pytest.fixture
def application(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "blockmgr"
    folder.mkdir()
    with Application(folder):
        yield folder


def test_the_page_shows_a_job_a_frozen_broker_and_a_job_out_of_memory(
    application: Path, cluster: FakeCluster, browser: webdriver.Chrome, pictures: Path, tmp_path: Path
) -> None:
    with ExitStack() as stack:
        job = Job(cluster, "nightly", 4, kafka_compression_type="lz4", kafka_linger_ms="50")
        stack.callback(job.stop.set)
        url = url_of(application)
        page = Page(browser, url)

        # A healthy job: it updates by itself.
        page.eventually(lambda: page.rows() > 0)
        before = page.rows()
        page.eventually(lambda: page.rows() > before)
        page.eventually(lambda: len(metrics(url)["history"]) >= (20 if DRAWS else 2))
        assert "orders" in page.text("topics")
        assert "No task" not in page.text("tasks")
        page.eventually(lambda: page.text("verdict").startswith("Nothing is wrong: "))
        assert browser.title == "nightly orders · kafka-chunked"
        addresses = cluster.bootstrap_servers.split(",")
        page.eventually(lambda: all(address in page.text("brokers") for address in addresses))
        page.picture(pictures / "live-view.png")
        page.picture(tmp_path / "live-view-dark.png", dark=True)
        page.picture(tmp_path / "live-view-phone.png", 390)
        page.picture(tmp_path / "live-view-phone-dark.png", 390, dark=True)
        page.look(1200, dark=False)

        # A broker freezes: it is named with the cause, and later no more.
        cluster.freeze(1)
        stack.callback(cluster.thaw, 1)
        page.eventually(lambda: "broker 1" in page.text("mutes"))
        named = r"broker 1 [\d.]+ m?s .+ Rows wait in orders-"
        page.eventually(lambda: re.search(named, page.text("mutes").replace("\n", " ")))
        page.eventually(lambda: "muted" in page.text("brokers"))
        page.eventually(lambda: page.text("verdict").startswith("broker 1 muted for "))
        page.eventually(lambda: browser.title.startswith("broker 1 muted for "))
        page.eventually(lambda: "broker 1 muted: " in page.text("events"))
        page.settle(4)
        page.picture(pictures / "live-view-muted.png")
        cluster.thaw(1)
        page.eventually(lambda: "broker 1" not in page.text("mutes"))
        page.eventually(lambda: "broker 1 unmuted after " in page.text("events"))

        # At its end the job shows what its summary says.
        total = job.end()
        assert not job.failures
        page.eventually(lambda: "committed" in page.text("jobs"))
        page.eventually(lambda: "write nightly committed" in page.text("events"))
        page.eventually(lambda: page.rows() == total)
        (shown,) = metrics(url)["jobs"]
        assert shown["counters"]["records"] == total == sum(one["records"] for one in metrics(url)["topics"])

        # A job whose memory is used up, as no broker takes anything.
        small = {"kafka_buffer_memory": "2097152", "kafka_batch_size": "131072", "kafka_linger_ms": "5"}
        starved = Job(cluster, "backfill", 4, kafka_producer_circuit_breaker_class="none", **small)
        stack.callback(starved.stop.set)
        page.eventually(lambda: "backfill" in page.text("jobs"))
        page.eventually(lambda: starved_rows(url) > 0)
        for broker in range(3):
            cluster.freeze(broker)
            stack.callback(cluster.thaw, broker)
        page.eventually(lambda: "buffer memory" in page.text("tasks"))
        page.settle(6)
        page.eventually(lambda: re.search(r"Waited for memory\n(?!0 ms)", page.text("retries")))
        page.picture(tmp_path / "live-view-memory.png")
        for broker in range(3):
            cluster.thaw(broker)
        starved.end(committed=4, aborted=3)
        page.eventually(lambda: "Aborted\n3" in page.text("transactions"))
        page.eventually(lambda: "running" not in page.text("jobs").replace("0 running", ""))
        assert page.errors() == []


def starved_rows(url: str) -> int:
    return sum(
        int(one["counters"].get("records", 0)) for one in metrics(url)["jobs"] if one["job"] == "backfill"
    )


def test_a_page_whose_application_has_ended_says_so(
    application: Path, cluster: FakeCluster, browser: webdriver.Chrome
) -> None:
    job = Job(cluster, "short", 1)
    page = Page(browser, url_of(application))
    total = job.end()
    page.eventually(lambda: page.rows() == total)
    shutil.rmtree(application / "kafka-chunked-coordinator")
    page.eventually(lambda: page.text("status").startswith("no answer"))
    # The console does show errors: the other test relies on it.
    page.eventually(page.errors)
