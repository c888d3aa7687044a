"""The coordinator as a process: how planning finds it, what it must not outlive, what it must not show."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kafka_sink.coordinator.process import launcher, planning
from kafka_sink.coordinator.process import server_process as process
from kafka_sink.coordinator.process.planning import PlannedCoordinator, plan_coordinator
from kafka_sink.coordinator.process.rendezvous_directory import (
    FOLDER,
    RendezvousDirectory,
    RunningCoordinator,
    pause_s,
)
from kafka_sink.coordinator.transport.address import CoordinatorAddress
from kafka_sink.coordinator.transport.connection import CoordinatorConnection
from kafka_sink.coordinator.transport.connections import ServerBounds
from kafka_sink.coordinator.writes.channel import end_attempts
from kafka_sink.driver import driver_process
from kafka_sink.driver.driver_conf import spark_conf
from kafka_sink.driver.driver_process import DriverProcess
from kafka_sink.errors import ConfigurationError
from kafka_sink.options import parse
from tests.support.application import Application
from tests.support.coordinator_harness import clock_ms, eventually
from tests.support.fake_broker import METADATA, FakeCluster
from tests.support.ports import free_port

# Stands for a password: it travels to the coordinator as all settings of a cluster do.
PASSWORD = "271828182"
# What Spark's daemon and its workers know one another by.
SPARKS_SECRET = "314159265"


@pytest.fixture
def application(tmp_path: Path) -> Iterator[Application]:
    folder = tmp_path / "blockmgr"
    folder.mkdir()
    with Application(folder) as made:
        yield made


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster({"t": 2}) as made:
        yield made


def planned(cluster: FakeCluster, *, is_streaming: bool = False, **options: str) -> PlannedCoordinator:
    raw = {"kafka.bootstrap.servers": cluster.bootstrap_servers, "topic": "t"}
    raw |= {name.replace("_", "."): value for name, value in options.items()}
    return plan_coordinator(parse(raw).options, is_streaming=is_streaming)


def answers(found: PlannedCoordinator) -> bool:
    assert found.rendezvous is not None
    host = found.rendezvous.host or "127.0.0.1"
    connection = CoordinatorConnection(CoordinatorAddress(host, found.rendezvous), 5000, clock_ms)
    try:
        connection.send("metadata", {}, clock_ms())
        return bool(connection.receive(clock_ms())[0].last)
    finally:
        connection.close()


def answers_again(found: PlannedCoordinator) -> bool:
    with contextlib.suppress(OSError):
        return answers(found)
    return False


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "coordinator" in line]


def test_the_first_write_starts_it_and_the_next_find_it(
    application: Application, cluster: FakeCluster
) -> None:
    first, second = planned(cluster), planned(cluster)
    assert first.rendezvous == second.rendezvous
    assert len(application.processes) == 1
    assert answers(second)
    for one in (first, second):
        assert one.snapshot is not None
        assert [hint.metadata.name for hint in one.snapshot.topics] == ["t"]
    assert len(cluster.received(METADATA)) == 1
    stream = planned(cluster, is_streaming=True)
    assert (stream.rendezvous, stream.snapshot) == (first.rendezvous, None)


def test_it_serves_several_clusters(application: Application, cluster: FakeCluster) -> None:
    first = planned(cluster)
    with FakeCluster({"t": 5}) as other:
        second = planned(other)
        assert second.snapshot is not None
        assert len(second.snapshot.topics[0].metadata.partitions) == 5
    assert first.rendezvous is not None
    assert second.rendezvous is not None
    assert first.rendezvous.port == second.rendezvous.port
    assert first.rendezvous.cluster != second.rendezvous.cluster
    assert len(application.processes) == 1


def test_it_goes_with_the_driver_killed(application: Application, cluster: FakeCluster) -> None:
    planned(cluster)
    (process,) = application.processes
    # Nobody waits for it: like a JVM whose parent lives on, it stays as a zombie.
    application.driver.send_signal(signal.SIGKILL)
    assert process.wait() == 0


def test_it_goes_with_the_application_folder(application: Application, cluster: FakeCluster) -> None:
    planned(cluster)
    (process,) = application.processes
    shutil.rmtree(application.folder)
    assert process.wait() == 0


def test_a_dead_one_is_replaced(application: Application, cluster: FakeCluster) -> None:
    first = planned(cluster)
    application.processes[0].kill()
    application.processes[0].wait()
    second = planned(cluster)
    assert len(application.processes) == 2
    assert answers(second)
    # Tasks under way connect to where the first one was.
    assert first.rendezvous == second.rendezvous
    assert answers(first)


def test_running_tasks_find_the_process_that_takes_the_place_of_a_dead_one(
    application: Application, cluster: FakeCluster
) -> None:
    """Catches: a long job whose tasks share nothing any more, because only planning starts a coordinator."""
    first = planned(cluster)
    # Added while it runs, so that only the supervisor can have kept it.
    second = planned(cluster, kafka_metadata_max_age_ms="1000")
    (process,) = application.processes
    server = process.server
    os.kill(server, signal.SIGKILL)
    eventually(lambda: answers_again(first) and answers_again(second))
    assert process.server != server
    assert process.poll() is None


def test_without_its_supervisor_the_process_goes_on(application: Application, cluster: FakeCluster) -> None:
    first = planned(cluster)
    (process,) = application.processes
    process.server  # noqa: B018 - it was forked
    os.kill(process.pid, signal.SIGKILL)
    process.supervisor.wait()
    assert answers(first)
    assert planned(cluster).rendezvous == first.rendezvous
    assert len(application.processes) == 1


def test_one_that_is_about_to_be_started_again_refuses_at_once(
    application: Application, cluster: FakeCluster
) -> None:
    """Catches: tasks that wait two seconds for a challenge from a socket that nobody serves."""
    first = planned(cluster)
    (process,) = application.processes
    os.kill(process.server, signal.SIGKILL)
    eventually(lambda: answers_again(first))
    os.kill(process.server, signal.SIGKILL)
    log = application.folder / FOLDER / "log"
    eventually(lambda: "started again in 10 s" in log.read_text())
    assert first.driver_address is not None
    for _ in range(3):
        started = time.monotonic()
        with pytest.raises((ConnectionError, TimeoutError)):
            CoordinatorConnection(first.driver_address, 60_000.0, clock_ms)
        assert time.monotonic() - started < 20


def test_a_cluster_that_was_dropped_to_make_room_is_sent_again(
    application: Application, cluster: FakeCluster
) -> None:
    first = planned(cluster)
    # As many as it serves at once, each of another age: of other settings, hence another cluster.
    places = ServerBounds().clusters
    others = [
        planned(cluster, kafka_metadata_max_age_ms=str(number), is_streaming=True) for number in range(places)
    ]
    assert len({one.rendezvous for one in (first, *others)}) == places + 1
    folder = application.folder / FOLDER
    eventually(lambda: len(list(folder.glob("said-*"))) == places)
    again = planned(cluster)
    assert again.rendezvous == first.rendezvous
    assert again.snapshot is not None
    assert len(application.processes) == 1


@pytest.mark.parametrize("problem", ["open to all", "a link"])
def test_a_folder_that_others_could_write_to_is_not_believed(
    problem: str, application: Application, cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    planned(cluster)
    folder = application.folder / FOLDER
    if problem == "a link":
        elsewhere = application.folder / "elsewhere"
        folder.rename(elsewhere)
        folder.symlink_to(elsewhere)
    else:
        folder.chmod(0o770)
    with caplog.at_level(logging.WARNING):
        assert planned(cluster) == PlannedCoordinator()
    assert len(warnings(caplog)) == 1
    assert str(folder) in warnings(caplog)[0]
    assert len(application.processes) == 1


def test_another_users_folder_is_not_believed(
    application: Application, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(cluster)
    monkeypatch.setattr(os, "getuid", lambda: 12_345)
    assert planned(cluster) == PlannedCoordinator()
    assert len(application.processes) == 1


def test_a_frozen_one_costs_one_warning_and_a_moment(
    application: Application,
    cluster: FakeCluster,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = planned(cluster)
    monkeypatch.setattr(planning, "_SILENCE_MS", 200.0)
    with caplog.at_level(logging.WARNING):
        application.processes[0].send_signal(signal.SIGSTOP)
        started = time.monotonic()
        for _ in range(3):
            assert planned(cluster) == PlannedCoordinator(first.rendezvous, None, first.driver_address)
        assert time.monotonic() - started < 20, "that of a new one would be a minute"
        assert len(warnings(caplog)) == 1
        monkeypatch.undo()
        application.processes[0].send_signal(signal.SIGCONT)
        assert planned(cluster).snapshot is not None
    assert len(application.processes) == 1


@pytest.mark.usefixtures("application")
def test_the_process_notifies_attempts_whose_write_is_over(cluster: FakeCluster) -> None:
    address = planned(cluster).driver_address
    assert address is not None
    end_attempts(address, "a")
    connection = CoordinatorConnection(address, 5000.0, lambda: 0.0)
    connection.send("writes", {"writing": "a"}, 0.0)
    assert [heard.body for heard in connection.receive(0.0)] == [{"over": "a"}]
    connection.send("writes", {"writing": "b"}, 0.0)
    assert [heard.body for heard in connection.receive(0.0)] == [{}]
    end_attempts(address, "b")
    assert [(heard.body, heard.last) for heard in connection.receive(0.0)] == [({"over": "b"}, None)]
    connection.close()


def test_it_can_be_switched_off(application: Application, cluster: FakeCluster) -> None:
    assert planned(cluster, coordinator_enabled="false") == PlannedCoordinator()
    assert not application.processes
    assert not (application.folder / FOLDER).exists()


def test_a_taken_port_costs_one_warning(
    application: Application, cluster: FakeCluster, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for _ in range(2):
            assert planned(cluster, coordinator_port=port) == PlannedCoordinator()
    assert len(warnings(caplog)) == 1
    assert "coordinator.port" in warnings(caplog)[0]
    assert not application.processes


def test_nothing_shows_a_secret(
    application: Application, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHON_WORKER_FACTORY_SECRET", SPARKS_SECRET)
    found = planned(cluster, kafka_metadata_max_age_ms=PASSWORD)
    rendezvous = found.rendezvous
    assert rendezvous is not None
    secrets = (rendezvous.secret.hex(), PASSWORD)
    assert not any(secret in repr(found) for secret in secrets)
    pid = application.processes[0].pid
    shown = subprocess.run(["ps", "-ww", "-o", "args=", "-p", str(pid)], capture_output=True, text=True)
    assert "kafka_sink.coordinator" in shown.stdout
    assert not any(secret in shown.stdout for secret in secrets)
    if sys.platform == "linux":
        environ = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"PATH=" in environ
        assert not any(secret.encode() in environ for secret in (*secrets, SPARKS_SECRET))
    folder = application.folder / FOLDER
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        # What users call secret is in no file; what the coordinator's peers prove is in one.
        if path.is_file():
            assert PASSWORD.encode() not in path.read_bytes()
            assert (rendezvous.secret.hex().encode() in path.read_bytes()) == (path.name == "found")


@pytest.mark.parametrize("place", ["add_cluster", "publish", "write", "spawn"])
def test_no_frame_of_an_error_holds_a_secret(
    application: Application, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Error trackers collect the local variables of every frame (the launcher's held the passwords)."""

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    if place == "write":
        monkeypatch.setattr(os, "write", fails)
    elif place == "spawn":
        monkeypatch.setattr(subprocess, "Popen", fails)
    else:
        monkeypatch.setattr(RendezvousDirectory, place, fails)
    with pytest.raises(RuntimeError) as caught:
        planned(cluster, kafka_producer_circuit_breaker_token=PASSWORD)
    frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    seen = [f.f_locals for f in frames if "/kafka_sink/coordinator/" in f.f_code.co_filename]
    assert len(seen) > 2
    secret = application.folder / FOLDER / "found"
    known = [PASSWORD]
    if secret.exists():
        known.append(json.loads(secret.read_text())["secret"])
    for local in seen:
        assert not any(one in repr(local) for one in known)


