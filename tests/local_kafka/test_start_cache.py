"""The cache that a first start of Kafka leaves for later starts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from local_kafka.jars import Java
from local_kafka.start_cache import CHECKPOINTS, CLASSES, MAX_FOLDERS, StartCache

# Without it, a Java that is not OpenJDK's does not start.
LENIENT = "-XX:+IgnoreUnrecognizedVMOptions"


@pytest.fixture
def cache(tmp_path: Path) -> StartCache:
    (tmp_path / "java").touch()
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / "kafka.jar").touch()
    return cache_of(tmp_path)


def cache_of(folder: Path) -> StartCache:
    """Of a user whose caches are in the folder."""
    java = Java(str(folder / "java"), 17)
    return StartCache.of(java, folder / "jars", {"XDG_CACHE_HOME": str(folder / "cache")})


def formatted(folder: Path, checkpoint: str = CHECKPOINTS[0]) -> Path:
    data = folder / "formatted"
    (data / checkpoint).parent.mkdir(parents=True)
    (data / checkpoint).write_bytes(b"features")
    return data


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_checkpoint_comes_back_in_a_new_data_folder(
    cache: StartCache, tmp_path: Path, checkpoint: str
) -> None:
    """Catches: since Kafka 4.4, which writes it elsewhere, each broker's start ran the tool again."""
    data = tmp_path / "broker-0" / "data"
    assert not cache.restore_checkpoint(data)
    assert not data.exists()
    cache.keep_checkpoint(formatted(tmp_path, checkpoint))
    assert cache.restore_checkpoint(data)
    files = [path for path in data.rglob("*") if path.is_file()]
    assert [(str(path.relative_to(data)), path.read_bytes()) for path in files] == [(checkpoint, b"features")]


def test_classes_are_read_once_they_were_written(cache: StartCache, tmp_path: Path) -> None:
    assert cache.flags_to_read_classes() == []
    flags = cache.flags_to_write_classes(tmp_path)
    assert LENIENT in flags
    (written,) = (flag for flag in flags if "ArchiveClassesAtExit" in flag)
    cache.keep_classes(tmp_path)
    assert cache.flags_to_read_classes() == [], "there were none"
    assert list(tmp_path.glob("cache/kafka-chunked/*/*")) == []
    Path(written.partition("=")[2]).write_bytes(b"classes")
    cache.keep_classes(tmp_path)
    flags = cache.flags_to_read_classes()
    assert flags[0] == LENIENT
    (read,) = (flag for flag in flags if "SharedArchiveFile" in flag)
    assert Path(read.partition("=")[2]).read_bytes() == b"classes"


@pytest.mark.parametrize("changed", ["java", "jars/kafka.jar"])
def test_another_java_or_other_jars_begin_anew(cache: StartCache, tmp_path: Path, changed: str) -> None:
    """Catches: a broker with jars that were built anew in their place, and the features of the old ones."""
    cache.keep_checkpoint(formatted(tmp_path))
    same = cache_of(tmp_path)
    assert same.restore_checkpoint(tmp_path / "same")
    (tmp_path / changed).write_text("another one")
    other = cache_of(tmp_path)
    assert not other.restore_checkpoint(tmp_path / "other")


def test_a_cache_that_cannot_be_written_is_done_without(cache: StartCache, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder would be")
    formatted(tmp_path)
    # A user without a home has none, nor is there one where a jar is gone.
    (tmp_path / "jars" / "gone.jar").symlink_to(tmp_path / "nowhere")
    for one in (cache, cache_of(tmp_path), StartCache(None)):
        one.keep_checkpoint(tmp_path / "formatted")
        assert not one.restore_checkpoint(tmp_path / "data")
        one.keep_classes(tmp_path)
        assert one.flags_to_read_classes() == []
        assert one.flags_to_write_classes(tmp_path) == [], "seconds at each end, for nothing"


def test_a_damaged_checkpoint_is_done_without(cache: StartCache, tmp_path: Path) -> None:
    """Catches: brokers that do not start since the machine lost power while the file was written."""
    formatted(tmp_path)
    for size in (0, 20, 39):
        cache.keep_checkpoint(tmp_path / "formatted")
        (kept,) = tmp_path.glob("cache/kafka-chunked/*/*")
        kept.write_bytes(kept.read_bytes()[:size])
        assert not cache.restore_checkpoint(tmp_path / "data")
        assert not (tmp_path / "data").exists()
    cache.keep_checkpoint(tmp_path / "formatted")
    assert cache.restore_checkpoint(tmp_path / "data")


def test_folders_of_javas_and_kafkas_that_are_not_used_any_more_are_deleted(
    cache: StartCache, tmp_path: Path
) -> None:
    """Catches: another 50 MB after each update of Java or of the jars, for ever."""
    data, root = formatted(tmp_path), tmp_path / "cache" / "kafka-chunked"
    cache.keep_checkpoint(data)
    (present,) = root.iterdir()
    os.utime(present, (0, 0))
    for at_s in range(1, MAX_FOLDERS + 1):
        other = root / f"starts-{at_s}"
        other.mkdir()
        (other / CLASSES).touch()
        os.utime(other, (at_s, at_s))
    (root / "kafka-4.3.0").mkdir()
    same = cache_of(tmp_path)
    (data / CLASSES).touch()
    same.keep_classes(data)
    names = {"kafka-4.3.0", present.name, *(f"starts-{at_s}" for at_s in range(2, MAX_FOLDERS + 1))}
    assert {one.name for one in root.iterdir()} == names
    assert same.restore_checkpoint(tmp_path / "data")
