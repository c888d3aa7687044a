"""The messages of the live view: reports of tasks and of the driver about a write, and a task's side of them.

A task reports about once a second. Its counts are totals since the task began, so a lost report does no harm.
The driver reports a write's sums when it commits or aborts. They replace the tasks' sums.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import islice
from typing import Annotated, ClassVar, NamedTuple

from msgspec import Meta, field
from msgspec.structs import replace

from kafka_sink import spark_application
from kafka_sink.clock import RANDOM, STATES, STEPS, WAIT_LISTENER, WAIT_LOGGED_MS, Clock, monotonic_ms
from kafka_sink.coordinator.address import CoordinatorAddress
from kafka_sink.coordinator.client import tell
from kafka_sink.coordinator.schema import (
    Channel,
    Count,
    Int64,
    Message,
    Ms,
    Name,
    NodeId,
    ServiceScope,
    Structure,
    Text,
    Topic,
    cut,
    receives,
)
from kafka_sink.counts import TopicMetrics
from kafka_sink.driver import driver_log
from kafka_sink.errors import KafkaSinkError
from kafka_sink.options import SinkOptions
from kafka_sink.printable import printable

# A task reports at most this many topics, brokers and mutes. Rows of its further topics count without a name.
MAX_TOPICS, MAX_BROKERS, MAX_MUTES = 100, 200, 20
# The partitions of a mute, dead letters by topic and reason, and a job's options in a report.
MAX_PARTITIONS, MAX_DEAD_LETTERS, _MAX_OPTIONS = 5, 20, 60
# The driver's report contains all topics of a write, if there are no more than this.
MAX_ALL_TOPICS = 5_000
_MAX_BUCKETS, _MAX_NAMES, _MAX_OUTCOMES = 32, 60, 8
# How a write may end, and the most characters of the cause of an abort.
OUTCOMES = ("committed", "aborted")
MAX_CAUSE = 1000

MIN_INTERVAL_MS = 1000.0
# A task that ends before this time sends only its last report.
_FIRST_MS = 300.0
# How many last reports may wait to be sent.
_MAX_ENDED = 16
# The time for connecting and for the answer. The coordinator mostly responds within milliseconds, but takes
# seconds on a busy host. Without this report the live view would show the job as running.
_DRIVER_TIMEOUT_MS = 5000.0
# For a while after the coordinator did not respond, the shorter timeout applies, and the driver's waits are
# not reported: a frozen coordinator must not delay micro-batches or the handling of brokers' responses.
_SILENT = "the coordinator did not confirm what the driver said"
_SILENT_S, _SHORT_TIMEOUT_MS = 60.0, 500.0
_WAIT_UNREPORTED_S = 10.0
# How long the driver has waited when it reports the wait.
_WAIT_REPORTED_MS = 1000.0

Counts = Annotated[dict[Name, Count | Ms], Meta(max_length=_MAX_NAMES)]
# The counts in the order of TopicMetrics.
TopicCounts = Annotated[tuple[Count, ...], Meta(max_length=len(TopicMetrics._fields))]
_State = Annotated[str, Meta(max_length=20, pattern=rf"^({'|'.join(STATES)})\Z")]
_Step = Annotated[str, Meta(max_length=20, pattern=rf"^({'|'.join(STEPS)})\Z")]
_Outcome = Annotated[str, Meta(max_length=20, pattern=rf"^({'|'.join(OUTCOMES)})\Z")]


class AboutJob(Structure, frozen=True):
    """A job, as its task for partition 0 describes it.

    ``options``: the options that differ from their defaults, without secrets.
    """

    name: Text = ""
    options: Annotated[dict[Text, Text], Meta(max_length=_MAX_OPTIONS)] = field(default_factory=dict)


def about_job(name: str, options: Mapping[str, str]) -> AboutJob:
    """The description of a job, cut to the bounds of a message."""
    shown = islice(options.items(), _MAX_OPTIONS)
    return AboutJob(cut(name), {cut(option): cut(value) for option, value in shown})


class TaskIdentity(Structure, frozen=True):
    """The attempt that writes. ``task``: Spark's taskAttemptId, which is unique in an application.

    ``write`` is the name of the Spark write. ``query`` and ``batch`` identify the micro-batch, if there is
    one. ``partition`` is the task's number in the write, or -1 outside Spark's tasks.
    """

    write: Name
    task: Count
    partition: Count = 0
    attempt: Count = 0
    host: Text = ""
    query: Text = ""
    batch: Int64 = -1
    application: Text = ""
    about: AboutJob | None = None

    @property
    def job(self) -> str:
        """The key of the job: the query with all its micro-batches, or otherwise the write."""
        return self.query or self.write


class MuteReport(Structure, frozen=True):
    """A muted broker's id or partition's name, the reason, and the duration.

    ``rows``: how many of the task's rows wait for it. ``named``: some of their partitions. ``left_ms``: the
    time until the first of these rows reach delivery.timeout.ms, or None if no row waits.
    """

    target: Text
    reason: Text
    age_ms: Ms
    rows: Count = 0
    left_ms: Ms | None = None
    named: Annotated[tuple[Text, ...], Meta(max_length=MAX_PARTITIONS)] = ()


class BrokerReport(NamedTuple):
    """One task's Produce requests to one broker. Times are milliseconds.

    ``address``: host and port. ``latency_buckets``: the numbers of responses by LATENCY_BOUNDS_MS, not
    cumulated. ``oldest_ms``: how long rows have waited without any response, even if none is in flight.
    """

    address: Text = ""
    requests: Count = 0
    failures: Count = 0
    in_flight: Count = 0
    latency_ms: Ms = 0.0
    latency_buckets: Annotated[tuple[Count, ...], Meta(max_length=_MAX_BUCKETS)] = ()
    throttle_ms: Ms = 0.0
    oldest_ms: Ms = 0.0


class DeadLetterCount(NamedTuple):
    """Rows of a topic that went to the dead letter topic, or were dropped, for one reason."""

    topic: Topic
    reason: Text
    rows: Count


class TaskReport(Message, frozen=True):
    """A task's report.

    ``cluster``: the result of ``cluster_name``. ``state`` was entered ``state_ms`` ago. ``transaction_ms``:
    the time since the task's transaction was begun, or None without a transaction.
    """

    cluster: Text
    identity: TaskIdentity
    elapsed_ms: Ms = 0.0
    state: _State = STATES[0]
    state_ms: Ms = 0.0
    counters: Counts = field(default_factory=dict)
    gauges: Counts = field(default_factory=dict)
    topics: Annotated[dict[Topic, TopicCounts], Meta(max_length=MAX_TOPICS)] = field(default_factory=dict)
    brokers: Annotated[dict[NodeId, BrokerReport], Meta(max_length=MAX_BROKERS)] = field(default_factory=dict)
    mutes: Annotated[tuple[MuteReport, ...], Meta(max_length=MAX_MUTES)] = ()
    dead_letters: Annotated[tuple[DeadLetterCount, ...], Meta(max_length=MAX_DEAD_LETTERS)] = ()
    transaction_ms: Ms | None = None
    done: bool = False
    failed: bool = False


class WriteEnded(Message, frozen=True):
    """A write's sums, the same that its summary contains.

    ``topics``: all topics of the write, or none if there are too many. ``transactions``: how many of the
    write's transactions the driver has ended, by outcome. ``last_task``: the highest number of its tasks, or
    -1 if it is unknown; tasks with higher numbers belong to another run of the micro-batch. ``cause``: why it
    was aborted.
    """

    is_of_driver: ClassVar[bool] = True

    cluster: Text
    write: Name
    outcome: _Outcome
    query: Text = ""
    batch: Int64 = -1
    tasks: Count = 0
    counters: Counts = field(default_factory=dict)
    topics: Annotated[dict[Topic, TopicCounts], Meta(max_length=MAX_ALL_TOPICS)] = field(default_factory=dict)
    transactions: Annotated[dict[Name, Count], Meta(max_length=_MAX_OUTCOMES)] = field(default_factory=dict)
    last_task: Int64 = -1
    cause: Annotated[str, Meta(max_length=MAX_CAUSE)] = ""


class DriverWaits(Message, frozen=True):
    """From the driver, about once a second while it waits. ``awaited`` is "" when the wait has ended.

    ``write``: the write's name without the micro-batch, or a query's id. ``left_ms``: the time until the wait
    fails. ``cause``: why the step has failed.
    """

    is_of_driver: ClassVar[bool] = True

    cluster: Text
    write: Name
    step: _Step
    awaited: Text = ""
    age_ms: Ms = 0.0
    left_ms: Ms = 0.0
    cause: Annotated[str, Meta(max_length=MAX_CAUSE)] = ""


class ReportEvery(Message, frozen=True):
    """To a task: report at this interval."""

    interval_ms: Annotated[float, Meta(ge=1_000, le=60_000)]


class OpenView(Message, frozen=True):
    """From planning: serve the live view at this address (ui.bind.address) and port (ui.port)."""

    is_of_driver: ClassVar[bool] = True

    address: Text
    port: Annotated[int, Meta(ge=0, le=65_535)]


class ViewOpened(Message, frozen=True):
    """The live view's address. If it could not be opened, ``url`` is "" and ``error`` contains the reason."""

    url: Text = ""
    port: Annotated[int, Meta(ge=0, le=65_535)] = 0
    error: Text = ""


