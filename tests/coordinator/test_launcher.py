"""How planning finds the coordinator or starts it, what it must not outlive, what it must not show."""

from __future__ import annotations

import errno
import logging
import os
import pickle
import shutil
import signal
import socket
import stat
import subprocess
import sys
import traceback
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kafka_sink import spark_application
from kafka_sink.coordinator import client
from kafka_sink.coordinator.address import UNAVAILABLE, CoordinatorAddress, PlannedCoordinator
from kafka_sink.coordinator.client import ask
from kafka_sink.coordinator.launcher import plan_coordinator
from kafka_sink.coordinator.rendezvous import FOLDER, LocationFolder, address_for_driver, read_found, serving
from kafka_sink.coordinator.schema import Alive
from kafka_sink.coordinator.writes import WriteOver, Writing, end_attempts
from kafka_sink.options import parse
from tests.support.application import Application
from tests.support.surroundings import Environ

# Stands for a password.
PASSWORD = "271828182"
# What Spark's daemon and its workers know one another by.
SPARKS_SECRET = "314159265"


LOGIN: dict[str, Any] = {
    "kafka_security_protocol": "SASL_SSL",
    "kafka_sasl_mechanism": "PLAIN",
    "kafka_sasl_username": "u",
    "kafka_sasl_password": PASSWORD,
}


@pytest.fixture
def application(_programs: None, tmp_path: Path) -> Iterator[Application]:
    folder = tmp_path / "blockmgr"
    folder.mkdir()
    with Application(folder) as made:
        yield made


def planned(
    brokers: str = "127.0.0.1:1", environ: Mapping[str, str | None] | None = None, **options: str
) -> PlannedCoordinator:
    """``environ``: what is different there, None for what is not there."""
    raw = {"kafka.bootstrap.servers": brokers, "topic": "t"}
    raw |= {name.replace("_", "."): value for name, value in options.items()}
    there = {**os.environ, **(environ or {})}
    return plan_coordinator(
        parse(raw).options, environ={name: value for name, value in there.items() if value is not None}
    )


def answers(found: PlannedCoordinator) -> bool:
    address = address_of(found)
    return ask(replace(address, host=address.host or "127.0.0.1"), Alive(), Alive, 30_000) == Alive()


def address_of(found: PlannedCoordinator) -> CoordinatorAddress:
    assert found.address is not None
    return found.address


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if "coordinator" in line]


def found_in(application: Application) -> Any:
    return read_found(application.folder / FOLDER / "found")


def test_coordinator_is_not_started_if_the_option_or_the_environment_refuses_it(tmp_path: Path) -> None:
    with Application(tmp_path) as quiet:
        assert planned(coordinator_enabled="false").address is None
        assert planned(environ={"KAFKA_CHUNKED_COORDINATOR_ENABLED": "false"}).address is None
        assert quiet.processes == []


def test_the_first_write_starts_it_and_the_next_find_it(application: Application) -> None:
    first = planned()
    assert first == planned() == planned(kafka_client_id="another")
    driver = address_for_driver()
    assert driver is not None
    assert driver.token != address_of(first).token
    end_attempts(driver, "a")
    assert ask(address_of(first), Writing("a"), WriteOver, 30_000) == WriteOver("a")
    pid = application.processes[0].pid
    assert os.getsid(pid) == os.getpgid(pid) == pid, "Ctrl-C in the driver's terminal is not for it"
    # Groups share it.
    groups = first, planned(kafka_metadata_max_age_ms="1000"), planned("h:2")
    assert len({address_of(one).port for one in groups}) == 1
    assert len({address_of(one).group for one in groups}) == 3
    assert len(application.processes) == 1


@pytest.mark.parametrize("gone", ["the driver", "the folder", "its place"])
def test_coordinator_ends_with_its_driver_or_folder(gone: str, application: Application) -> None:
    planned()
    if gone == "the driver":
        # Nobody waits for it: like a JVM whose parent lives on, it stays as a zombie.
        application.driver.send_signal(signal.SIGKILL)
    elif gone == "the folder":
        shutil.rmtree(application.folder)
    else:
        # As where another one has taken it.
        (application.folder / FOLDER / "found").unlink()
    assert application.processes[0].wait(60) == 0
    assert gone == "the folder" or serving(LocationFolder(str(application.folder))) is None


