"""The cache and the download, with a shell script in Java's place: what it does is written by each test."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from local_kafka import jars as jars_module
from local_kafka.errors import LocalBrokerError
from local_kafka.jars import (
    IVY_SETTINGS_ENV,
    KAFKA_HOME_ENV,
    KAFKA_VERSION,
    Java,
    cache_root,
    find_jars,
    pinned_checksums,
)
from tests.support.interrupts import interruptible

FINAL = f"kafka-{KAFKA_VERSION}"
NAMES = (f"kafka_2.13-{KAFKA_VERSION}.jar", f"kafka-clients-{KAFKA_VERSION}.jar")

# $jars is where Ivy is asked to retrieve to.
HEAD = """#!/bin/sh
echo "$@" >> "$CALLS"
while [ "$1" != "-retrieve" ]; do shift; done
jars=$(dirname "$2")
"""
BRING = HEAD + 'mkdir -p "$jars" && cp "$SOURCE"/*.jar "$jars"\n'


@pytest.fixture(autouse=True)
def _nothing_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KAFKA_HOME_ENV, raising=False)
    monkeypatch.delenv(IVY_SETTINGS_ENV, raising=False)


class Ivy:
    """A fake Java that plays Ivy, and the calls it got."""

    def __init__(self, folder: Path) -> None:
        self.calls_file = folder / "calls"
        self.source = folder / "source"
        self.source.mkdir()
        for name in NAMES:
            with zipfile.ZipFile(self.source / name, "w") as jar:
                jar.writestr("a", "b")
        self.program = folder / "java"
        self.java = Java(str(self.program), 17)
        self._checksums = {
            name: hashlib.sha256((self.source / name).read_bytes()).hexdigest() for name in NAMES
        }
        self.does(BRING)

    def checksums(self) -> dict[str, str]:
        return self._checksums

    def does(self, script: str) -> None:
        self.program.write_text(script, encoding="utf-8")
        self.program.chmod(0o755)

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines() if self.calls_file.exists() else []


@pytest.fixture
def ivy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ivy:
    fake = Ivy(tmp_path)
    monkeypatch.setenv("CALLS", str(fake.calls_file))
    monkeypatch.setenv("SOURCE", str(fake.source))
    monkeypatch.setattr(jars_module, "pinned_checksums", fake.checksums)
    return fake


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def silent(_: str) -> None:
    pass


def test_downloads_once_and_then_uses_the_cache(ivy: Ivy, cache: Path) -> None:
    lines: list[str] = []
    first = find_jars(ivy.java, cache=cache, progress=lines.append)
    assert first == cache / FINAL
    assert sorted(path.name for path in first.iterdir()) == sorted(NAMES)
    assert lines[0].startswith("Downloading Apache Kafka")
    assert find_jars(ivy.java, cache=cache, progress=lines.append) == first
    assert len(ivy.calls) == 1
    assert sorted(path.name for path in cache.iterdir()) == [FINAL, f"{FINAL}.lock"]


def test_progress_counts_the_jars(ivy: Ivy, cache: Path) -> None:
    ivy.does(
        BRING
        + """
echo "	found org.apache.kafka#kafka_2.13;4.3.0 in public"
echo "	found org.slf4j#slf4j-api;1.7.36 in public"
echo "	[SUCCESSFUL ] org.apache.kafka#kafka_2.13;4.3.0!kafka_2.13.jar (454ms)"
echo "	[SUCCESSFUL ] org.slf4j#slf4j-api;1.7.36!slf4j-api.jar (41ms)"
"""
    )
    lines: list[str] = []
    find_jars(ivy.java, cache=cache, progress=lines.append)
    assert lines[1:3] == ["  1/2 kafka_2.13 4.3.0", "  2/2 slf4j-api 1.7.36"]


def test_a_failed_download_is_summarised_and_leaves_nothing(ivy: Ivy, cache: Path) -> None:
    ivy.does(
        HEAD
        + """
