from __future__ import annotations

from pathlib import Path

import pytest

from local_kafka.errors import LocalBrokerError
from local_kafka.jars import find_java, install_hint, java_version


def fake_java(folder: Path, banner: str) -> Path:
    program = folder / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text(f"#!/bin/sh\necho '{banner}' >&2\n", encoding="utf-8")
    program.chmod(0o755)
    return program


@pytest.mark.parametrize(
    ("banner", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "25" 2025-09-16', 25),
        ('java version "1.8.0_441"', 8),
        ('openjdk version "21-ea" 2023-09-19', 21),
        ("Unable to locate a Java Runtime.", None),
    ],
)
def test_reads_the_feature_version(tmp_path: Path, banner: str, version: int | None) -> None:
    assert java_version(str(fake_java(tmp_path, banner))) == version


def test_a_path_that_does_not_run_has_no_version(tmp_path: Path) -> None:
    assert java_version(str(tmp_path / "nothing")) is None


def test_java_home_comes_before_path(tmp_path: Path) -> None:
    home = fake_java(tmp_path / "home", 'openjdk version "21.0.1"')
    path = fake_java(tmp_path / "path", 'openjdk version "17.0.1"')
    environ = {"JAVA_HOME": str(tmp_path / "home"), "PATH": f"{path.parent}:/usr/bin:/bin"}
    found = find_java(environ, search_installed=False)
    assert (found.path, found.version) == (str(home), 21)


def test_a_newer_java_on_path_is_taken_over_an_old_java_home(tmp_path: Path) -> None:
    fake_java(tmp_path / "home", 'openjdk version "11.0.2"')
    path = fake_java(tmp_path / "path", 'openjdk version "17.0.1"')
    environ = {"JAVA_HOME": str(tmp_path / "home"), "PATH": f"{path.parent}:/usr/bin:/bin"}
    assert find_java(environ, search_installed=False).path == str(path)


def test_too_old_says_which_and_how_to_install(tmp_path: Path) -> None:
    old = fake_java(tmp_path, 'java version "1.8.0_441"')
    with pytest.raises(LocalBrokerError) as raised:
        find_java({"JAVA_HOME": str(tmp_path), "PATH": str(tmp_path / "empty")}, search_installed=False)
    text = str(raised.value)
    assert "too old" in text
    assert f"{old} is Java 8" in text
    assert install_hint() in text


def test_missing_says_how_to_install(tmp_path: Path) -> None:
    with pytest.raises(LocalBrokerError, match="missing here") as raised:
        find_java({"PATH": str(tmp_path)}, search_installed=False)
    assert install_hint() in str(raised.value)


@pytest.mark.parametrize(
    ("system", "programs", "command"),
    [
        ("Darwin", (), "brew install openjdk@17"),
        ("Linux", ("apt-get",), "sudo apt-get install -y openjdk-17-jre-headless"),
        ("Linux", ("dnf", "yum"), "sudo dnf install -y java-17-openjdk-headless"),
        ("Linux", ("apk",), "sudo apk add openjdk17-jre-headless"),
        ("Linux", (), "install a Java 17 runtime and set JAVA_HOME to it"),
    ],
)
def test_the_hint_is_one_command_for_the_platform(
    system: str, programs: tuple[str, ...], command: str
) -> None:
    assert install_hint(system, lambda name: name if name in programs else None) == command


def test_a_java_that_hangs_is_passed_over(tmp_path: Path) -> None:
    program = tmp_path / "java"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    assert java_version(str(program), timeout_s=0.2) is None
