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


def test_reads_the_feature_version(tmp_path: Path) -> None:
    for number, (banner, version) in enumerate(
        (
            ('openjdk version "17.0.15" 2025-04-15', 17),
            ('openjdk version "25" 2025-09-16', 25),
            ('java version "1.8.0_441"', 8),
            ('openjdk version "21-ea" 2023-09-19', 21),
            ("Unable to locate a Java Runtime.", None),
        )
    ):
        assert java_version(str(fake_java(tmp_path / str(number), banner))) == version
    assert java_version(str(tmp_path / "nothing")) is None
    # One that hangs is passed over.
    hanging = fake_java(tmp_path, "")
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    assert java_version(str(hanging), timeout_s=0.2) is None


# A newer Java on the path is taken over an old JAVA_HOME.
@pytest.mark.parametrize(("home", "taken"), [("21.0.1", ("home", 21)), ("11.0.2", ("path", 17))])
def test_java_home_comes_before_path_unless_it_is_too_old(
    tmp_path: Path, home: str, taken: tuple[str, int]
) -> None:
    fake_java(tmp_path / "home", f'openjdk version "{home}"')
    path = fake_java(tmp_path / "path", 'openjdk version "17.0.1"')
    environ = {"JAVA_HOME": str(tmp_path / "home"), "PATH": f"{path.parent}:/usr/bin:/bin"}
    found = find_java(environ, search_installed=False)
    assert (found.path, found.version) == (str(tmp_path / taken[0] / "bin" / "java"), taken[1])


def test_too_old_or_missing_says_how_to_install(tmp_path: Path) -> None:
    old = fake_java(tmp_path, 'java version "1.8.0_441"')
    nowhere = {"PATH": str(tmp_path / "empty")}
    for environ, parts in (
        ({"JAVA_HOME": str(tmp_path), **nowhere}, ["too old", f"{old} is Java 8"]),
        (nowhere, ["missing here"]),
    ):
        with pytest.raises(LocalBrokerError) as raised:
            find_java(environ, search_installed=False)
        for part in (*parts, install_hint()):
            assert part in str(raised.value)


def test_the_hint_is_one_command_for_the_package_manager() -> None:
    for programs, command in (
        (("apt-get",), "sudo apt-get install -y openjdk-17-jre-headless"),
        (("dnf", "yum"), "sudo dnf install -y java-17-openjdk-headless"),
        (("apk",), "sudo apk add openjdk17-jre-headless"),
        ((), "install a Java 17 runtime and set JAVA_HOME to it"),
    ):
        assert install_hint({name: name for name in programs}.get) == command
