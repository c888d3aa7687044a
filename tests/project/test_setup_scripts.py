"""The Makefile and its two scripts, on machines that are made up with a PATH of fake programs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import run

ROOT = Path(__file__).resolve().parents[2]


class Machine:
    """A PATH that holds the shell's basics and what a test puts there."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.calls = folder / "calls"
        for name in ("sh", "sed", "head", "cat", "env", "touch", "chmod", "rm"):
            path = shutil.which(name)
            assert path is not None
            (self.bin / name).symlink_to(path)
        self.has("id", "echo 1000")

    def has(self, name: str, script: str) -> None:
        program = self.bin / name
        program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        program.chmod(0o755)

    def is_roots(self, apt: str = "") -> None:
        """With an apt that notes what it is called with, and does this."""
        self.has("id", "echo 0")
        self.has("apt-get", f'echo "$@" >> "$CALLS"\n{apt}')

    def runs(
        self, script: str, *args: str, folder: Path | None = None, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        environ = {"PATH": str(self.bin), "CALLS": str(self.calls), **environ}
        return run([self.bin / "sh", ROOT / "tools" / script, *args], environ, folder=folder, code=None)


@pytest.fixture
def machine(_programs: None, tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_setup_leaves_installed_programs_alone(machine: Machine) -> None:
    machine.has("apt-get", 'echo "$@" >> "$CALLS"')
    for program in ("chromium", "chromedriver"):
        machine.has(program, "exit 0")
    assert machine.runs("ensure_chromium.sh").returncode == 0
    for version in ("17.0.15", "25"):
        machine.has("java", f"""echo 'openjdk version "{version}" 2025-04-15' >&2""")
        assert machine.runs("ensure_java.sh").returncode == 0
    assert not machine.calls.exists()


@pytest.mark.parametrize("script", ["ensure_java.sh", "ensure_chromium.sh"])
def test_an_installation_is_announced_and_can_be_refused(machine: Machine, script: str) -> None:
    """Catches: `make demo` as root, which installed packages for the whole system unasked."""
    machine.is_roots()
    refused = machine.runs(script, KAFKA_CHUNKED_INSTALL="no")
    assert refused.returncode == 1
    assert "apt-get install -y" in refused.stderr
    assert not machine.calls.exists()
    done = machine.runs(script)
    said = done.stdout.partition("KAFKA_CHUNKED_INSTALL=no")
    assert "installing" in said[0]
    assert said[1]
    assert machine.calls.exists()


def test_root_with_apt_installs_a_headless_java(machine: Machine) -> None:
    java = "#!/bin/sh\\necho openjdk version '\\\"17.0.1\\\"' >&2"
    machine.is_roots(
        f'case "$*" in *openjdk-17-jre-headless*) printf "%b" "{java}" > {machine.bin}/java; '
        f"chmod +x {machine.bin}/java;; esac",
    )
    done = machine.runs("ensure_java.sh")
    assert done.returncode == 0, done.stderr
    assert "Java 17 installed" in done.stdout
    assert "install -y -qq --no-install-recommends openjdk-17-jre-headless" in machine.calls.read_text()


def test_root_with_apt_that_has_no_java_fails_clearly(machine: Machine) -> None:
    machine.is_roots("exit 100")
    done = machine.runs("ensure_java.sh")
    assert (done.returncode, "apt installed no Java 17" in done.stderr) == (1, True)
    assert "default-jre-headless" in machine.calls.read_text()


def test_root_with_apt_installs_a_browser_and_its_driver(machine: Machine) -> None:
    machine.has("chromium", "exit 0")
    machine.is_roots()
    assert machine.runs("ensure_chromium.sh").returncode == 0
    assert "install -y -qq --no-install-recommends chromium chromium-driver" in machine.calls.read_text()


@pytest.mark.parametrize(
    ("script", "program", "command"),
    [
        ("ensure_java.sh", "apt-get", "sudo apt-get install -y openjdk-17-jre-headless"),
        ("ensure_java.sh", "dnf", "sudo dnf install -y java-17-openjdk-headless"),
        ("ensure_java.sh", "apk", "sudo apk add openjdk17-jre-headless"),
        ("ensure_java.sh", "zypper", "sudo zypper install -y java-17-openjdk-headless"),
        ("ensure_chromium.sh", "apt-get", "sudo apt-get install -y chromium chromium-driver"),
    ],
)
def test_setup_prints_the_command_to_install_a_missing_program(
    machine: Machine, script: str, program: str, command: str
) -> None:
    machine.has(program, 'echo "$@" >> "$CALLS"')
    done = machine.runs(script)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].strip() == command
    assert not machine.calls.exists()


# An old Java, a bad JAVA_HOME beside a good Java, an old Python, one without venv.
@pytest.mark.parametrize(
    ("script", "program", "text", "said"),
    [
        ("ensure_java.sh", "java", """echo 'java version "1.8.0_441"' >&2""", "(Java 8)"),
        ("ensure_java.sh", "java", """echo 'openjdk version "17.0.15"' >&2""", "Unset JAVA_HOME"),
        (
            "setup_venv.sh",
            "a-python",
            'case "$1" in --version) echo Python 3.9.18;; *) exit 1;; esac',
            "Python 3.10 or newer is needed; a-python is: Python 3.9.18",
        ),
        (
            "setup_venv.sh",
            "a-python",
            'case "$*" in *ensurepip*) exit 1;; esac',
            "sudo apt-get install -y python3-venv",
        ),
    ],
)
def test_setup_reports_each_unusable_tool(
    machine: Machine, tmp_path: Path, script: str, program: str, text: str, said: str
) -> None:
    machine.has(program, text)
    environ = {"JAVA_HOME": "/nowhere"} if "JAVA_HOME" in said else {}
    done = machine.runs(script, "a-python", str(tmp_path / "venv"), folder=tmp_path, **environ)
    assert done.returncode == 1
    assert said in done.stderr


def test_an_environment_gets_the_pinned_versions_but_where_another_is_asked_for(
    machine: Machine, tmp_path: Path
) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    machine.has("new-python", 'echo "$@" >> "$CALLS"')
    (machine.bin / "new-python").rename(venv / "bin" / "python")
    machine.has("goodpython", "exit 0")
    done = machine.runs("setup_venv.sh", "goodpython", str(venv), "pyspark==4.1.1", folder=ROOT)
    assert done.returncode == 0, done.stderr
    installs = machine.calls.read_text().splitlines()[-1]
    editable = "--editable .[dev] --editable ./packages/local_kafka"
    assert f"--constraint {venv}/constraints.txt {editable} pyspark==4.1.1" in installs
    pinned = (venv / "constraints.txt").read_text().splitlines()
    assert any(line.startswith("mypy==") for line in pinned)
    assert not any(line.startswith("pyspark==") for line in pinned)


def test_make_help_lists_every_target() -> None:
    make = shutil.which("make")
    assert make is not None
    done = run([make, "help"], folder=ROOT)
    listed = re.findall(r"^  make ([a-z-]+) +\S", done.stdout, re.MULTILINE)
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None
    assert sorted(listed) == sorted(phony.group(1).split())
    assert {"demo", "test", "check", "bench", "docs", "broker", "clean"} <= set(listed)


@pytest.mark.parametrize("fails", ["", "test", "check"])
def test_ci_runs_checks_and_all_tests(tmp_path: Path, fails: str) -> None:
    """With a ``make`` that only says what it is asked for. Tests that run when a check fails are ended."""
    fake, begun, ended = (tmp_path / name for name in ("make", "begun", "ended"))
    fake.write_text(
        f"""#!/bin/sh
        [ "$1" = "-j2" ] && shift
        if [ "$1 {fails}" = "test check" ]; then
            trap 'touch {ended}; exit' INT
            touch {begun}
            sleep 200 & wait
        fi
        [ "$1 {fails}" = "check check" ] && until [ -e {begun} ]; do sleep 0.05; done
        [ "$1" = "{fails}" ] && exit 2
        echo "done: $1"
        """
    )
    fake.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    # What starts pytest may ignore SIGINT, and a shell cannot trap what was ignored before it.
    command = ["env", "--default-signal=INT", str(ROOT / ".ci" / "run")]
    done = run(command, environ, code=2 if fails else 0)
    said = re.findall("^done: (.*)$", done.stdout, re.MULTILINE)
    assert said[0] == "venv"
    if not fails:
        assert said[1] == "check"
        assert done.stdout.splitlines()[-1] == "done: test"
    assert ended.exists() == (fails == "check")


def test_this_python_is_one_that_is_promised() -> None:
    assert sys.version_info >= (3, 10)


@pytest.mark.usefixtures("_programs")
def test_make_check_fails_for_a_broken_link_in_the_docs(tmp_path: Path) -> None:
    """Catches: --quiet, with which mkdocs counts no warnings, so that --strict has no effect."""
    command = re.search(
        r"bin/mkdocs (build .*)", run(["make", "-n", "check"], dict(os.environ), folder=ROOT).stdout
    )
    assert command is not None
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "index.md"
    (tmp_path / "mkdocs.yml").write_text("site_name: x\n", encoding="utf-8")
    for link, code in (("index.md", 0), ("missing.md", 1)):
        page.write_text(f"[a link]({link})", encoding="utf-8")
        run(
            [sys.executable, "-m", "mkdocs", *command[1].split()],
            dict(os.environ),
            folder=tmp_path,
            code=code,
        )
