"""The cache and the download, from a repository on this machine."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from local_kafka import jars as jars_module
from local_kafka.errors import LocalBrokerError
from local_kafka.jars import (
    KAFKA_HOME_ENV,
    KAFKA_VERSION,
    REPOSITORY_ENV,
    Java,
    Progress,
    cache_root,
    find_jars,
)
from local_kafka.start_cache import StartCache
from tests.support.commands import start
from tests.support.waiting import until

FINAL = f"kafka-{KAFKA_VERSION}"
NAMES = (f"kafka_2.13-{KAFKA_VERSION}.jar", f"kafka-clients-{KAFKA_VERSION}.jar")


def silent(_: str) -> None:
    pass


class Repository(ThreadingHTTPServer):
    """A Maven repository on this machine, and the paths that it was asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.files = {f"/org/apache/kafka/{name}": name.encode() * 1000 for name in NAMES}
        self.pinned = {path[1:]: hashlib.sha256(content).hexdigest() for path, content in self.files.items()}
        self.held_path: str | None = None  # answers half of this one only, and waits
        self.fails = 0  # so many requests end without a response
        self.is_holding, self.goes_on = threading.Event(), threading.Event()
        self.environ = {REPOSITORY_ENV: f"http://127.0.0.1:{self.server_port}/"}

    def find(self, cache: Path, progress: Progress = silent, home: Path | None = None) -> Path:
        return find_jars(
            kafka_home=home, cache=cache, progress=progress, environ=self.environ, pinned=self.pinned
        )


class Handler(BaseHTTPRequestHandler):
    server: Repository

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        if self.server.fails:
            self.server.fails -= 1
            self.close_connection = True
            return
        content = self.server.files.get(self.path)
        if content is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.path == self.server.held_path:
            self.wfile.write(content[:1000])
            self.wfile.flush()
            self.server.is_holding.set()
            self.server.goes_on.wait(60)
            return
        self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def repository() -> Iterator[Repository]:
    with Repository() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.goes_on.set()
        server.shutdown()
        thread.join()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def test_downloads_once_and_then_uses_the_cache(
    repository: Repository, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    # Connections that end are tried again, here without a pause.
    monkeypatch.setattr(jars_module, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: None))
    repository.fails = 2
    first = repository.find(cache, lines.append)
    assert first == cache / FINAL
    assert sorted(path.name for path in first.iterdir()) == sorted(NAMES)
    assert lines[0].startswith("Downloading Apache Kafka")
    assert {line.split()[0] for line in lines[1:3]} == {"1/2", "2/2"}
    assert len(repository.asked) == 4
    assert repository.find(cache, lines.append) == first
    assert len(repository.asked) == 4
    assert sorted(path.name for path in cache.iterdir()) == [FINAL, f"{FINAL}.lock"]


def test_a_failed_download_says_what_to_do_and_leaves_nothing(repository: Repository, cache: Path) -> None:
    path = f"/org/apache/kafka/{NAMES[1]}"
    # A repository that answers with a jar of its own, then with none.
    repository.files[path] = b"something else"
    with pytest.raises(
        LocalBrokerError, match=rf"the downloaded {NAMES[1]} has another content .*, expected"
    ):
        repository.find(cache)
    del repository.files[path]
    with pytest.raises(LocalBrokerError) as raised:
        repository.find(cache)
    for part in (f"{path} could not be downloaded: HTTP Error 404", REPOSITORY_ENV, KAFKA_HOME_ENV):
        assert part in str(raised.value)
    assert [one.name for one in cache.iterdir()] == [f"{FINAL}.lock"]


def test_a_repository_is_an_address_without_a_login(cache: Path) -> None:
    for address in ("file:///etc", "https://user:hunter2@repository.example/maven2"):
        with pytest.raises(LocalBrokerError, match=f"{REPOSITORY_ENV} must be") as raised:
            find_jars(cache=cache, progress=silent, environ={REPOSITORY_ENV: address})
        assert "hunter2" not in str(raised.value)


