"""Options of the programs that take those of a job."""

from __future__ import annotations

from pathlib import Path

import pytest

from kafka_sink.doctor import main


@pytest.mark.parametrize(
    ("text", "reason"), [(None, "No such file"), ("hunter2", "not a JSON"), ("[1]", "not a JSON")]
)
def test_a_file_of_options_that_cannot_be_read_is_named_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, reason: str
) -> None:
    """Catches: eight lines of traceback, for a path that is misspelt."""
    file = tmp_path / "options.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(SystemExit):
        main(["--options-file", str(file)])
    said = capsys.readouterr().err
    assert f"--options-file {file}: {reason}" in said or f"{file}: it is {reason}" in said
    assert "hunter2" not in said