def cluster_name(options: SinkOptions) -> str:
    """The name of a cluster in the live view: its bootstrap addresses."""
    return cut(",".join(f"{host}:{port}" for host, port in options.bootstrap_servers))


class ReportChannel(Channel):
    """Sends the reports of the present task. ``read`` makes a report; any thread may call it."""

    scope = ServiceScope.APPLICATION

    def __init__(
        self,
        read: Callable[[TaskIdentity], TaskReport],
        clock_ms: Clock,
        interval_ms: float = MIN_INTERVAL_MS,
    ) -> None:
        super().__init__()
        self._read = read
        self._clock_ms = clock_ms
        self._interval_ms = interval_ms
        # Guards changes of all attributes below. The task's thread and the client's thread change them.
        # Without it, a report that is just being made could be sent after the task's last one.
        self._lock = threading.Lock()
        # The task that runs. None between tasks.
        self.identity: TaskIdentity | None = None
        # When the present task reports next, and when a task of this worker last reported.
        self._due_ms = self._reported_ms = -math.inf
        self._has_reported = False
        self._ended: deque[TaskReport] = deque(maxlen=_MAX_ENDED)

    def begin(self, identity: TaskIdentity) -> None:
        """A task starts. It reports soon, so that the live view shows it, unless it ends before."""
        # Spark's names may be longer than a message allows.
        host, application = cut(identity.host), cut(identity.application)
        identity = replace(identity, host=host, application=application)
        with self._lock:
            self.identity, self._has_reported = identity, False
            self._due_ms = max(self._due_ms, self._clock_ms() + _FIRST_MS)
        self.wake()

    def end(self, last: TaskReport) -> None:
        """The task has ended; ``last`` contains all its totals.

        If tasks are short, one of them reports in each interval. The driver's sums contain the rest.
        """
        with self._lock:
            if self.identity is None:
                return
            self.identity, now_ms = None, self._clock_ms()
            if self._has_reported or last.failed or now_ms >= self._reported_ms + self._interval_ms:
                self._ended.append(last)
                self._reported_ms = now_ms
        self.wake()

    def next_message(self, now_ms: float) -> TaskReport | None:
        with self._lock:
            if self._ended:
                return self._ended.popleft()
            identity = self.identity
            if identity is None or now_ms < self._due_ms:
                return None
            self._reported_ms, self._has_reported = now_ms, True
            self._due_ms = now_ms + self._interval_ms
        # ``read`` takes locks of the producer, so it is called without this lock.
        report = self._read(identity)
        with self._lock:
            return report if self.identity is identity else None

    def next_message_delay_ms(self, now_ms: float) -> float:
        with self._lock:
            due_ms = math.inf if self.identity is None else self._due_ms - now_ms
            return 0.0 if self._ended else max(0.0, due_ms)

    @receives(ReportEvery)
    def on_report_every(self, message: ReportEvery, now_ms: float) -> None:
        """Report at this interval from the next report on."""
        with self._lock:
            self._due_ms += message.interval_ms - self._interval_ms
            self._interval_ms = message.interval_ms

    def on_connected(self, now_ms: float) -> None:
        """A new coordinator has no reports, and thousands of tasks may connect at the same time."""
        with self._lock:
            if self._has_reported:
                self._due_ms = now_ms + RANDOM.random() * self._interval_ms


