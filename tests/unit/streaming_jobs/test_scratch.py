"""Scratch folders: a later start removes those that nobody holds, whatever the pids say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from streaming_jobs.platform.files import scratch

HOLD = """
import sys
from pathlib import Path
from streaming_jobs.platform.files import scratch
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
