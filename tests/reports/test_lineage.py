"""OpenLineage events, to a backend over HTTP through OpenLineage's own client."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from queue import Queue
from typing import Any

import pytest

from kafka_sink.coordinator.process.planning import PlannedCoordinator
from kafka_sink.errors import ConfigurationError
from kafka_sink.model import EndedTransactions, PartitionResult, TaskResult
from kafka_sink.options import SinkOptions, parse
from kafka_sink.reports import lineage, write_reports
from kafka_sink.reports.delivery_report import EndedWrite

pytest.importorskip("openlineage.client")


class Backend:
    """Keeps the events that it gets. ``status`` None: it never responds."""

    def __init__(self) -> None:
        self.events: Queue[dict[str, Any]] = Queue()
        self.status: int | None = 201
        self.requests = 0
        self.released = threading.Event()
        backend = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                backend.requests += 1
                if backend.status is None:
                    backend.released.wait(30)
                    return
                backend.events.put(json.loads(body))
                self.send_response(backend.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self.thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.server_port}"

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    one = Backend()
    monkeypatch.setenv("OPENLINEAGE_CONFIG", "/nonexistent")
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__TYPE", "http")
    monkeypatch.setenv("OPENLINEAGE__TRANSPORT__URL", f"http://reader:s3cret@{one.address}")
    try:
        yield one
    finally:
        one.close()


@pytest.fixture
def application(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(tmp_path))


def options(**more: str) -> SinkOptions:
    given = {"kafka.bootstrap.servers": "kafka-1:9092,kafka-2:9092", "topic": "t", "log.summary": "false"}
    given |= {"openlineage.job.name": "orders.to_kafka", "openlineage.job.namespace": "shop"}
    return parse({**given, **{name.replace("_", "."): value for name, value in more.items()}}).options


def ended(outcome: str = "committed", batch: int | None = None) -> EndedWrite:
    first = PartitionResult("t", 0, 10, 1, 100, ((0, 9),), raw_bytes=200)
    second = PartitionResult("t", 1, 5, 1, 50, ((7, 11),), raw_bytes=90)
    letters = PartitionResult("letters", 0, 1, 1, 30, ((3, 3),), raw_bytes=40)
    results = [TaskResult(partitions=(first, letters)), TaskResult(partitions=(second,))]
    in_transactions = {"aborted": EndedTransactions(1)} if outcome == "aborted" else {}
    return EndedWrite("w", outcome, "", batch, 2, results, in_transactions)


def report(write: EndedWrite, **more: str) -> None:
    write_reports.report(options(**more), PlannedCoordinator(), write)


def test_a_commit_sends_datasets_statistics_and_offsets(backend: Backend) -> None:
    report(ended())
    event = backend.events.get(timeout=10)
    assert event["eventType"] == "COMPLETE"
    assert (event["job"]["namespace"], event["job"]["name"]) == ("shop", "orders.to_kafka")
    by_name = {one["name"]: one for one in event["outputs"]}
    assert {one["namespace"] for one in event["outputs"]} == {"kafka://kafka-1:9092"}
    facets = by_name["t"]["outputFacets"]
    # DataHub and Marquez read these two.
    assert (facets["outputStatistics"]["rowCount"], facets["outputStatistics"]["size"]) == (15, 150)
    partitions = facets["kafkaChunked_delivery"]["partitions"]
    assert [(one["partition"], one["offsets"], one["endOffset"]) for one in partitions] == [
        (0, [[0, 9]], 10),
        (1, [[7, 11]], 12),
    ]
    assert by_name["letters"]["outputFacets"]["outputStatistics"]["rowCount"] == 1


def test_catalogues_find_what_they_require(backend: Backend) -> None:
    """Marquez's LineageEvent refuses null in these fields, older versions of DataHub know no other engine."""
    report(ended(batch=3))
    event = backend.events.get(timeout=10)
    assert all(event[name] for name in ("eventTime", "producer", "schemaURL"))
    engine = event["run"]["facets"]["processing_engine"]
    kind = event["job"]["facets"]["jobType"]
    assert engine["name"] in ("spark", "python")
    assert engine["version"]
    assert (kind["processingType"], kind["integration"], kind["jobType"]) == (
        "STREAMING",
        engine["name"].upper(),
        "JOB",
    )
    every = [engine, kind, *(facet for one in event["outputs"] for facet in one["outputFacets"].values())]
    assert all(facet["_producer"] and facet["_schemaURL"] for facet in every)


def test_an_aborted_write_is_a_failed_run_without_statistics(backend: Backend) -> None:
    report(ended("aborted"))
    event = backend.events.get(timeout=10)
    assert event["eventType"] == "FAIL"
    assert all("outputStatistics" not in one["outputFacets"] for one in event["outputs"])


def test_a_write_that_was_skipped_and_one_without_a_job_send_nothing(backend: Backend) -> None:
    report(ended("skipped"))
    report(ended(), openlineage_job_name="")
    assert backend.requests == 0


@pytest.mark.usefixtures("application")
def test_a_silent_backend_delays_the_end_by_the_bound_and_only_once(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.status = None
    started = time.monotonic()
    with caplog.at_level(logging.WARNING):
        report(ended(batch=1), openlineage_timeout_ms="300")
        report(ended(batch=2), openlineage_timeout_ms="30000")
    assert time.monotonic() - started < 10
    late, paused = (record.getMessage() for record in caplog.records if "micro-batch" in record.getMessage())
    assert late == (
        "kafka-chunked, micro-batch 1: the write is committed, but its OpenLineage event was not sent: "
        "it took longer than openlineage.timeout.ms=300"
    )
    assert "micro-batch 2: no OpenLineage event, as one failed" in paused
    assert backend.requests == 1


def test_a_refused_event_fails_nothing_and_shows_no_login(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    backend.status = 401
    with caplog.at_level(logging.WARNING):
        report(ended())
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert "was not sent: HTTPError: 401" in text
    assert "s3cret" not in text


def test_a_client_without_a_transport_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        report(ended())
    assert "no transport is configured: set OPENLINEAGE_URL" in caplog.text


def test_planning_fails_where_the_client_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "find_spec", lambda _: None)
    with pytest.raises(ConfigurationError, match=r"openlineage\.job\.name.*pip install openlineage-python"):
        lineage.check()