def test_a_clusters_key_gives_no_password_away() -> None:
    """It goes over the wire and is a file's name: a hash without the secret could be tried out."""
    settings = parse({"kafka.bootstrap.servers": "h:1"}).options.of_cluster()
    one, other = (RunningCoordinator(1, bytes([number]) * 32, "token", "::1") for number in (1, 2))
    assert one.key_of(settings) == one.key_of(dict(reversed(settings.items())))
    assert one.key_of(settings) != other.key_of(settings)
    assert one.key_of(settings) != one.key_of({**settings, "kafka.security.protocol": "SSL"})


def test_it_leads_a_session_of_its_own(application: Application, cluster: FakeCluster) -> None:
    first = planned(cluster)
    assert planned(cluster, kafka_client_id="another").rendezvous == first.rendezvous
    pid = application.processes[0].pid
    assert os.getsid(pid) == os.getpgid(pid) == pid


def test_another_folder_is_another_application(
    application: Application, cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = planned(cluster)
    other = tmp_path / "another"
    other.mkdir()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"{other},{tmp_path}")
    assert planned(cluster).rendezvous != first.rendezvous
    assert len(application.processes) == 2


def test_without_a_driver_or_a_folder_there_is_none(
    application: Application, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver_process, "find_driver_process", lambda: None)
    assert planned(cluster) == PlannedCoordinator()
    monkeypatch.delenv("SPARK_LOCAL_DIRS")
    assert planned(cluster) == PlannedCoordinator()
    assert not application.processes


