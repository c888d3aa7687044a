"""Learns from Spark's web UI that the job of a write has ended, or its SQL execution has failed.

Spark's driver is the first to know that a job was cancelled or has failed. The executors' JVMs tell their
Python workers up to four seconds later, and the call of ``abort`` waits for a new Python process. Spark's
monitoring REST API lists the running jobs; the coordinator asks it while tasks write. Without the UI, or
where it may not be read, tasks learn of the end as before.

A SQL execution comprises the job and the driver's commit or abort. While the job is not listed, the API is
asked for the execution, which is running, completed or failed.

Most micro-batches end before the first look, and the driver reports that. So streams cost no request.

Where a write failed without a word from the driver, its transactions are ended here. Spark's interrupt, of
``query.stop()`` for one, may meet the start of the Python process for ``abort``, which then never runs; the
transactions would hold readers up until the next run, or until they time out. It is done as the driver does
it: an abort under its claim, which excludes a decision, completes what was decided, and does nothing where
another driver has taken over. With transaction protocol 1 a decision looks like that, and the next run
completes it.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import logging
import math
import os
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from kafka_sink.clock import wall_ms
from kafka_sink.driver.driver_process import DriverProcess
from kafka_sink.errors import KafkaSinkError
from kafka_sink.model import WriteTransactions

if TYPE_CHECKING:
    from kafka_sink.options import SinkOptions

_log = logging.getLogger(__name__)
# Spark's UI answers within milliseconds.
_INTERVAL_S = 0.3
# At the first request Spark loads its REST server, which takes a busy driver many seconds.
_TIMEOUT_S = 60.0
# After an error, or without a UI, the next look comes later.
_PAUSE_S = 10.0
# A stage whose job is not listed for so long is not watched any more.
_UNSEEN_MS = 60_000.0
# A SQL execution that goes on for so long without its job, or that Spark does not know, is not watched any
# more.
_UNENDED_MS = 60_000.0
_MAX_BYTES = 16 * 1024 * 1024
_API = "/api/v1/applications"
# Of Spark's ExecutionData.
_COMPLETED, _FAILED = "COMPLETED", "FAILED"


class JobWatch(Protocol):
    """Reports the end of the jobs that stages belong to. Any thread."""

    def watch(self, stage: int, on_end: Callable[[int], None]) -> None:
        """Call ``on_end(stage)``, on another thread, once the stage's job has ended."""

    def watch_execution(self, stage: int, execution: int, on_failure: Callable[[int], None]) -> None:
        """Call ``on_failure(stage)``, on another thread, once the SQL execution has failed.

        By then neither its tasks nor its commit do anything more.
        """

    def unwatch(self, stage: int) -> None:
        """The stage's write is over, and its tasks know. Its execution is not watched either."""


@dataclass(slots=True)
class _Execution:
    """``since_ms``: when it was first watched. ``jobless_ms``: since when its job is not listed."""

    number: int
    on_failure: Callable[[int], None]
    since_ms: float
    jobless_ms: float = math.inf


class StageTracker:
    """Which of the watched stages have lost their job, and which executions have failed. Pure; times are
    monotonic milliseconds.

    A job has ended once it was listed as running and is not listed any more: Spark keeps running jobs in the
    list, whatever else it removes. A job that was never listed says nothing.
    """

    def __init__(self) -> None:
        # By watched stage, when it was first watched, and its job once that is known.
        self._since_ms: dict[int, float] = {}
        self._jobs: dict[int, int] = {}
        self._on_end: dict[int, list[Callable[[int], None]]] = {}
        self._executions: dict[int, _Execution] = {}

    @property
    def stages(self) -> Set[int]:
        """Those of which something is watched."""
        return self._since_ms.keys() | self._executions.keys()

    def watch(self, stage: int, on_end: Callable[[int], None], now_ms: float) -> None:
        """Tasks of this stage write."""
        self._since_ms.setdefault(stage, now_ms)
        listeners = self._on_end.setdefault(stage, [])
        if on_end not in listeners:
            listeners.append(on_end)

    def watch_execution(
        self, stage: int, execution: int, on_failure: Callable[[int], None], now_ms: float
    ) -> None:
        """The stage's write belongs to this SQL execution."""
        self._executions[stage] = _Execution(execution, on_failure, now_ms)

    def unwatch(self, stage: int) -> None:
        """Forget a stage, whose write is over."""
        self._executions.pop(stage, None)
        self._unwatch_job(stage)

    def _unwatch_job(self, stage: int) -> None:
        for kept in (self._since_ms, self._jobs, self._on_end):
            kept.pop(stage, None)

    def watched_for_ms(self, now_ms: float) -> float:
        """For how long the oldest is watched; negative infinity if nothing is."""
        oldest_ms = [*self._since_ms.values(), *(one.since_ms for one in self._executions.values())]
        return now_ms - min(oldest_ms, default=math.inf)

    def executions_to_ask_for(self, running: Mapping[int, Collection[int]]) -> dict[int, int]:
        """By stage, the executions whose jobs are not among the running ones."""
        with_job = {stage for stages in running.values() for stage in stages}
        return {stage: one.number for stage, one in self._executions.items() if stage not in with_job}

    def observe(
        self, running: Mapping[int, Collection[int]], statuses: Mapping[int, str], now_ms: float
    ) -> list[tuple[Callable[[int], None], int]]:
        """The running jobs with their stages have been listed, and then these statuses were found, by stage.
        Returns what to call, each with its stage."""
        for job, stages in running.items():
            for stage in self._since_ms.keys() & set(stages):
                self._jobs[stage] = job
        ended = [stage for stage, job in self._jobs.items() if job not in running]
        unseen = [
            stage
            for stage, since_ms in self._since_ms.items()
            if stage not in self._jobs and now_ms - since_ms > _UNSEEN_MS
        ]
        calls = [(on_end, stage) for stage in ended for on_end in self._on_end[stage]]
        for stage in (*ended, *unseen):
            self._unwatch_job(stage)
        return calls + self._observe_executions(statuses, now_ms)

    def _observe_executions(
        self, statuses: Mapping[int, str], now_ms: float
    ) -> list[tuple[Callable[[int], None], int]]:
        calls = []
        # Those that are not watched any more are over.
        for stage, one in list(self._executions.items()):
            if stage not in statuses:
                one.jobless_ms = math.inf
                continue
            one.jobless_ms = min(one.jobless_ms, now_ms)
            status = statuses[stage]
            if status == _FAILED:
                calls.append((one.on_failure, stage))
            if status in (_FAILED, _COMPLETED) or now_ms - one.jobless_ms > _UNENDED_MS:
                del self._executions[stage]
        return calls