def report_end(address: CoordinatorAddress, ended: WriteEnded) -> None:
    """Report the end of a write, and wait for the confirmation. The driver calls it. Raises nothing."""
    was_silent = spark_application.happened_within(_SILENT, _SILENT_S)
    _tell_or_remember(address, ended, _SHORT_TIMEOUT_MS if was_silent else _DRIVER_TIMEOUT_MS)


def _tell_or_remember(address: CoordinatorAddress, message: Message, timeout_ms: float) -> None:
    try:
        tell(address, message, timeout_ms)
    except (TimeoutError, KafkaSinkError):
        spark_application.note(_SILENT)
    except OSError:
        pass  # another coordinator may be there soon


class DriverWaiting:
    """Within the block, this thread's waits are logged, and reported to the coordinator from ``find``.

    ``write`` and ``step``: see ``DriverWaits``. ``label``: the write's name in the log.
    """

    def __init__(
        self,
        options: SinkOptions,
        write: str,
        step: str,
        label: str,
        find: Callable[[], CoordinatorAddress | None] = lambda: None,
        clock_ms: Clock = monotonic_ms,
    ) -> None:
        self._over = DriverWaits(cluster_name(options), write, step)
        self._label = label
        self._find = find
        self._clock_ms = clock_ms
        self._due_ms = self._logged_ms = -math.inf

    def __enter__(self) -> None:
        self._token = WAIT_LISTENER.set(self.on_wait)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        WAIT_LISTENER.reset(self._token)
        if self._due_ms > -math.inf:
            self._tell(replace(self._over, cause=printable(str(error or ""), MAX_CAUSE)))

    def on_wait(self, awaited: Callable[[], str], since_ms: float, until_ms: float) -> None:
        now_ms = self._clock_ms()
        age_ms, left_ms = now_ms - since_ms, max(0.0, until_ms - now_ms)
        if age_ms < _WAIT_REPORTED_MS or now_ms < self._due_ms:
            return
        self._due_ms = now_ms + MIN_INTERVAL_MS
        text = awaited()
        if age_ms >= WAIT_LOGGED_MS and since_ms != self._logged_ms:
            self._logged_ms = since_ms
            times = f"{age_ms / 1000:.0f} s, fails in {left_ms / 1000:.0f} s"
            driver_log.warn(f"kafka-chunked: {self._over.step} {self._label}: waits for {text}, {times}")
        self._tell(replace(self._over, awaited=cut(text), age_ms=age_ms, left_ms=left_ms))

    def _tell(self, message: DriverWaits) -> None:
        # The folder may be unusable. Planning warns of that.
        with suppress(OSError):
            address = self._find()
            # Without a live view nobody reads it.
            if address is None or not address.has_view:
                return
            if not spark_application.happened_within(_SILENT, _WAIT_UNREPORTED_S):
                _tell_or_remember(address, message, _SHORT_TIMEOUT_MS)