def test_the_driver_is_the_nearest_ancestor_that_is_no_python() -> None:
    script = "from kafka_sink.driver.driver_process import find_driver_process as f; print(f().pid)"
    nested = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {script!r}], check=True)"
    shell = subprocess.Popen(
        ["sh", "-c", '"$0" -c "$1"; true', sys.executable, nested],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    printed, _ = shell.communicate(timeout=30)
    assert int(printed) == shell.pid


def test_a_process_is_known_by_its_start_too() -> None:
    found = driver_process.process(os.getpid())
    assert found is not None
    assert found.is_alive()
    assert not DriverProcess(os.getpid(), "another time").is_alive()
    eventually(lambda: driver_process.process(2**22 + 1) is None)


def test_one_that_keeps_ending_is_started_ever_later_with_one_warning(
    application: Application,
    cluster: FakeCluster,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches: every micro-batch starts a process and waits for it."""
    monkeypatch.setattr(launcher, "_AFTER_FAILURE_S", 0.0)
    now_s = [1_000_000.0]
    monkeypatch.setattr("kafka_sink.coordinator.process.launcher.time.time", lambda: now_s[0])
    started_at: list[float] = []
    with caplog.at_level(logging.WARNING):
        for _ in range(60):
            before = len(application.processes)
            planned(cluster, is_streaming=True)
            for process in application.processes[before:]:
                started_at.append(now_s[0] - 1_000_000)
                process.kill()
                process.wait()
            now_s[0] += 5
    assert started_at == [0, 5, 15, 35, 75, 155]
    assert len(warnings(caplog)) == 1
    assert "has ended 2 times" in warnings(caplog)[0]
    assert str(application.folder / FOLDER / "log") in warnings(caplog)[0]


def test_pauses_between_starts_double_up_to_ten_minutes() -> None:
    assert [pause_s(starts) for starts in (0, 1, 2, 3, 4, 8, 9, 10_000)] == [
        *(0, 0, 10, 20, 40, 600, 600, 600)
    ]


def test_options_larger_than_a_pipe_reach_it(application: Application, cluster: FakeCluster) -> None:
    """Catches: a bundle of certificates in an option, for which the pipe has no room at once."""
    bundle = "-----BEGIN CERTIFICATE-----" * 30_000
    own_class = {
        "kafka_producer_circuit_breaker_class": "tests.breaker.test_loading.Own",
    }
    for size in (70_000, len(bundle)):
        own_class["kafka_producer_circuit_breaker_bundle"] = bundle[:size]
        found = planned(cluster, is_streaming=False, **own_class)
        assert answers(found)
        assert found.snapshot is not None
    assert len(application.processes) == 1


def test_one_that_reads_nothing_costs_one_warning_and_a_moment(
    application: Application,
    cluster: FakeCluster,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planned(cluster)
    monkeypatch.setattr(launcher, "_READS_MS", 300.0)
    monkeypatch.setattr(launcher, "_AFTER_FAILURE_S", 600.0)
    tries: list[object] = []
    add_cluster = RendezvousDirectory.add_cluster

    def counted(*given: Any) -> None:
        tries.append(given)
        add_cluster(*given)

    monkeypatch.setattr(RendezvousDirectory, "add_cluster", counted)
    application.processes[0].send_signal(signal.SIGSTOP)
    options = {
        "kafka_producer_circuit_breaker_class": "tests.breaker.test_loading.Own",
        "kafka_producer_circuit_breaker_bundle": "x" * 200_000,
    }
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            assert planned(cluster, is_streaming=False, **options) == PlannedCoordinator()
    assert len(tries) == 1, "the others do not wait"
    assert len(warnings(caplog)) == 1


def test_the_first_of_sparks_folders_that_can_be_written_to_is_used(
    application: Application,
    cluster: FakeCluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("SPARK_LOCAL_DIRS", f"/proc/none,{application.folder}")
    first, second = planned(cluster), planned(cluster)
    assert first.rendezvous is not None
    assert first.rendezvous == second.rendezvous
    assert (application.folder / FOLDER).is_dir()
    monkeypatch.setenv("SPARK_LOCAL_DIRS", "/proc/none,/proc/nor/this")
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert planned(cluster) == PlannedCoordinator()
    assert len(warnings(caplog)) == 1
    assert len(application.processes) == 1


def test_relative_paths_are_those_of_the_planning_worker(
    application: Application, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a coordinator that does not find the package, as it runs in another folder."""
    root = Path(__file__).parents[3]
    monkeypatch.chdir(root / "tests")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    others = [entry for entry in sys.path if Path(entry or ".").resolve() != root]
    monkeypatch.setattr(sys, "path", ["", "..", *others])
    assert answers(planned(cluster))
    if sys.platform == "linux":
        environ = Path(f"/proc/{application.processes[0].pid}/environ").read_bytes().split(b"\0")
        (path,) = [one.partition(b"=")[2].decode() for one in environ if one.startswith(b"PYTHONPATH=")]
        assert path.split(os.pathsep)[:2] == [str(root / "tests"), str(root)]


def test_it_imports_nothing_from_folders_that_anybody_may_write_to(
    application: Application, cluster: FakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches: a driver started in /tmp, whose coordinator, which has the passwords, imports /tmp/json.py."""
    shared, evidence = tmp_path / "shared", tmp_path / "was-run"
    shared.mkdir()
    for name in ("json", "hmac"):
        (shared / f"{name}.py").write_text(f"open({str(evidence)!r}, 'w').close()\nraise ImportError\n")
    shared.chmod(0o777)
    monkeypatch.chdir(shared)
    monkeypatch.setattr(sys, "path", [str(shared), "", *sys.path])
    assert answers(planned(cluster))
    assert not evidence.exists()
    assert len(application.processes) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads another process's environment from /proc")
def test_it_has_nothing_of_the_session_that_planned_first(
    application: Application, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPARK_JOB_ARTIFACT_UUID", "one-session-of-several")
    monkeypatch.setenv("HTTPS_PROXY", "http://proxy:1")
    planned(cluster)
    environ = Path(f"/proc/{application.processes[0].pid}/environ").read_bytes()
    assert b"one-session" not in environ
    assert b"HTTPS_PROXY=http://proxy:1" in environ


def listens_on(found: PlannedCoordinator) -> str:
    """The address that the coordinator's socket is bound to, from /proc/net: hexadecimal."""
    assert found.rendezvous is not None
    suffix = f":{found.rendezvous.port:04X}"
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_ = row.split()
            if local.endswith(suffix) and state == "0A":
                return local.removesuffix(suffix)
    raise AssertionError("nobody listens")


@pytest.mark.skipif(sys.platform != "linux", reason="finds listening sockets in /proc")
@pytest.mark.parametrize(
    ("conf", "environ", "expected"),
    [
        (["--conf", "spark.driver.bindAddress=127.0.0.5"], {"SPARK_LOCAL_IP": "127.0.0.1"}, "0500007F"),
        (["--conf", "spark.driver.host=127.0.0.6"], {}, "0600007F"),
        ([], {"SPARK_LOCAL_IP": "[::1]"}, "00000000000000000000000001000000"),
        ([], {"KAFKA_CHUNKED_COORDINATOR_BIND_ADDRESS": "127.0.0.7"}, "0700007F"),
    ],
)
@pytest.mark.usefixtures("application")
def test_it_listens_where_the_driver_does(
    conf: list[str],
    environ: dict[str, str],
    expected: str,
    cluster: FakeCluster,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches: one that listens on all addresses, and one that cannot be had where hosts have IPv6 only."""
    monkeypatch.delenv("SPARK_LOCAL_IP")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(DriverProcess, "arguments", lambda self: ["java", *conf, "pyspark-shell"])
    found = planned(cluster)
    assert found.snapshot is not None
    assert listens_on(found) == expected
    # No other host could reach it, so tasks get its address.
    assert found.rendezvous is not None
    assert found.rendezvous.host


@pytest.mark.parametrize("by", ["environment", "Spark's configuration"])
def test_an_administrator_switches_it_off_for_all_jobs(
    by: str, application: Application, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = ["-c", "spark.kafka-chunked.coordinator.enabled=false"]
    if by == "environment":
        monkeypatch.setenv("KAFKA_CHUNKED_COORDINATOR_ENABLED", "false")
    else:
        monkeypatch.setattr(DriverProcess, "arguments", lambda self: ["java", *conf])
    assert planned(cluster, coordinator_enabled="true") == PlannedCoordinator()
    assert not application.processes
    assert not (application.folder / FOLDER).exists()


@pytest.mark.usefixtures("application")
def test_an_administrator_fixes_the_port_for_all_jobs(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    monkeypatch.setenv("KAFKA_CHUNKED_COORDINATOR_PORT", str(port))
    found = planned(cluster, coordinator_port="1")
    assert found.rendezvous is not None
    assert found.rendezvous.port == port


@pytest.mark.usefixtures("application")
def test_an_administrators_mistake_is_named(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_CHUNKED_COORDINATOR_ENABLED", "flase")
    with pytest.raises(
        ConfigurationError, match="'KAFKA_CHUNKED_COORDINATOR_ENABLED' must be true or false, got 'flase'"
    ):
        planned(cluster)


def test_sparks_configuration_is_read_as_spark_reads_it(tmp_path: Path) -> None:
    (tmp_path / "spark-defaults.conf").write_text(
        "# a comment\n\nspark.driver.host  from.defaults\nspark.kafka-chunked.coordinator.port=7\n"
        "spark.kafka-chunked.coordinator.enabled : false\nspark.hadoop.secret hidden\n"
    )
    of_file = {
        "spark.driver.host": "from.defaults",
        "spark.kafka-chunked.coordinator.port": "7",
        "spark.kafka-chunked.coordinator.enabled": "false",
    }
    environ = {"SPARK_CONF_DIR": str(tmp_path)}
    assert spark_conf(["java"], environ) == of_file
    (tmp_path / "conf").mkdir()
    other = tmp_path / "other.properties"
    other.write_text("spark.driver.bindAddress=0.0.0.0\n")
    named = ["java", "--properties-file", str(other)]
    assert spark_conf(named, environ) == {"spark.driver.bindAddress": "0.0.0.0"}
    given = ["java", "-Dspark.driver.host=a", "-Dother=b", "X", "--conf", "spark.driver.host=c", "--conf=x=y"]
    assert spark_conf(given, environ) == {**of_file, "spark.driver.host": "c"}
    assert spark_conf([], {"SPARK_HOME": "/nowhere"}) == {}


def test_bounds_are_options_and_the_limit_of_open_files_is_logged(
    application: Application, cluster: FakeCluster
) -> None:
    found = planned(cluster, coordinator_max_connections="100000", coordinator_max_messages_per_second="10")
    assert answers(found)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limits[1] < 101_000:
        log = application.folder / FOLDER / "log"
        eventually(lambda: "coordinator.max.connections=100000" in log.read_text())
    other = planned(cluster, coordinator_max_connections="7")
    assert other.rendezvous == found.rendezvous


@pytest.mark.parametrize(
    ("soft", "allowed", "connections"),
    [(2024, 6000, 4500), (2024, 10, 1024), (1024, 10, 512), (resource.RLIM_INFINITY, 10, 10_000)],
)
def test_a_system_that_allows_fewer_files_than_its_hard_limit_gets_fewer_connections(
    monkeypatch: pytest.MonkeyPatch, soft: int, allowed: int, connections: int
) -> None:
    def setrlimit(_: int, limits: tuple[int, int]) -> None:
        if limits[0] > allowed:
            raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", setrlimit)
    settings = {"connections": 10_000, "buffer_memory": 1 << 20, "messages_per_s": 1}
    assert process._bounds(settings).connections == connections


def _connected(address: CoordinatorAddress) -> CoordinatorConnection:
    found: list[CoordinatorConnection] = []

    def connect() -> bool:
        with contextlib.suppress(OSError):
            found.append(CoordinatorConnection(address, 5000, clock_ms))
        return bool(found)

    eventually(connect)
    return found[0]


@pytest.mark.usefixtures("application")
def test_connections_beyond_the_option_are_refused(cluster: FakeCluster) -> None:
    found = planned(cluster, coordinator_max_connections="2")
    assert found.rendezvous is not None
    address = CoordinatorAddress("127.0.0.1", found.rendezvous)
    # Planning has closed its own connection, which counts until the coordinator has seen that.
    connections = [_connected(address), _connected(address)]
    with pytest.raises(OSError, match=r"closed the connection|reset by peer"):
        CoordinatorConnection(address, 5000, clock_ms)
    connections.pop().close()
    # There is room again once the coordinator has seen the close.
    connections.append(_connected(address))
    for one in connections:
        one.close()