def test_a_dead_one_is_replaced_by_one_with_secrets_of_its_own(application: Application) -> None:
    first = planned(ui_port="0")
    before = found_in(application)
    application.processes[0].kill()
    application.processes[0].wait()
    second = planned(ui_port="0")
    after = found_in(application)
    assert len(application.processes) == 2
    assert answers(second)
    assert address_of(first).token != address_of(second).token
    assert address_of(first).fingerprint != address_of(second).fingerprint
    # Open pages find it.
    assert after.view_url == before.view_url


def test_two_that_plan_at_once_start_one(application: Application) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: planned(), range(4)))
    assert len(set(found)) == 1
    assert len(application.processes) == 1


@pytest.mark.parametrize("problem", ["open to all", "a link", "another user's"])
def test_a_folder_that_others_could_write_to_is_not_believed(
    problem: str, application: Application, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned()
    folder = application.folder / FOLDER
    if problem == "a link":
        elsewhere = application.folder / "elsewhere"
        folder.rename(elsewhere)
        folder.symlink_to(elsewhere)
    elif problem == "open to all":
        folder.chmod(0o770)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    assert planned() == PlannedCoordinator()
    assert len(warnings(caplog)) == 1
    assert str(folder) in warnings(caplog)[0]
    assert len(application.processes) == 1


def test_a_taken_port_costs_one_warning(application: Application, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert planned(coordinator_port=port) == planned(coordinator_port=port) == PlannedCoordinator()
    (warning,) = warnings(caplog)
    assert "coordinator.port" in warning
    assert not application.processes


def test_a_process_that_does_not_start_costs_one_warning(
    application: Application, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert planned() == planned() == PlannedCoordinator()
    (warning,) = warnings(caplog)
    assert str(application.folder / FOLDER / "log") in warning
    assert len(application.processes) == 1


@pytest.mark.usefixtures("application")
def test_an_error_about_processes_advises_nothing_about_ports(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert planned() == planned() == PlannedCoordinator()
    (warning,) = warnings(caplog)
    assert "its process cannot be started: Operation not permitted" in warning
    assert "coordinator.port" not in warning


SECRET_ENVIRONMENT = {
    "AWS_SECRET_ACCESS_KEY": "key",
    "KAFKA_PASSWORD": "key",
    "KRB5CCNAME": "FILE:/tmp/tickets",
    "_SPARK_AUTH_SECRET": "key",
    "HTTPS_PROXY": "http://user:key@proxy:1",
}


def test_coordinator_process_shows_no_secret(application: Application) -> None:
    found = planned(
        environ={
            "PYTHON_WORKER_FACTORY_SECRET": SPARKS_SECRET,
            "SPARK_JOB_ARTIFACT_UUID": "one-session-of-several",
            **SECRET_ENVIRONMENT,
            "TZ": "Europe/London",
        },
        **LOGIN,
    )
    address = address_of(found)
    driver = address_for_driver()
    assert driver is not None
    assert driver.token not in pickle.dumps(found), "it travels to executors"
    secrets = (address.token.hex(), repr(address.token), repr(driver.token), address.name, PASSWORD)
    assert not any(secret in repr(found) for secret in secrets)
    pid = application.processes[0].pid
    shown = subprocess.run(["ps", "-ww", "-o", "args=", "-p", str(pid)], capture_output=True, text=True)
    assert "kafka_sink.coordinator" in shown.stdout
    assert not any(secret in shown.stdout for secret in secrets)
    environ = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"TZ=Europe/London" in environ
    assert b"one-session" not in environ, "it serves all"
    assert not any(name.encode() in environ for name in SECRET_ENVIRONMENT)
    assert not any(secret.encode() in environ for secret in (*secrets, SPARKS_SECRET))
    folder = application.folder / FOLDER
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
        # What users call secret is in no file; what the coordinator's peers prove is in one.
        assert PASSWORD.encode() not in path.read_bytes()
        assert (b64encode(address.token) in path.read_bytes()) == (path.name == "found")


def test_the_process_never_has_a_credential_of_kafka(application: Application) -> None:
    planned(**LOGIN)
    pid = application.processes[0].pid
    regions = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    if not os.access(f"/proc/{pid}/mem", os.R_OK):
        pytest.skip("another process's memory may not be read here")
    with Path(f"/proc/{pid}/mem").open("rb", 0) as memory:
        for span, rights, *_ in regions:
            start, end = (int(one, 16) for one in span.split("-"))
            if rights.startswith("rw"):
                memory.seek(start)
                assert PASSWORD.encode() not in memory.read(end - start)


@pytest.mark.parametrize(
    ("owner", "name"), [(LocationFolder, "publish"), (subprocess, "Popen")], ids=["publish", "spawn"]
)
def test_no_frame_of_an_error_holds_a_secret(
    application: Application, monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> None:
    """Error trackers collect the local variables of every frame (the launcher's held the passwords)."""

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(owner, name, fails)
    own_class: dict[str, Any] = {
        "kafka_producer_circuit_breaker_class": "own.Breaker",
        "kafka_producer_circuit_breaker_token": PASSWORD,
    }
    with pytest.raises(RuntimeError) as caught:
        planned(ui_port="0", **own_class)
    frames = [frame for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
    seen = [f.f_locals for f in frames if "/kafka_sink/coordinator/" in f.f_code.co_filename]
    assert len(seen) > 2
    found = found_in(application)
    secrets = (
        []
        if found is None
        else [repr(found.address.token), b64encode(found.address.token).decode(), found.address.name]
    )
    for local in seen:
        assert not any(one in repr(local) for one in (PASSWORD, *secrets))


def test_another_folder_is_another_application(application: Application, tmp_path: Path) -> None:
    first = planned()
    other = tmp_path / "another"
    other.mkdir()
    assert planned(environ={"SPARK_LOCAL_DIRS": f"{other},{tmp_path}"}).address != first.address
    assert len(application.processes) == 2


def test_without_a_driver_or_a_folder_there_is_none(
    application: Application, caplog: pytest.LogCaptureFixture
) -> None:
    application.found = None
    assert [planned(), planned()] == [PlannedCoordinator()] * 2
    assert len(caplog.messages) == 1
    assert "because /proc does not show the driver's process" in caplog.text
    assert planned(environ={"SPARK_LOCAL_DIRS": None}) == PlannedCoordinator()
    assert not application.processes


def test_a_coordinator_that_keeps_ending_is_restarted_later_with_one_warning(
    application: Application, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches: every micro-batch starts a process and waits for it."""

    def plan_and_kill() -> int:
        before = len(application.processes)
        planned()
        for process in application.processes[before:]:
            process.kill()
            process.wait()
        return len(application.processes) - before

    assert [plan_and_kill() for _ in range(5)] == [1, 1, 0, 0, 0]
    # As if ten seconds had passed.
    spark_application.forget(UNAVAILABLE)
    assert plan_and_kill() == 1
    assert len(warnings(caplog)) == 1
    assert "had ended" in warnings(caplog)[0]
    assert str(application.folder / FOLDER / "log") in warnings(caplog)[0]


def test_the_first_of_sparks_folders_that_can_be_written_to_is_used(
    application: Application,
    environ: Environ,
    caplog: pytest.LogCaptureFixture,
) -> None:
    there = {"SPARK_LOCAL_DIRS": f"/proc/none,{application.folder}"}
    first, second = planned(environ=there), planned(environ=there)
    assert address_of(first) == second.address
    assert (application.folder / FOLDER).is_dir()
    environ(SPARK_LOCAL_DIRS="/proc/none,/proc/nor/this")
    for _ in range(3):
        assert planned() == PlannedCoordinator()
    assert len(warnings(caplog)) == 1
    assert len(application.processes) == 1


@pytest.fixture
def imports_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, list[str]], None]:
    """Makes this folder the current one, and this the path for imports."""

    def imports(folder: Path, path: list[str]) -> None:
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", path)

    return imports


def test_relative_paths_are_those_of_the_planning_worker(
    application: Application, imports_in: Callable[[Path, list[str]], None]
) -> None:
    """Catches: a coordinator that does not find the package, as it runs in another folder."""
    root = Path(__file__).parents[2]
    imports_in(root, [".", *(entry for entry in sys.path if Path(entry or ".").resolve() != root)])
    assert answers(planned(environ={"PYTHONPATH": None}))
    environ = Path(f"/proc/{application.processes[0].pid}/environ").read_bytes().split(b"\0")
    (path,) = [one.partition(b"=")[2].decode() for one in environ if one.startswith(b"PYTHONPATH=")]
    assert path.split(os.pathsep)[0] == str(root)


@pytest.mark.usefixtures("application")
def test_coordinator_imports_nothing_from_folders_that_other_users_may_write_to(
    tmp_path: Path, imports_in: Callable[[Path, list[str]], None]
) -> None:
    """Catches: a driver started in /tmp whose coordinator imports a json.py that lies there."""
    shared, evidence = tmp_path / "shared", tmp_path / "was-run"
    shared.mkdir()
    for name in ("json", "hmac"):
        (shared / f"{name}.py").write_text(f"open({str(evidence)!r}, 'w').close()\nraise ImportError\n")
    shared.chmod(0o777)
    imports_in(shared, [str(shared), "", *sys.path])
    assert answers(planned())
    assert not evidence.exists()


@pytest.mark.usefixtures("application")
def test_the_live_view_opens_with_the_first_write_that_wants_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert not address_of(planned()).has_view
        first, second = planned(ui_port="0"), planned(ui_port="0")
        # Whoever plans later reports, too.
        assert planned() == first == second
        assert address_of(first).has_view
    assert len([line for line in caplog.messages if "the live view is at http://127.0.0.1:" in line]) == 1


@pytest.mark.usefixtures("application")
def test_a_live_view_that_cannot_open_costs_one_warning_for_each_port(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The queries of an application may have different ports. Catches: a warning for each micro-batch."""
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as other:
        for server in (taken, other, taken, other):
            assert not address_of(planned(ui_port=str(server.getsockname()[1]))).has_view
        assert address_of(planned(ui_port="0")).has_view, "another port is tried"
    assert len([line for line in caplog.messages if "the live view could not be opened" in line]) == 2


@pytest.mark.parametrize("by", ["the job", "environment", "Spark's configuration"])
def test_coordinator_can_be_switched_off(by: str, application: Application) -> None:
    if by == "Spark's configuration":
        application.arguments = ["java", "-c", "spark.kafka-chunked.coordinator.enabled=false"]
    environ = {"KAFKA_CHUNKED_COORDINATOR_ENABLED": "false"} if by == "environment" else {}
    found = planned(environ=environ, coordinator_enabled="false" if by == "the job" else "true")
    assert found == PlannedCoordinator()
    assert not application.processes
    assert not (application.folder / FOLDER).exists()


@pytest.mark.parametrize(
    ("conf", "environ", "expected"),
    [
        (["--conf", "spark.driver.bindAddress=127.0.0.5"], {"SPARK_LOCAL_IP": "127.0.0.1"}, "127.0.0.5"),
        ([], {"SPARK_LOCAL_IP": "[::1]"}, "::1"),
        ([], {"SPARK_LOCAL_IP": "0.0.0.0"}, "127.0.0.1"),
    ],
)
def test_coordinator_listens_on_the_address_of_the_driver(
    conf: list[str], environ: dict[str, str], expected: str, application: Application
) -> None:
    """Catches: one that listens on all addresses, and one that cannot be had where hosts have IPv6 only."""
    application.arguments = ["java", *conf, "pyspark-shell"]
    found = planned(environ={"SPARK_LOCAL_IP": None, **environ})
    assert answers(found)
    port = address_of(found).port
    socket.create_connection((expected, port)).close()
    if "0.0.0.0" not in environ.values():
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.9", port))
    # Tasks get its address only where no other host could reach it.
    assert address_of(found).host == ("" if "0.0.0.0" in environ.values() else expected)


def test_planning_costs_files_only_where_it_runs(
    application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned()
    application.processes[0].send_signal(signal.SIGSTOP)
    monkeypatch.setattr(client, "connect", lambda *_: pytest.fail("planning connects to the coordinator"))
    assert address_of(planned())
    application.processes[0].send_signal(signal.SIGCONT)