class SparkUi:
    """What Spark's monitoring REST API says of the one application that it knows. One thread's.

    ``find`` returns the UI's address and port, or None if there is none: see ``find_ui``. The methods raise
    OSError, HTTPException, ValueError, LookupError or TypeError where the UI does not say it.
    """

    def __init__(self, find: Callable[[], tuple[str, int] | None]) -> None:
        self._find = find
        self._connection: http.client.HTTPConnection | None = None
        # The application's, in the API.
        self._path = ""

    def running(self) -> dict[int, list[int]]:
        """The running jobs with their stages."""
        if self._connection is None:
            address = self._find()
            if address is None:
                raise LookupError("the driver has no UI")
            self._connection = http.client.HTTPConnection(*address, timeout=_TIMEOUT_S)
            (application,) = self._get(_API)
            self._path = f"{_API}/{application['id']}"
        running = self._get(f"{self._path}/jobs?status=running")
        return {int(job["jobId"]): list(map(int, job["stageIds"])) for job in running}

    def status(self, execution: int) -> str:
        """A SQL execution's status; "" where Spark does not know it any more or, being busy, not yet."""
        path = f"{self._path}/sql/{execution}?details=false&planDescription=false"
        found = self._get(path, missing={})
        return str(found.get("status", ""))

    def _get(self, path: str, missing: Any = None) -> Any:
        """``missing``: returned if there is nothing at the path, unless it is None."""
        assert self._connection is not None
        self._connection.request("GET", path, headers={"Accept": "application/json"})
        response = self._connection.getresponse()
        body = response.read(_MAX_BYTES)
        if response.status == http.client.NOT_FOUND and missing is not None:
            return missing
        if response.status != http.client.OK:
            raise LookupError(f"status {response.status}")
        return json.loads(body)

    def disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class RunningJobs:
    """A JobWatch. A daemon thread asks the UI that ``find`` finds, and only while stages are watched."""

    def __init__(
        self,
        find: Callable[[], tuple[str, int] | None],
        clock_ms: Callable[[], float],
        *,
        interval_s: float = _INTERVAL_S,
    ) -> None:
        self._clock_ms = clock_ms
        self._interval_s = interval_s
        self._changed = threading.Condition()  # guards the next two
        self._tracker = StageTracker()
        self._is_closing = False
        self._thread: threading.Thread | None = None
        # The thread's own.
        self._ui = SparkUi(find)

    def watch(self, stage: int, on_end: Callable[[int], None]) -> None:
        with self._changed:
            self._tracker.watch(stage, on_end, self._clock_ms())
            self._begin_work()

    def watch_execution(self, stage: int, execution: int, on_failure: Callable[[int], None]) -> None:
        with self._changed:
            self._tracker.watch_execution(stage, execution, on_failure, self._clock_ms())
            self._begin_work()

    def _begin_work(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kafka-chunked-jobs", daemon=True)
            self._thread.start()
        self._changed.notify()

    def unwatch(self, stage: int) -> None:
        with self._changed:
            self._tracker.unwatch(stage)

    def close(self) -> None:
        """Ask the thread to end."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()

    def _run(self) -> None:
        pause_s = self._interval_s
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or self._tracker.stages)
                if self._changed.wait_for(lambda: self._is_closing, pause_s):
                    break
                watched_ms = self._tracker.watched_for_ms(self._clock_ms())
            pause_s = self._interval_s
            if watched_ms < self._interval_s * 1000:
                continue
            try:
                self._look()
            except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
                _log.debug("Spark's UI does not list the running jobs: %r", error)
                self._ui.disconnect()
                pause_s = _PAUSE_S
        self._ui.disconnect()

    def _look(self) -> None:
        running = self._ui.running()
        with self._changed:
            asked = self._tracker.executions_to_ask_for(running)
        statuses = {stage: self._ui.status(execution) for stage, execution in asked.items()}
        with self._changed:
            calls = self._tracker.observe(running, statuses, self._clock_ms())
        for call, stage in calls:
            call(stage)


_DEFAULT_PORT = 4040
# Spark tries the next ports where one is taken: spark.port.maxRetries.
_TRIED_PORTS = 17
_LISTENING = "0A"
_PORT = re.compile(r"spark\.ui\.port=(\d+)")


def find_ui(driver: DriverProcess) -> tuple[str, int] | None:
    """The UI's address and port. None if the driver has no UI, or one at a random port.

    No other port of the driver is tried: Spark logs an error for HTTP at its other ports.
    """
    arguments = driver.arguments()
    if any("spark.ui.enabled=false" in one for one in arguments):
        return None
    first = first_port(arguments)
    found = [one for one in _listening(driver.pid) if first and first <= one[1] < first + _TRIED_PORTS]
    return min(found, key=lambda one: one[1], default=None)


def first_port(arguments: Iterable[str]) -> int:
    """The port that Spark tries first, by the JVM's command line."""
    given = [match.group(1) for match in map(_PORT.search, arguments) if match]
    return int(given[-1]) if given else _DEFAULT_PORT


def _listening(pid: int) -> Iterator[tuple[str, int]]:
    inodes = set()
    with suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                inodes.add(os.readlink(entry.path))
    for table in ("tcp", "tcp6"):
        with suppress(OSError), open(f"/proc/{pid}/net/{table}", encoding="ascii") as file:
            for fields in map(str.split, file):
                if len(fields) > 9 and fields[3] == _LISTENING and f"socket:[{fields[9]}]" in inodes:
                    yield listening_address(fields[1])


def listening_address(text: str) -> tuple[str, int]:
    """An address and port of /proc/net/tcp or tcp6; the loopback address for all interfaces."""
    packed, _, port = text.partition(":")
    # The kernel writes words of 32 bits in the byte order of the host, which is little-endian wherever
    # PyArrow runs.
    words = [packed[at : at + 8] for at in range(0, len(packed), 8)]
    address = ipaddress.ip_address(b"".join(bytes.fromhex(word)[::-1] for word in words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    if mapped is not None:
        address = mapped
    if address.is_unspecified:
        # Not a name: a driver that listens on IPv4 only leaves ::1, to which names lead first, to anybody.
        # Java's sockets for all IPv6 interfaces take IPv4, too, and nobody else can have that port then.
        return "127.0.0.1", int(port, 16)
    return str(address), int(port, 16)


class UnfinishedWrites:
    """Of one cluster. Each write takes ``max.block.ms`` at most, as on the driver."""

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        self._one_at_a_time = threading.Lock()

    def end(self, transactions: WriteTransactions) -> None:
        """Return at once: a thread ends them, and logs what became of them."""
        thread = threading.Thread(
            target=self._end, args=(transactions,), name="kafka-chunked-unfinished", daemon=True
        )
        thread.start()

    def _end(self, given: WriteTransactions) -> None:
        # Imported here because few applications get here.
        from kafka_sink.transactions import driver
        from kafka_sink.transactions.client import TransactionClient
        from kafka_sink.transactions.operations import ProducerEpoch
        from kafka_sink.transactions.scope import Scope

        scope = Scope(given.prefix, given.topic, given.partitions)
        steps = driver.abort(scope, ProducerEpoch(given.producer_id, given.epoch), wall_ms())
        try:
            with self._one_at_a_time, closing(TransactionClient(self._options)) as client:
                ownership = client.run(steps, self._options.max_block_ms)
        except KafkaSinkError as error:
            became = (
                f"they could not be aborted: {error}. The next run aborts them, or brokers do so after "
                "kafka.transaction.timeout.ms"
            )
        else:
            if ownership is None:
                became = (
                    "they are left to the next run, as another driver has taken over or the batch is decided"
                )
            else:
                became = f"{len(ownership.aborted)} aborted"
                if ownership.completed:
                    became += f", {len(ownership.completed)} committed, as the batch was decided"
        _log.warning(
            "a write with transactional.id.prefix '%s' failed, and its driver did not say that it ends the "
            "transactions: %s",
            given.prefix,
            became,
        )
