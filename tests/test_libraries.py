"""Every library that the package declares is one that the errors and the doctor know."""

from __future__ import annotations

import grp
import os
import pwd
import re
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kafka_sink import libraries

ROOT = Path(__file__).resolve().parents[1]


def test_libraries_match_pyproject() -> None:
    declared = re.search(r"^dependencies = \[(.*?)^\]", (ROOT / "pyproject.toml").read_text(), re.M | re.S)
    assert declared is not None
    names = set(re.findall(r'"([a-z0-9-]+)>=', declared[1]))
    assert names == {*libraries.OF_TASKS.values(), *libraries.OF_DRIVER.values()}


def test_the_documented_line_for_executors_has_what_tasks_need() -> None:
    line = re.search(r"^pip install (pyarrow .*)$", (ROOT / "docs/install.md").read_text(), re.M)
    assert line is not None
    assert set(line[1].split()) == set(libraries.OF_TASKS.values())


def explanation(module: str, *missing: str) -> str:
    """Of a failed import where these modules, and no others, are missing."""
    error = ModuleNotFoundError(f"No module named '{module}'", name=module)
    text = libraries.explanation(error, lambda name: name not in missing)
    assert text is not None
    return text


def test_a_missing_library_has_an_explanation_with_all_that_are_missing() -> None:
    text = explanation("cryptography.x509", "cryptography", "zlib_ng")
    assert text.startswith("No module named 'cryptography.x509': ")
    assert text.endswith(f"{sys.executable} -m pip install zlib-ng cryptography")
    assert explanation("pyspark", "pyspark").endswith("pip install pyspark")
    # One that is there and too old pip would take for done.
    text = explanation("cryptography.new")
    assert "has a version of cryptography that is too old" in text
    assert text.endswith("pip install --upgrade cryptography")
    assert explanation("cryptography.new", "lz4").endswith("pip install lz4"), "what is missing comes first"
    assert libraries.explanation(ModuleNotFoundError("No module named 'mine'", name="mine")) is None
    assert libraries.explanation(ImportError("lz4")) is None


def test_child_processes_import_nothing_from_folders_that_other_users_may_write_to(tmp_path: Path) -> None:
    """Catches: folders of another user; and theirs below."""
    own, shared, below = (tmp_path / name for name in ("own", "shared", "shared/below"))
    for folder, mode in ((own, 0o755), (shared, 0o777), (below, 0o755)):
        folder.mkdir()
        folder.chmod(mode)
    archive = own / "job.zip"
    archive.write_bytes(b"")
    everything = [str(one) for one in (own, shared, below, archive)]
    assert libraries.path_for_child(everything).split(os.pathsep) == [str(own), str(archive)]
    archive.chmod(0o666)
    assert libraries.path_for_child(everything) == str(own)
    if os.geteuid() == 0:
        os.chown(own, 12_345, -1)
        assert libraries.path_for_child(everything) == ""
        os.chown(own, 0, -1)
    shared.chmod(0o1777)
    assert libraries.path_for_child([str(shared), str(below)]) == str(below), "as in /tmp"
    assert not libraries.others_may_write(str(tmp_path / "missing"))


def test_group_writable_folder_is_unsafe_unless_the_group_is_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o775)
    assert not libraries.others_may_write(str(tmp_path)), "root's, or the user's"
    if os.geteuid() == 0:
        os.chown(tmp_path, -1, 12_345)
    name, group = pwd.getpwuid(os.geteuid()).pw_name, tmp_path.stat().st_gid
    for known, others in (
        ({}, True),
        ({group: SimpleNamespace(gr_name=name, gr_mem=[name])}, False),
        ({group: SimpleNamespace(gr_name="staff", gr_mem=[])}, True),
        ({group: SimpleNamespace(gr_name=name, gr_mem=["mallory"])}, True),
    ):
        monkeypatch.setattr(grp, "getgrgid", known.__getitem__)
        assert libraries.others_may_write(str(tmp_path)) == others, known


def test_a_module_is_run_without_the_current_folder(tmp_path: Path) -> None:
    planted = "raise SystemExit('planted')\n"
    for name in ("json", "argparse", "this"):
        (tmp_path / f"{name}.py").write_text(planted)
    folder = tmp_path if sys.version_info >= (3, 11) else Path("/")
    command = [*libraries.module_command("json.tool"), "--help"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_access_list_that_lets_another_user_write_counts(tmp_path: Path) -> None:
    """Catches: the group's bits are the list's mask then, and the group was this user's own."""

    def acl(permissions: int) -> bytes:
        # Like setfacl, set all permissions of the users and groups in the mask, which is the entry 0x10.
        of_user, of_group, mask = (0x02, permissions, 65_534), (0x04, 5, -1), (0x10, permissions | 5, -1)
        entries = [(0x01, 7, -1), of_user, of_group, mask, (0x20, 0, -1)]
        return struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *entry) for entry in entries)

    folder = tmp_path / "shared"
    folder.mkdir(0o700)
    try:
        os.setxattr(folder, "system.posix_acl_access", acl(5))
    except OSError:
        pytest.skip("this file system has no access lists")
    assert not libraries.others_may_write(str(folder)), "it may read"
    os.setxattr(folder, "system.posix_acl_access", acl(7))
    assert libraries.others_may_write(str(folder))
