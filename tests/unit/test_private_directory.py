"""Directories that go with their owners, or soon after."""

import subprocess
import sys
from pathlib import Path

import pytest

from gateway.workers.private_directory import PrivateDirectory, remove_abandoned

_OWNER = """
import sys, tempfile
from gateway.workers.private_directory import PrivateDirectory
tempfile.tempdir = sys.argv[1]
print(PrivateDirectory().path, flush=True)
sys.stdin.read()
"""


def owner(parent: Path) -> tuple["subprocess.Popen[str]", Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", _OWNER, str(parent)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def end(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.communicate()


def test_one_that_a_killed_process_has_left_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    process, left = owner(tmp_path)
    (left / "redis.sock").touch()
    # As long as its owner lives nobody touches it.
    assert remove_abandoned(tmp_path) == []
    assert left.is_dir()
    end(process)
    mine = PrivateDirectory()
    assert list(tmp_path.iterdir()) == [mine.path]
    assert mine.path.stat().st_mode & 0o777 == 0o700
    mine.remove()
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_one_of_ours_stays(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "owner.lock").touch()
    (tmp_path / "warmgate-redis-link").symlink_to(elsewhere)
    (tmp_path / "warmgate-redis-being-made").mkdir()
    (tmp_path / "warmgate-redis-file").touch()
    (tmp_path / "other-redis").mkdir()
    (tmp_path / "other-redis" / "owner.lock").touch()
    before = sorted(tmp_path.rglob("*"))
    assert remove_abandoned(tmp_path) == []
    assert sorted(tmp_path.rglob("*")) == before
