"""The files of certificates and keys, without a look at their content: test_key_material.py."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from kafka_sink.errors import ConfigurationError
from kafka_sink.secret import Secret
from kafka_sink.security.settings import Store
from kafka_sink.security.stores import content_of, named


def store(path: Path) -> Store:
    return Store("kafka.ssl.truststore.location", "PEM", str(path))


def problem(path: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        content_of(store(path))
    return str(caught.value)


def test_content_is_that_of_the_file_or_the_inline_text(tmp_path: Path) -> None:
    path = tmp_path / "ca.pem"
    path.write_bytes(b"from a file")
    assert content_of(store(path)) == b"from a file"
    inline = Store("kafka.ssl.truststore.certificates", "PEM", text=Secret("given inline"))
    assert content_of(inline) == b"given inline"
    assert named(inline) == "Option 'kafka.ssl.truststore.certificates'"


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    said: list[str] = []
    reading = threading.Thread(target=lambda: said.append(problem(tmp_path / "pipe")), daemon=True)
    reading.start()
    reading.join(10)
    assert not reading.is_alive()
    assert "not a file" in said[0]
    assert "not a file" in problem(Path("/dev/null"))
