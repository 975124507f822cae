"""Small files are the old content or the new one, whatever happens in between."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from streaming_jobs.errors import SetupError
from streaming_jobs.platform import files
from streaming_jobs.platform.files import private_folder, write_atomic, write_json


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


def test_a_json_value_keeps_its_order(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": 1, "a": None})
    assert list(json.loads((tmp_path / "a.json").read_text())) == ["b", "a"]


def test_a_value_that_is_no_json_leaves_the_old_content(tmp_path: Path) -> None:
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
