"""Real brokers, as the fixtures and the demo start them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Producer

from local_kafka import LocalBroker
from local_kafka.errors import LocalBrokerError
from local_kafka.start_cache import CHECKPOINTS, CLASSES, StartCache
from tests.support.commands import alive, run, start
from tests.support.topics import read_to_end
from tests.support.waiting import throughout, until


def send(servers: str, topic: str, *values: bytes, timestamp: int = 0) -> None:
    producer = Producer({"bootstrap.servers": servers, "acks": "all", "log_level": 3})
    for value in values:
        producer.produce(topic, value, partition=0, timestamp=timestamp)
    assert producer.flush(60) == 0


@pytest.fixture(scope="module")
def own(_programs: None) -> Iterator[LocalBroker]:
    """A broker that these tests may kill. It checks ten times a second whether records are too old."""
    checks = {"log.initial.task.delay.ms": 100, "log.retention.check.interval.ms": 100}
    with LocalBroker(properties={"num.partitions": 2, **checks}) as running:
        yield running


def test_data_survives_kill_and_clean_stop_and_tools_of_the_same_jars_read_it(own: LocalBroker) -> None:
    """In a topic that is created by use, with the caller's properties."""
    servers, first = own.bootstrap_servers, own.pid(0)
    send(servers, "survives", b"a", b"b")
    assert sorted(path.name for path in own.log_dir(0).glob("survives-*")) == ["survives-0", "survives-1"]
    own.stop(0)
    assert not own.is_running(0)
    own.start(0)
    send(servers, "survives", b"c")
    own.kill(0)
    assert not alive(first)
    own.start(0)
    assert own.bootstrap_servers == servers
    assert own.pid(0) != first
    assert read_to_end(servers, "survives") == [b"a", b"b", b"c"]
    segment = next((own.log_dir(0) / "survives-0").glob("*.log"))
    dump = ("org.apache.kafka.tools.DumpLogSegments", "--files", str(segment), "--print-data-log")
    printed = own.run_tool(*dump).stdout
    assert "isvalid: true" in printed
    assert "payload: b" in printed
    with pytest.raises(LocalBrokerError, match=r"no\.such\.Tool ended with 1"):
        own.run_tool("no.such.Tool")


def test_old_event_times_are_kept(own: LocalBroker) -> None:
    """Kafka's default retention deletes records with timestamps of 2013 at the first check."""
    own.create_topic("old")
    send(own.bootstrap_servers, "old", b"x", timestamp=1_356_998_400_000)
    # Several checks.
    throughout(lambda: read_to_end(own.bootstrap_servers, "old") == [b"x"], 1.0)


def test_misuse_is_told(own: LocalBroker) -> None:
    taken = int(own.bootstrap_servers.rpartition(":")[2])
    mistakes: dict[str, Callable[[], object]] = {
        "0 is already running": lambda: own.start(0),
        "this LocalBroker is already running": own.open,
        "no broker 1": lambda: own.kill(1),
        "was not created": lambda: own.create_topic("not a name"),
        "1 or 3": lambda: LocalBroker(brokers=2),
        "not running": lambda: LocalBroker().bootstrap_servers,
        # Before anything starts.
        f"port {taken} is taken": LocalBroker(port=taken).open,
        r"StorageTool|ended while it started": LocalBroker(properties={"log.segment.bytes": "many"}).open,
    }
    for problem, mistake in mistakes.items():
        with pytest.raises(LocalBrokerError, match=problem):
            mistake()


@pytest.mark.usefixtures("_programs")
def test_a_port_lost_between_choice_and_bind_is_chosen_again() -> None:
    with socket.socket() as listener:
        starts: list[int] = []

        class Unlucky(LocalBroker):
            @property
            def java(self) -> str:
                starts.append(self._nodes[0].ports["CONTROLLER"])
                if len(starts) == 1:
                    listener.bind(("127.0.0.1", starts[0]))
                    listener.listen()
                return super().java

        with Unlucky() as running:
            assert running.is_running(0)
        assert starts[-1] != starts[0]


