"""Small files are the old content or the new one; scratch folders that nobody holds go at a later start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from streaming_jobs.errors import SetupError
from streaming_jobs.storage import files
from streaming_jobs.storage.files import private_folder, scratch, write_atomic, write_json


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_replaced_whole_and_nothing_stays_beside_it(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "status.json"
    write_atomic(path, "old " * 1000, durable=durable)
    write_atomic(path, "grün", durable=durable)
    assert path.read_text(encoding="utf-8") == "grün"
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_content_and_no_litter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "stream.json"
    write_atomic(path, "old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_must_be_on_disk_is_flushed_before_it_is_named_and_its_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (done.append("fsync"), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("replace"), replace(a, b)))
    write_atomic(tmp_path / "stream.json", "new")
    assert done == ["fsync", "replace", "fsync"]
    done.clear()
    write_atomic(tmp_path / "status.json", "new", durable=False)
    assert done == ["replace"]


def test_a_json_value_keeps_its_order_and_what_is_no_json_leaves_the_old_content(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": 1, "a": None})
    assert list(json.loads((tmp_path / "a.json").read_text())) == ["b", "a"]
    write_json(tmp_path / "a.json", [1])
    with pytest.raises(TypeError):
        write_json(tmp_path / "a.json", object())
    assert json.loads((tmp_path / "a.json").read_text()) == [1]


def test_a_folder_is_made_for_its_owner_alone_and_kept_if_it_is_there(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "state" / "orders")
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "kept").touch()
    assert private_folder(folder) == folder
    assert (folder / "kept").exists()
    assert files.private_folder is private_folder


@pytest.mark.parametrize("count", [1, 12])
def test_each_of_several_files_is_synced_and_a_failure_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    paths = [tmp_path / str(number) for number in range(count)]
    for path in paths:
        path.write_text("x")
    synced: list[str] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(str(Path(f"/proc/self/fd/{fd}").readlink())), fsync(fd)))
    files.sync_each([*paths, tmp_path / "gone"])
    assert sorted(synced) == sorted(str(path) for path in paths)

    def fail(_: int) -> None:
        raise OSError("input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="input/output error"):
        files.sync_each(paths)


@pytest.mark.parametrize("below", ["file", "file/deeper", "/proc/nope"])
def test_a_folder_that_cannot_be_made_is_named_with_the_setting(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SetupError) as refused:
        private_folder(tmp_path / below)
    assert f"folder {tmp_path / below} cannot be made: " in refused.value.found
    assert "--set home=..." in refused.value.next_step
    assert isinstance(refused.value, OSError), "for those that can do without the file"
    assert str(refused.value).startswith("REC-003 folder ")


HOLD = """
import sys
from pathlib import Path
from streaming_jobs.storage.files import scratch
print(scratch(Path(sys.argv[1]), "spark").folder, flush=True)
sys.stdin.read()
"""


def holding(home: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that holds a folder until its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(home)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_folder_is_kept_while_a_process_that_cannot_be_seen_holds_it_and_removed_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from another container, where the pids of this one do not exist."""
    monkeypatch.setattr("psutil.pid_exists", lambda _: False)
    process, folder = holding(tmp_path)
    with process:
        (folder / "client.json").write_text("{}")
        mine = scratch(tmp_path, "kafka").folder
        assert (folder / "client.json").exists() and mine.is_dir()
        process.kill()
        process.wait()
        assert scratch(tmp_path, "kafka").folder == mine, "one of each kind for a process"
        scratch(tmp_path, "spark")
    assert not folder.exists() and mine.is_dir()


def test_a_process_that_inherits_the_descriptor_keeps_the_folder_after_its_starter(tmp_path: Path) -> None:
    code = HOLD.replace(
        "sys.stdin.read()",
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '60'], pass_fds=[scratch(Path(sys.argv[1]), 'spark').descriptor])\n"
        "print(child.pid, flush=True)",
    )
    run = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    folder, jvm = Path(run.stdout.readline().strip()), int(run.stdout.readline())
    try:
        assert run.wait() == 0
        scratch(tmp_path, "kafka")
        assert folder.is_dir()
    finally:
        subprocess.run(["kill", "-9", str(jvm)], check=True)
        run.stdout.read()  # it ends with the last process that has it
        run.stdout.close()
    scratch(tmp_path, "trial")
    assert not folder.exists()


def test_a_folder_without_a_lock_is_removed_and_one_that_was_taken_away_is_made_again(tmp_path: Path) -> None:
    mine = scratch(tmp_path, "spark").folder
    mine.joinpath("lock").unlink()
    mine.rmdir()
    stray = tmp_path / "scratch" / "123-spark"
    stray.mkdir()
    again = scratch(tmp_path, "spark").folder
    assert again.is_dir() and again != mine and not stray.exists()