def test_every_jar_of_the_version_is_pinned() -> None:
    pinned = jars_module.pinned_checksums()
    names = {path.rpartition("/")[2] for path in pinned}
    assert {*NAMES, f"kafka-tools-{KAFKA_VERSION}.jar"} <= names
    assert len(names) == len(pinned) == 46
    assert all(len(bytes.fromhex(digest)) == 32 for digest in pinned.values())


DOWNLOAD = """
import sys
import json
from pathlib import Path
from local_kafka import jars
print(jars.find_jars(cache=Path(sys.argv[1]), pinned=json.loads(sys.argv[2])))
"""


def start_download(repository: Repository, cache: Path, environ: dict[str, str]) -> subprocess.Popen[str]:
    environ = {**environ, **repository.environ}
    environ.pop(KAFKA_HOME_ENV, None)
    return start([sys.executable, "-c", DOWNLOAD, cache, json.dumps(repository.pinned)], environ)


def test_parallel_callers_wait_for_one_download(
    repository: Repository, cache: Path, project_environment: dict[str, str]
) -> None:
    repository.held_path = next(iter(repository.files))
    processes = [start_download(repository, cache, project_environment) for _ in range(3)]
    waiting = [process for process in processes if process.stderr and "Waiting" in process.stderr.readline()]
    assert len(waiting) == 2
    assert repository.is_holding.wait(60)
    repository.held_path = None
    repository.goes_on.set()
    outputs = [process.communicate(timeout=240) for process in processes]
    assert [out.strip() for out, _ in outputs] == [str(cache / FINAL)] * 3
    # The one that was held broke off, and was asked for again.
    assert len(repository.asked) == 3


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_download_leaves_no_cache_and_the_next_one_works(
    repository: Repository, cache: Path, project_environment: dict[str, str], how: signal.Signals
) -> None:
    repository.held_path = next(iter(repository.files))
    process = start_download(repository, cache, project_environment)
    until(lambda: list(cache.glob(f"{FINAL}.part-*/files/*.jar")))
    assert process.poll() is None
    process.send_signal(how)
    repository.goes_on.set()
    process.communicate(timeout=240)
    assert not (cache / FINAL).exists()
    repository.held_path = None
    repository.find(cache)
    assert sorted(path.name for path in cache.iterdir()) == [FINAL, f"{FINAL}.lock"]


def test_a_named_kafka_is_used_without_a_download(
    repository: Repository, cache: Path, tmp_path: Path
) -> None:
    for home, inside in ((tmp_path / "jars", ""), (tmp_path / "kafka", "libs")):
        (home / inside).mkdir(parents=True)
        for name in ("kafka_2.13-4.2.0.jar", "kafka-clients-4.2.0.jar"):
            (home / inside / name).touch()
        assert repository.find(cache, home=home) == (home / inside).resolve()
    assert repository.asked == []
    with pytest.raises(LocalBrokerError, match="contains no Kafka"):
        find_jars(cache=cache, environ={KAFKA_HOME_ENV: str(tmp_path)})


def test_the_cache_follows_xdg() -> None:
    assert cache_root({"XDG_CACHE_HOME": "/x"}) == Path("/x/kafka-chunked")
    assert cache_root({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "kafka-chunked"
    assert cache_root({}) == Path.home() / ".cache" / "kafka-chunked"


def test_a_cache_that_is_unwritable_is_a_clear_error(tmp_path: Path) -> None:
    # Not by permissions: they do not bind root, as whom containers run this.
    (tmp_path / "file").touch()
    (tmp_path / "other" / f"{FINAL}.lock").mkdir(parents=True)
    for cache in (tmp_path / "file" / "below", tmp_path / "other"):
        with pytest.raises(LocalBrokerError, match=f"{cache}.*XDG_CACHE_HOME"):
            find_jars(cache=cache, progress=silent)


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(LocalBrokerError, match=r"home directory.*XDG_CACHE_HOME"):
        find_jars(progress=silent, environ={})
    # One who has the jars elsewhere gets a broker all the same.
    assert StartCache.of(Java(sys.executable, 17), tmp_path, {}).flags_to_read_classes() == []
