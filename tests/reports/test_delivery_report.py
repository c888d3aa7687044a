"""The file with a line for each write."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import stat
import threading
from pathlib import Path
from unittest.mock import patch

import pytest

from kafka_sink.errors import ConfigurationError
from kafka_sink.reports import delivery_report
from tests.support.planned_writes import committed, lines, planned


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "report.jsonl"


def refused(path: Path, why: str) -> None:
    """At planning, and when a write ends."""
    with pytest.raises(ConfigurationError, match=rf"'delivery.report.path'.*{why}"):
        delivery_report.check(str(path))
    with pytest.raises(OSError, match=why):
        delivery_report.append(str(path), {})


def test_the_delivery_report_has_the_offsets_of_every_write(path: Path) -> None:
    write = planned(delivery_report_path=str(path))
    write.commit([committed((10, 14), (20, 29)), committed((15, 19)), committed((3, 4), partition=1)])
    write.abort([committed((100, 100)), None])
    first, second = lines(path)
    names = ("topic", "partition", "rows", "batches", "bytes", "offsets", "endOffset", "rowsWithoutOffset")
    assert first["partitions"] == [
        dict(zip(names, ("t", 0, 20, 2, 200, [[10, 29]], 30, 0), strict=True)),
        dict(zip(names, ("t", 1, 2, 1, 20, [[3, 4]], 5, 0), strict=True)),
    ]
    assert (first["outcome"], second["outcome"]) == ("committed", "aborted")
    assert second["partitions"][0]["endOffset"] == 101


def test_rows_whose_offsets_are_unknown_are_counted(path: Path) -> None:
    planned(delivery_report_path=f"file://{path}").commit([committed(records=7)])
    (partition,) = lines(path)[0]["partitions"]
    assert (partition["rowsWithoutOffset"], partition["endOffset"], partition["offsets"]) == (7, None, [])


def test_lines_of_writes_that_end_together_do_not_mix(path: Path) -> None:
    content = {"partitions": "x" * 200_000}

    def append() -> None:
        for _ in range(10):
            delivery_report.append(str(path), content)

    threads = [threading.Thread(target=append) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lines(path) == [content] * 40


def test_a_full_disk_leaves_no_half_line_and_fails_no_write(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write = planned(delivery_report_path=str(path))
    write.commit([committed((0, 9))])
    size = path.stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))
        write.commit([committed((10, 19))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.stat().st_size == size
    assert any("delivery.report.path" in message for message in caplog.messages)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("s3://bucket/report", "only files on the driver's host"),
        ("hdfs:/x", "only files on the driver's host"),
        ("s3://key:secret@bucket/report", r"'delivery.report.path' = \[hidden\]: only files"),
        ("report.jsonl", "must be an absolute path"),
        ("/nowhere/report.jsonl", "No such file or directory"),
    ],
)
def test_a_report_that_cannot_be_written_fails_at_planning(path: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        delivery_report.check(path)


@pytest.mark.parametrize("has_reader", [False, True])
def test_a_report_to_a_fifo_is_refused_instead_of_waiting_for_its_reader(
    path: Path, has_reader: bool
) -> None:
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if has_reader else None
    open_files = os.listdir("/proc/self/fd")
    refused(path, "not a regular file")
    assert os.listdir("/proc/self/fd") == open_files
    if reader is not None:
        os.close(reader)


def test_a_reader_who_holds_a_lock_keeps_no_line_out(path: Path) -> None:
    """Catches: whoever may read the report could suppress it by flock."""
    path.touch()
    with path.open() as reader:
        fcntl.flock(reader, fcntl.LOCK_EX)
        planned(delivery_report_path=str(path)).commit([committed((0, 9))])
    assert len(lines(path)) == 1


def test_the_report_is_for_its_owner_and_group_only(path: Path) -> None:
    old = os.umask(0)
    try:
        delivery_report.check(str(path))
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_symbolic_link_is_not_followed(path: Path, tmp_path: Path) -> None:
    """Catches: another user's link in a shared folder, through which the job appends to a file of its own."""
    target = tmp_path / "bashrc"
    target.write_text("")
    path.symlink_to(target)
    refused(path, "symbolic link")
    path.unlink()
    path.hardlink_to(target)
    refused(path, "hard link")
    assert target.read_text() == ""


@patch.object(os, "geteuid", lambda: os.getuid() + 1)
def test_another_users_file_is_refused(path: Path) -> None:
    """Its owner would read the report, and could change it."""
    path.write_text("")
    refused(path, "belongs to another user")
