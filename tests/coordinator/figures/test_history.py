"""What outlives the application. Catches: a lost moment, files that grow, a page that cannot open them."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from kafka_sink import view
from kafka_sink.coordinator.figures import history
from kafka_sink.coordinator.figures.history import FORMER, History, append, files_in
from kafka_sink.coordinator.process.placement import ui_history
from kafka_sink.errors import ConfigurationError
from kafka_sink.options import parse
from kafka_sink.view import Recorded
from tests.support.reported_figures import CLUSTER, Board, final, report


class Night:
    """An application whose figures are recorded for some minutes."""

    def __init__(self, folder: Path) -> None:
        self.board = Board()
        self.history = History(self.board.figures, folder)
        self.second = 0
        self.board.figures._wall_s = lambda: 1_790_000_000.0 + self.second

    def run(self, seconds: int, *, reports: bool = True) -> None:
        for _ in range(seconds):
            self.second += 1
            if reports:
                self.board.report(report(100 * self.second), 1_000.0 * self.second)
            self.board.figures.sample(1_000.0 * self.second)
            self.history.record(1_000.0 * self.second, 1_790_000_000.0 + self.second)

    def close(self) -> Path:
        self.history.close(1_000.0 * self.second, 1_790_000_000.0 + self.second)
        return self.history.path


def test_last_nights_job_can_be_looked_at(tmp_path: Path) -> None:
    night = Night(tmp_path)
    night.run(300)
    night.board.figures.note_failure("w", "task 3 on worker-1: no disk")
    night.board.figures.end_write(CLUSTER, final(30_000, outcome="aborted", cause="no disk"), 300_000.0)
    night.run(3_600, reports=False)
    path = night.close()
    recorded = Recorded(path)
    last = recorded.last()
    assert last["jobs"][0]["cause"] == "no disk"
    assert [one["text"] for one in last["events"]] == [
        "write w aborted: no disk",
        "a task failed: task 3 on worker-1: no disk",
        "write w running",
    ]
    assert last["recorded"]["span"] == [1_790_000_001.0, 1_790_003_900.0]
    # At the start, each minute, at the end of the write and of the application.
    assert 6 <= len(last["recorded"]["times"]) <= 9
    assert [one[1] for one in last["history"]][1:29] == [100.0] * 28
    assert path.stat().st_size < 100_000
    assert path.stat().st_mode & 0o777 == 0o640 & ~_umask()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_a_file_that_is_full_becomes_the_former_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_MAX_BYTES", 1_000)
    path = tmp_path / "kafka-chunked-1.jsonl"
    for number in range(100):
        append(path, json.dumps({"snapshot": {"time": number}}).encode() + b"\n")
    assert sum(one.stat().st_size for one in tmp_path.iterdir()) < 2_100
    times = [one["time"] for one in Recorded(path).snapshots]
    assert times == list(range(times[0], 100))
    assert len(times) > 25
    # Neither samples nor events.
    assert Recorded(path).last()["recorded"]["span"] == [times[0], 99]


def test_a_folder_keeps_the_last_applications(tmp_path: Path) -> None:
    for number in range(30):
        for end in ("", FORMER):
            (tmp_path / f"kafka-chunked-20261101T0000{number:02}-7.jsonl{end}").touch()
    (tmp_path / "orders.jsonl").touch()
    Night(tmp_path).close()
    left = files_in(tmp_path)
    assert len(left) == 19, "and that of this application, which had nothing to say"
    assert left[-1].name == "kafka-chunked-20261101T000011-7.jsonl"
    assert (tmp_path / "orders.jsonl").exists()


def test_a_slow_disk_does_not_hold_the_coordinator_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    monkeypatch.setattr(history, "append", lambda path, line: goes_on.wait(60))
    monkeypatch.setattr(history, "_CLOSE_S", 0.0)
    night = Night(tmp_path)
    for number in range(5_000):
        night.board.figures.note_failure("w", str(number))
        night.run(1)
    night.close()
    assert night.history._lines.qsize() == history._MAX_WAITING
    goes_on.set()


def got(url: str) -> Any:
    with urlopen(url, timeout=10) as response:
        return json.loads(response.read())


def test_the_page_opens_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    night = Night(tmp_path)
    night.run(130)
    night.close()
    # What an application that was killed leaves.
    append(night.history.path, b'{"snapshot": {"ti')
    until = threading.Event()
    shown = threading.Thread(target=view.main, args=([str(tmp_path)], until))
    shown.start()
    url = ""
    while shown.is_alive() and not url:
        url = next((one for one in capsys.readouterr().out.split() if one.startswith("http")), "")
    try:
        data = got(url + "figures.json")
        assert len(data["recorded"]["times"]) == 4
        assert got(url + "figures/1.json")["time"] == data["recorded"]["times"][1]
        with urlopen(url, timeout=10) as response:
            assert b"kafka-chunked" in response.read()
    finally:
        until.set()
        shown.join(10)


@pytest.mark.parametrize("content", [None, "{}\n", "no json\n", "[1]\n"])
def test_what_is_no_history_is_named(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x"
    if content is not None:
        path.write_text(content)
    assert view.main([str(path)]) == 1
    assert str(path) in capsys.readouterr().err
    assert view.main([str(tmp_path)]) == 1
    assert "holds no history" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("/nowhere/x", "must be a folder on the driver's host that it may write to"),
        ("kept", "must be an absolute path"),
        ("s3://bucket/kept", "only files on the driver's host"),
    ],
)
def test_a_folder_that_cannot_be_used_fails_planning(given: str, says: str, tmp_path: Path) -> None:
    required = {"kafka.bootstrap.servers": "b:9092"}
    options = parse({**required, "ui.history.path": given}).options
    with pytest.raises(ConfigurationError, match=f"'ui.history.path' = {given}.*{says}"):
        ui_history(options, {})
    assert ui_history(options, {"KAFKA_CHUNKED_UI_HISTORY_PATH": f"file://{tmp_path}"}) == str(tmp_path)
    assert ui_history(parse(required).options, {}) == ""