@pytest.mark.usefixtures("_programs")
def test_no_room_for_the_data_is_told(temporary_folder: Callable[[str], None]) -> None:
    temporary_folder("/no/such/folder")
    with pytest.raises(LocalBrokerError, match=r"No such file .*; set TMPDIR"):
        LocalBroker().open()


def command_until(how: signal.Signals, code: int, environ: dict[str, str], folder: Path) -> list[str]:
    """Run the command in ``folder`` until this signal; the command lines of what it had started."""
    command = start([sys.executable, "-m", "local_kafka"], {**environ, "TMPDIR": str(folder)})
    with command, contextlib.ExitStack() as stack:
        stack.callback(command.kill)
        assert command.stdout is not None
        host, port = command.stdout.readline().strip().split(":")
        socket.create_connection((host, int(port)), 60).close()
        started = [
            line
            for line in run(["ps", "-ww", "-eo", "pid=,args="]).stdout.splitlines()
            if str(folder) in line
        ]
        assert len(started) == 2  # the supervisor and the broker
        os.kill(command.pid, how)
        assert command.wait(90) == code
    until(lambda: not any(alive(int(line.split()[0])) for line in started), "the end of its processes")
    until(lambda: not list(folder.glob("kafka-chunked-broker-*")), "the end of its files")
    return started


def test_a_first_start_leaves_what_makes_later_ones_quick(
    project_environment: dict[str, str], own: LocalBroker, tmp_path: Path
) -> None:
    """And the command ends its broker at Ctrl-C and at SIGTERM, and when it is killed."""
    command_until(signal.SIGKILL, -signal.SIGKILL, project_environment, tmp_path)
    jars, runs = Path(own.classpath).parent, tmp_path / "runs"
    runs.mkdir()
    environ = {
        **project_environment,
        "KAFKA_CHUNKED_KAFKA_HOME": str(jars),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    first = command_until(signal.SIGINT, 0, environ, runs)
    left = sorted(tmp_path.glob("cache/kafka-chunked/starts-*/*"))
    assert [path.name for path in left] == [Path(CHECKPOINTS[1]).name, CLASSES]
    later = command_until(signal.SIGTERM, 0, environ, runs)
    assert not any("SharedArchiveFile" in line for line in first)
    assert any("SharedArchiveFile" in line for line in later)
    flags = StartCache(left[0].parent).flags_to_read_classes()
    assert classes_from_archive(own, flags) > 100
    # Java maps a damaged file too unless it is asked to compare checksums, and crashes.
    with left[1].open("r+b") as archive:
        archive.seek(left[1].stat().st_size // 2)
        archive.write(b"\xff" * 100_000)
    assert classes_from_archive(own, flags) == 0


def classes_from_archive(broker: LocalBroker, flags: list[str]) -> int:
    """How many classes Kafka's main class, which says here how it is called, takes from the archive."""
    command = [broker.java, *flags, "-Xlog:class+load", "-cp", broker.classpath, "kafka.Kafka"]
    done = run(command, code=1)
    assert "server.properties" in done.stdout + done.stderr
    return done.stdout.count("source: shared objects file (top)")


def test_a_frozen_broker_goes_on_so_that_it_can_end(tmp_path: Path) -> None:
    """Catches: 15 s until a block ends in which the first broker of this machine was frozen."""
    calls: list[str] = []

    class Frozen(LocalBroker):
        def __init__(self) -> None:
            super().__init__(progress=lambda _: None)
            self._folder, self._has_served = tmp_path / "none", True

        def is_running(self, _id: int) -> bool:
            return True

        def _flags_to_write_classes(self, _folder: Path) -> list[str]:
            return ["flag"]

        def thaw(self, _id: int) -> None:
            calls.append("thaw")

        def stop(self, _id: int, _within_s: float = 0.0) -> None:
            calls.append("stop")

    Frozen().close()
    assert calls == ["thaw", "stop"]


def test_the_command_tells_what_is_wrong_in_one_line(
    project_environment: dict[str, str], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "local_kafka", "--kafka-home", tmp_path]
    done = run(command, project_environment, code=1)
    assert done.stderr.startswith("error: ")
    assert "contains no Kafka" in done.stderr
    assert "Traceback" not in done.stderr