mkdir -p "$jars"; echo half > "$jars/kafka.jar"
echo "		::          UNRESOLVED DEPENDENCIES         ::"
echo "		:: org.apache.kafka#kafka_2.13;4.3.0: not found"
echo "Host repo.example not found. url=x"
exit 1
"""
    )
    with pytest.raises(LocalBrokerError) as raised:
        find_jars(ivy.java, cache=cache, progress=silent)
    text = str(raised.value)
    assert "Host repo.example not found" in text
    assert "org.apache.kafka#kafka_2.13;4.3.0: not found" in text
    assert IVY_SETTINGS_ENV in text
    assert KAFKA_HOME_ENV in text
    assert [path.name for path in cache.iterdir()] == [f"{FINAL}.lock"]


def test_a_jar_with_another_content_is_not_cached(ivy: Ivy, cache: Path) -> None:
    """Catches: a repository that answers with a jar of its own, and with the digest of that."""
    with zipfile.ZipFile(ivy.source / NAMES[1], "w") as jar:
        jar.writestr("a", "something else")
    with pytest.raises(
        LocalBrokerError, match=rf"the downloaded {NAMES[1]} has another content .*, expected"
    ):
        find_jars(ivy.java, cache=cache, progress=silent)
    assert not (cache / FINAL).exists()


def test_a_jar_that_is_no_part_of_kafka_is_not_cached(ivy: Ivy, cache: Path) -> None:
    (ivy.source / "extra.jar").write_text("a class that the broker would load")
    with pytest.raises(LocalBrokerError, match=r"extra\.jar, which is not part of it"):
        find_jars(ivy.java, cache=cache, progress=silent)
    assert not (cache / FINAL).exists()


def test_a_download_without_the_server_is_not_cached(ivy: Ivy, cache: Path) -> None:
    (ivy.source / NAMES[0]).unlink()
    with pytest.raises(LocalBrokerError, match=f"lacks {NAMES[0]}"):
        find_jars(ivy.java, cache=cache, progress=silent)
    assert not (cache / FINAL).exists()


def test_every_jar_of_the_version_is_pinned() -> None:
    pinned = pinned_checksums()
    assert {*NAMES, f"kafka-tools-{KAFKA_VERSION}.jar"} <= pinned.keys()
    assert len(pinned) == 47
    assert all(len(bytes.fromhex(digest)) == 32 for digest in pinned.values())


DOWNLOAD = """
import sys
import json
from pathlib import Path
from local_kafka import jars
from local_kafka.jars import find_jars
from local_kafka.jars import Java
jars.pinned_checksums = lambda: json.loads(sys.argv[3])
print(find_jars(Java(sys.argv[1], 17), cache=Path(sys.argv[2])))
"""


def start_download(ivy: Ivy, cache: Path, environ: dict[str, str]) -> subprocess.Popen[str]:
    environ = {**environ, **{name: os.environ[name] for name in ("CALLS", "SOURCE")}}
    environ.pop(KAFKA_HOME_ENV, None)
    with interruptible():
        return subprocess.Popen(
            [sys.executable, "-c", DOWNLOAD, str(ivy.program), str(cache), json.dumps(ivy.checksums())],
            env=environ,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )


def test_parallel_callers_wait_for_one_download(
    ivy: Ivy, cache: Path, project_environment: dict[str, str]
) -> None:
    ivy.does(BRING.replace("mkdir", "sleep 1; mkdir"))
    processes = [start_download(ivy, cache, project_environment) for _ in range(3)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [out.strip() for out, _ in outputs] == [str(cache / FINAL)] * 3
    assert len(ivy.calls) == 1
    assert sum("Waiting for another process" in err for _, err in outputs) == 2


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_download_leaves_no_cache_and_the_next_one_works(
    ivy: Ivy, cache: Path, project_environment: dict[str, str], how: signal.Signals
) -> None:
    ivy.does(HEAD + 'mkdir -p "$jars"; cp "$SOURCE/' + NAMES[0] + '" "$jars"; exec sleep 2\n')
    process = start_download(ivy, cache, project_environment)
    while not list(cache.glob(f"{FINAL}.part-*/jars/*.jar")):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(how)
    process.communicate(timeout=60)
    assert not (cache / FINAL).exists()
    ivy.does(BRING)
    find_jars(ivy.java, cache=cache, progress=silent)
    assert sorted(path.name for path in cache.iterdir()) == [FINAL, f"{FINAL}.lock"]


def test_an_ivy_settings_file_is_passed_on(ivy: Ivy, cache: Path, tmp_path: Path) -> None:
    settings = tmp_path / "settings.xml"
    settings.write_text("<ivysettings/>")
    find_jars(ivy.java, cache=cache, ivy_settings=settings, progress=silent)
    assert f"-settings {settings}" in ivy.calls[0]


def test_the_ivy_settings_variable_is_read(
    ivy: Ivy, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(IVY_SETTINGS_ENV, str(tmp_path / "none.xml"))
    with pytest.raises(LocalBrokerError, match=r"none\.xml does not exist"):
        find_jars(ivy.java, cache=cache, progress=silent)


def test_a_proxy_variable_reaches_java(ivy: Ivy, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://user:secret@proxy.example:3128/")
    find_jars(ivy.java, cache=cache, progress=silent)
    assert "-Dhttps.proxyHost=proxy.example -Dhttps.proxyPort=3128" in ivy.calls[0]
    assert "secret" not in ivy.calls[0]


@pytest.mark.parametrize("inside", ["", "libs"])
def test_a_named_kafka_is_used_without_a_download(ivy: Ivy, cache: Path, tmp_path: Path, inside: str) -> None:
    home = tmp_path / "kafka"
    (home / inside).mkdir(parents=True)
    for name in ("kafka_2.13-4.2.0.jar", "kafka-clients-4.2.0.jar"):
        (home / inside / name).touch()
    assert find_jars(ivy.java, kafka_home=home, cache=cache) == (home / inside).resolve()
    assert ivy.calls == []


def test_a_named_folder_without_kafka_is_an_error(
    ivy: Ivy, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KAFKA_HOME_ENV, str(tmp_path))
    with pytest.raises(LocalBrokerError, match="contains no Kafka"):
        find_jars(ivy.java, cache=cache)


def test_no_pyspark_is_an_error_that_offers_another_way(
    ivy: Ivy, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("local_kafka.jars.importlib.util.find_spec", lambda _: None)
    monkeypatch.delenv("SPARK_HOME", raising=False)
    with pytest.raises(LocalBrokerError, match=KAFKA_HOME_ENV):
        find_jars(ivy.java, cache=cache, progress=silent)


def test_the_cache_follows_xdg() -> None:
    assert cache_root({"XDG_CACHE_HOME": "/x"}) == Path("/x/kafka-chunked")
    assert cache_root({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "kafka-chunked"
    assert cache_root({}) == Path.home() / ".cache" / "kafka-chunked"


def test_an_unwritable_cache_is_a_clear_error(ivy: Ivy, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LocalBrokerError, match="XDG_CACHE_HOME"):
        find_jars(ivy.java, cache=tmp_path / "file" / "cache", progress=silent)


@pytest.mark.parametrize("blocked", ["cannot be written to", "is of another user"])
def test_a_cache_that_is_there_and_unwritable_is_a_clear_error(
    ivy: Ivy, cache: Path, blocked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Not by permissions: they do not bind root, as whom containers run this.
    cache.mkdir()
    if blocked == "cannot be written to":
        monkeypatch.setattr("local_kafka.jars.tempfile.mkdtemp", refuse)
    else:
        (cache / f"{FINAL}.lock").mkdir()
    with pytest.raises(LocalBrokerError, match=f"cannot use the cache folder {cache}: .*XDG_CACHE_HOME"):
        find_jars(ivy.java, cache=cache, progress=silent)


def refuse(**_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_user_without_a_home_is_told_what_to_set(ivy: Ivy, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(LocalBrokerError, match=r"home directory.*XDG_CACHE_HOME"):
        find_jars(ivy.java, progress=silent)
